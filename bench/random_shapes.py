"""Random shapes as deployed models and their traffic have them: no kernel was tuned for them.

A case depends on the seed and on its number alone, so that more cases of a seed begin with the same ones.
"""

from __future__ import annotations

import hashlib
import math
import re
from random import Random

from pagedattn.errors import InvalidInputError

from .table import Case

# Query heads, KV heads, head dim of models that are deployed.
LAYERS = (
    *((9, 3, 64), (14, 2, 64), (12, 2, 128), (16, 8, 128), (24, 8, 128), (28, 4, 128), (32, 8, 128), (32, 32, 128)),
    *((40, 8, 128), (48, 8, 128), (64, 4, 128), (64, 8, 128), (64, 8, 64), (71, 1, 64), (8, 1, 256), (8, 4, 256)),
    *((16, 8, 256), (32, 8, 96), (32, 32, 96), (40, 10, 128), (32, 8, 80), (8, 1, 128), (16, 2, 128)),
)
KINDS = ("decode", "speculative", "append", "prefill", "mixed")
# Of caches that are not in the model's dtype, all alike; each serves every layer above, in blocks as large as it has.
FORMATS = ("fp8_e4m3", "int8", "k8v4", "int4", "turboquant4")
_STORED = 0.3  # of the cases have such a one
_KEYS = (128, 1 << 16)  # of a context
_MOST_BYTES, _MOST_FLOPS = 4 << 30, 1e13  # of a layer's 16-bit cache, and of its products
_ENCODED = 4  # times smaller where rows are encoded, which takes several times their memory
_SEEDS = 5  # that a commit is judged on
_SMALL = 64  # times fewer keys, and as many times fewer of both, where there is no GPU


def random_cases(seed: int, count: int, gpu: bool = True) -> list[Case]:
    """`count` cases of a seed, of each kind in turn; without a GPU small ones in float32."""
    return [random_case(seed, number, gpu) for number in range(count)]


def random_case(seed: int, number: int, gpu: bool = True) -> Case:
    """One of those."""
    return _case(f"{seed}/{number}", KINDS[number % len(KINDS)], gpu)


def seeds_of(commit: str) -> list[int]:
    """Five seeds that follow from a commit, so that nobody chose them: of each index from 0 on the first 4 bytes, as a
    big-endian number, of the SHA-256 of `HASH:INDEX`.

    Raises:
        InvalidInputError: no full hash; a shorter one of the same commit would have other seeds.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        expected = "a commit's full hash, 40 hexadecimal digits in lower case"
        raise InvalidInputError("--seeds-of", expected, repr(commit), "`git rev-parse HEAD` prints it")
    digests = (hashlib.sha256(f"{commit}:{index}".encode()).digest() for index in range(_SEEDS))
    return [int.from_bytes(digest[:4], "big") for digest in digests]


def _case(drawn: str, kind: str, gpu: bool) -> Case:
    draw = Random(drawn)
    less, most_bytes = 1 if gpu else _SMALL, _MOST_BYTES
    form = _format(Random(f"format {drawn}"))  # apart, so that it changes nothing of the shape
    if form != "auto":
        most_bytes //= _ENCODED
    while True:
        heads, kv_heads, dim = draw.choice(LAYERS)
        case = Case(
            *(kind, random_text(draw, kind, less), heads, kv_heads, dim),
            block_size=draw.choice((16, 16, 16, 32, 64, 128)),
            dtype=draw.choice(("bfloat16", "bfloat16", "bfloat16", "float16")) if gpu else "float32",
            window=draw.choice((512, 1024, 4096)) // less if draw.random() < 0.15 else 0,
            softcap=draw.choice((30.0, 50.0)) if draw.random() < 0.1 else 0.0,
            sinks=draw.random() < 0.1,
            draw=drawn,
            kv_cache_dtype=form,
        )
        nbytes, flops = 4 * sum(case.work.seq_lens) * kv_heads * dim, case.flops
        if nbytes <= most_bytes / less**2 and flops <= _MOST_FLOPS / less**2:
            return case


def _format(draw: Random) -> str:
    return draw.choice(FORMATS) if draw.random() < _STORED else "auto"


def random_text(draw: Random, kind: str, less: int) -> str:
    """A workload of a kind, with `less` times fewer keys than on a GPU."""
    if kind == "mixed":
        return f"{random_text(draw, draw.choice(('append', 'prefill')), less)}+{random_text(draw, 'decode', less)}"
    least, most = (max(keys // less, 2) for keys in _KEYS)
    if kind == "decode":
        return _part(draw, _about(draw, 1, 256), 1, least, most)
    if kind == "speculative":
        query = draw.randint(2, 16)
        return _part(draw, _about(draw, 1, 128), query, max(least, 2 * query), most)
    if kind == "append":
        query = _about(draw, 16, max(1024 // less, 17))
        return _part(draw, _about(draw, 1, 8), query, max(least, 4 * query), most)
    query = _about(draw, 64, max((1 << 14) // less, 128))
    return _part(draw, _about(draw, 1, 32), query, query, draw.choice((query, 4 * query)))


def _part(draw: Random, count: int, query: int, least: int, most: int) -> str:
    """`count` sequences of `query` new tokens, all of one length, or of lengths that grow by one ratio."""
    first = _about(draw, least, max(most, least))
    last = _about(draw, first, max(most, first))
    ratio = (last / first) ** (1 / max(count - 1, 1))
    ragged = count > 1 and draw.random() < 0.5
    return f"{count}q{query}s{first}" + (f"*{max(ratio, 1.0):.4f}" if ragged else "")


def _about(draw: Random, least: int, most: int) -> int:
    """Log-uniform in least..most."""
    return min(max(round(math.exp(draw.uniform(math.log(least), math.log(most)))), least), most)
