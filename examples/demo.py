"""`make demo`: a small Qwen3 model continues several prompts at once through the paged cache, on whatever is here."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pagedattn.engine import LLM, SamplingParams

_MODEL = Path(__file__).parent / "tiny-qwen3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=_MODEL, help="a Hugging Face model folder")
    parser.add_argument("--prompts", default=_MODEL / "prompts.txt", type=Path, help="one prompt per line")
    parser.add_argument("--max-tokens", default=160, type=int)
    parser.add_argument("--backend", default=None, help="an attention backend by name, such as TORCH")
    args = parser.parse_args()

    llm = LLM(args.model, backend=args.backend)
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [_question(llm, line) if line.endswith("?") else line for line in lines]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)

    texts = [" " if line.endswith("?") else "" for line in lines]
    tokens, peak, start = 0, 0.0, time.perf_counter()
    with tqdm(total=len(prompts) * args.max_tokens, unit="token", disable=None, file=sys.stderr) as bar:
        for delta in llm.stream(prompts, params):
            texts[delta.prompt_index] += delta.text
            tokens += len(delta.token_ids)
            peak = max(peak, llm.stats().cache_use)
            bar.update(len(delta.token_ids))
            if delta.finish_reason:
                bar.write(f"\n> {lines[delta.prompt_index]}{texts[delta.prompt_index]}")
    seconds = time.perf_counter() - start

    stats = llm.stats()
    print(f"\n{tokens} tokens of {len(prompts)} prompts in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    print(f"cache: {stats.num_blocks} blocks, {peak:.1%} in use at the peak, prefix hits {stats.hit_rate:.0%}")
    print(f"attention: {llm.describe_attention()}")


def _question(llm: LLM, text: str) -> list[int]:
    """A question goes through the model's chat template."""
    return llm.encode_chat([{"role": "user", "content": text}])


if __name__ == "__main__":
    main()
