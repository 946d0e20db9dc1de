"""Decode of a Hugging Face model over the paged cache against `sdpa` with the default cache, by its own `generate`.

    python -m bench.hf_generate [--json FILE] [--batch 64] [--prompts 128 2048] [--tokens 64] [--compile]

A 0.6B-shaped Qwen3 with random weights on a GPU, a tiny one without. Prompts are ragged, padded on the left. Both run
in turns. Greedy tokens of random weights in half precision part where two logits are all but equal, so that logits are
compared under the same tokens too. A second row has the tokens per second of whole calls, prompts included, with
transformers' continuous batching and the engine beside both.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import pagedattn.integrations.transformers as hf

from .hf_throughput import lines as throughput_lines
from .hf_throughput import throughput
from .ratios import Row
from .report import ResultFile

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "intermediate_size": 128, "vocab_size": 512},
}
Batch = dict[str, torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both, print a line each and their ratio; 1 where the logits differ by more than rounding."""
    given = _arguments().parse_args(arguments)
    shortest, longest = given.prompts
    inputs = ragged(given.batch, shortest, longest, SHAPES[given.shape]["vocab_size"])
    models = contenders(given.shape, given.backend, given.block_size)
    row: Row = {"suite": "hf_generate", "workload": f"{given.batch} prompts of {shortest}..{longest}"}
    row |= {"shape": given.shape, "tokens": given.tokens, "compile": given.compile, "dtype": str(DTYPE)}
    row |= compare(models, inputs, min(16, given.tokens))
    if given.compile:
        for model in models.values():
            model.forward = torch.compile(model.forward)
    row["contenders"] = timed(models, inputs, given.tokens, given.runs)
    slow, fast = (row["contenders"][name] for name in ("sdpa", "pagedattn"))
    for key in ("prefill_ms", "decode_ms", "cache_bytes", "peak_bytes"):
        row[f"{key}_ratio"] = None if not fast[key] else round(slow[key] / fast[key], 3)
    result = ResultFile(given.json, {}, [])
    result.meta["transformers"] = hf.import_transformers().__version__
    result.add_plain(row)
    print("\n".join(lines(row)))
    if not given.compile:
        total: Row = {key: row[key] for key in ("workload", "shape", "dtype")} | {"suite": "hf_throughput"}
        total |= throughput(models, inputs, given.tokens, given.runs)
        result.add_plain(total)
        print("\n".join(throughput_lines(total)))
    return int(row["logits_difference"] > row["logits_tolerance"])


def contenders(shape: str, backend: str | None, block_size: int) -> dict[str, Any]:
    """The same weights under `sdpa`, and enabled."""
    transformers = hf.import_transformers()
    config = transformers.Qwen3Config(**SHAPES[shape], max_position_embeddings=40960, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=DTYPE).eval()
    models = {"sdpa": model, "pagedattn": copy.deepcopy(model)}
    hf.enable(models["pagedattn"], backend=backend, block_size=block_size)
    return models


