"""What a cache format costs an attention output, by context: of stored keys and values, beside exact ones.

    python -m bench.attention_error [--formats int8 fp8] [--keys 128 512] [--dim 128] [--json FILE]

By the formats' torch halves and the oracle in float64, on random data: rows are normal, and of keys every 32nd element
is eight times as large, as in models without norms of keys. What that means for a model is for `bench.accuracy` to say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from pagedattn import Mask
from pagedattn.formats.registry import FORMATS, format_of
from pagedattn.testing import attention_oracle
from pagedattn.testing.stored import StoredRows

from .ratios import Row
from .report import ResultFile

KEYS = (128, 512, 2048, 8192, 32768)
_HEADS, _QUERIES, _BLOCK = 4, 32, 16
_EVERY, _LARGER = 32, 8.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every format at every context, print a line each."""
    given = _arguments().parse_args(arguments)
    result = ResultFile(given.json, {}, [])
    for keys in given.keys:
        for row in errors(given.formats, keys, given.dim):
            result.add_plain({"suite": "attention_error", "head_dim": given.dim} | row)
            cosine = f"cosine {row['cosine']:.6f}, at worst {row['worst_cosine']:.6f}"
            print(
                f"{row['kv_cache_dtype']:>15} {keys:>6} keys: {cosine}, largest error {row['largest']:.4f}", flush=True
            )
    return 0


def errors(formats: Sequence[str], keys: int, dim: int) -> list[Row]:
    """A row per format: cosines of outputs with the exact ones, and the largest error of the largest element of its
    output."""
    generator = torch.Generator().manual_seed(keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = normal(_QUERIES, _HEADS, dim), normal(keys, _HEADS, dim), normal(keys, _HEADS, dim)
    key[..., ::_EVERY] *= _LARGER
    every = {"scale": dim**-0.5, "mask": Mask(causal=False)}
    exact, _ = attention_oracle(query, key, value, **every)
    rows = []
    for name in formats:
        form = format_of(name)
        size = max(_BLOCK, form.block_multiple)
        sides = ((form.key, key), (form.value, value))
        stored = (
            StoredRows(side, whole_blocks=form.whole_blocks).read(data, size, keys // size) for side, data in sides
        )
        found, _ = attention_oracle(query, *stored, **every)
        cosine = torch.nn.functional.cosine_similarity(found, exact, dim=-1)
        largest = ((found - exact).abs().amax(-1) / exact.abs().amax(-1)).max()
        numbers = {"cosine": cosine.mean(), "worst_cosine": cosine.min(), "largest": largest}
        rows.append({"kv_cache_dtype": name, "keys": keys, **{k: round(float(x), 6) for k, x in numbers.items()}})
    return rows


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in FORMATS if name != "auto"]
    parser.add_argument("--formats", nargs="+", default=every, help="every one where not given")
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
