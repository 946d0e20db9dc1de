"""The engine beside `transformers` `generate` with padding, on ragged prompts of the trained tiny model, in one run.

    python -m bench.against_generate [--device cpu] [--json OUT.json]

Greedy, with as many new tokens for every prompt, so that both do the same work but for padding. The two take turns; the
tokens are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from pagedattn.bench.report import meta
from pagedattn.engine import LLM, SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
PROMPTS, SHORTEST, NEW, RUNS = 64, 4, 64, 5
LONGEST = (400, 1000)  # a case each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for longest in LONGEST:
        rows.append(row := compare(args.device, longest))
        speeds = f"engine {row['engine_tok_s']:.0f} tokens/s, generate {row['generate_tok_s']:.0f}"
        print(f"prompts of {SHORTEST} to {longest} tokens: {speeds}, {row['ratio']:.2f} times as fast", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"meta": meta([]), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def compare(device: str, longest: int) -> dict[str, Any]:
    """Tokens per second of both, medians of runs in turns; prompts have up to `longest` tokens."""
    import transformers

    draw = Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randint(SHORTEST, longest))] for _ in range(PROMPTS)]
    llm = LLM(MODEL, device=device, dtype="float32", num_kv_blocks=6000, enable_prefix_caching=False, log_interval=None)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = model.to(device).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

    def by_engine() -> list[list[int]]:
        return [[*output.token_ids] for output in llm.generate(prompts, params, progress=False)]

    def by_generate() -> list[list[int]]:
        options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
        with torch.inference_mode():
            return model.generate(ids, attention_mask=mask, eos_token_id=None, **options)[:, width:].tolist()

    same = sum(a == b for a, b in zip(by_engine(), by_generate(), strict=True))
    if same < PROMPTS - 1:  # one may part where two tokens tie
        raise SystemExit(f"only {same} of {PROMPTS} outputs are equal: nothing is timed")
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    for _ in range(RUNS):
        times["engine"].append(seconds(by_engine))
        times["generate"].append(seconds(by_generate))
    speeds = {name: PROMPTS * NEW / statistics.median(each) for name, each in times.items()}
    return {
        "prompts": PROMPTS,
        "longest_prompt": width,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": PROMPTS * NEW,
        "equal_outputs": same,
        "engine_tok_s": round(speeds["engine"], 1),
        "generate_tok_s": round(speeds["generate"], 1),
        "ratio": round(speeds["engine"] / speeds["generate"], 3),
        "device": device,
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
    }


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
