"""The workload grammar: `64q1s4k` is 64 sequences with 1 new token and 4096 keys each; parts are joined by `+`."""

from __future__ import annotations

import re
from typing import NamedTuple

_PART = re.compile(r"^(\d*)q(\d+k?)(?:s(\d+k?))?$")


class Workload(NamedTuple):
    """Query and key lengths of a step's sequences."""

    text: str
    query_lens: list[int]
    seq_lens: list[int]

    def bytes_read(self, kv_heads: int, dim: int, itemsize: int) -> int:
        """Bytes of keys and values, each read once."""
        return 2 * sum(self.seq_lens) * kv_heads * dim * itemsize

    def flops(self, heads: int, dim: int) -> float:
        """Multiply-adds of causal attention, counted twice each."""
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return 4.0 * heads * dim * sum(q * s - q * (q - 1) / 2 for q, s in pairs)


def parse(text: str) -> Workload:
    """`8q2k` (prompts of 2048), `64q1s4k`, `2q2ks16k` (chunks on a context), `1q2ks4k+64q1s2k` (mixed)."""
    queries: list[int] = []
    keys: list[int] = []
    for part in text.split("+"):
        match = _PART.match(part)
        if match is None:
            raise ValueError(f"workload must be parts like 64q1s4k joined by +, got {text!r}")
        count = int(match[1] or 1)
        query = _number(match[2])
        queries += [query] * count
        keys += [_number(match[3]) if match[3] else query] * count
    return Workload(text, queries, keys)


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