def ragged(batch: int, shortest: int, longest: int, vocab: int) -> Batch:
    """Prompts of evenly spread lengths, padded on the left, in random order."""
    generator = torch.Generator().manual_seed(0)
    lengths = [shortest + (longest - shortest) * i // max(1, batch - 1) for i in range(batch)]
    lengths = [lengths[i] for i in torch.randperm(batch, generator=generator).tolist()]
    ids = torch.randint(3, vocab, (batch, longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, 0).to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def compare(models: Mapping[str, Any], inputs: Batch, tokens: int) -> Row:
    """Tokens of both, and logits of both under the tokens of `sdpa`."""
    outputs = {name: generate(model, inputs, tokens, output_logits=True) for name, model in models.items()}
    wanted, (rows, start) = outputs["sdpa"], inputs["input_ids"].shape
    mask = torch.cat((inputs["attention_mask"], inputs["attention_mask"].new_ones(rows, tokens)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    paged, parts, at = models["pagedattn"], [], [(0, start), *((start + i, start + i + 1) for i in range(tokens - 1))]
    cache = hf.new_cache(paged)
    with torch.inference_mode():
        for low, high in at:
            forced = {"input_ids": wanted.sequences[:, low:high], "attention_mask": mask[:, :high]}
            forced |= {"position_ids": positions[:, low:high], "past_key_values": cache}
            parts.append(paged(**forced, logits_to_keep=1).logits[:, -1].float())
    one, other = torch.stack(parts), torch.stack(wanted.logits).float()
    largest = float(other.abs().max())
    same = (outputs["sdpa"].sequences == outputs["pagedattn"].sequences)[:, start:]
    return {
        "logits_difference": float((one - other).abs().max()),
        "logits_largest": largest,
        # Rounding grows through the layers: some 30 of bf16's last places.
        "logits_tolerance": largest * (0.1 if DTYPE == torch.bfloat16 else 1e-4),
        "same_choices": round(float((one.argmax(-1) == other.argmax(-1)).float().mean()), 4),
        "same_tokens": round(float(same.float().mean()), 4),
        "same_rows": int(same.all(1).sum()),
    }


def timed(models: Mapping[str, Any], inputs: Batch, tokens: int, runs: int) -> dict[str, Row]:
    """Medians of `runs` runs, in turns, after one of each that is not counted."""
    rows: dict[str, list[Row]] = {name: [] for name in models}
    for run in range(runs + 1):
        for name, model in models.items():
            row = measure(model, inputs, tokens)
            if run:
                rows[name].append(row)
    return {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rows.items()
    }


def measure(model: Any, inputs: Batch, tokens: int) -> Row:
    """One generation: milliseconds of the prompt and of a decode step, and bytes."""
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if GPU else 0
    times = [now()]

    def clock(ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        times.append(now())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    output = generate(model, inputs, tokens, stopping_criteria=hf.import_transformers().StoppingCriteriaList([clock]))
    steps = [(end - start) * 1e3 for start, end in pairwise(times[1:])]
    cache = output.past_key_values
    return {
        "prefill_ms": round((times[1] - times[0]) * 1e3, 3),
        "decode_ms": round(statistics.mean(steps), 3),
        "decode_ms_best": round(min(steps), 3),
        "tok_s": round(len(inputs["input_ids"]) / statistics.mean(steps) * 1e3, 1),
        "cache_bytes": cache_bytes(cache),
        "peak_bytes": torch.cuda.max_memory_allocated() - before if GPU else 0,
    }


def generate(model: Any, inputs: Batch, tokens: int, **options: Any) -> Any:
    """Greedy, to the last token."""
    options |= {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs, **options, return_dict_in_generate=True)


def now() -> float:
    """Seconds, with nothing left to do on the device."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def cache_bytes(cache: Any) -> int:
    """Of a paged cache or of transformers' own."""
    if hasattr(cache, "num_blocks_used"):
        return cache.nbytes
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def lines(row: Row) -> list[str]:
    """The row as text."""
    out = [f"{row['workload']}, {row['tokens']} tokens, Qwen3 {row['shape']}, {row['dtype']}"]
    for name, one in row["contenders"].items():
        out.append(
            f"{name:>10}: prompt {one['prefill_ms']:.1f} ms, step {one['decode_ms']:.2f} ms "
            f"({one['tok_s']:.0f} tokens/s), cache {one['cache_bytes'] / 1e6:.1f} MB, "
            f"peak {one['peak_bytes'] / 1e6:.0f} MB"
        )
    ratios = ", ".join(f"{key} {row[f'{key}_ratio']}" for key in ("prefill_ms", "decode_ms", "cache_bytes"))
    out.append(f"sdpa over pagedattn: {ratios}")
    out.append(
        f"logits differ by {row['logits_difference']:.2e} at most (largest {row['logits_largest']:.1f}), "
        f"{row['same_choices']:.1%} of choices are the same, {row['same_rows']} rows have the same tokens throughout"
    )
    return out


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.6b" if GPU else "tiny")
    parser.add_argument("--batch", type=int, default=64 if GPU else 4)
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=(128, 2048) if GPU else (8, 64), help="shortest, longest"
    )
    parser.add_argument("--tokens", type=int, default=64 if GPU else 16, help="new tokens per prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", help="attention backend of the paged cache; the library chooses unless given")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="torch.compile both models' forward")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
