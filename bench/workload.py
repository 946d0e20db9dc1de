"""The workload grammar: `64q1s4k` is 64 sequences with 1 new token and 4096 keys each; parts are joined by `+`.

`64q1s9k@8k` says that the first 8192 keys of all sequences are the same ones, in the same blocks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pagedattn.errors import InvalidInputError

_PART = re.compile(r"(\d*)q(\d+k?)(?:s(\d+k?)(?:\.\.(\d+k?)|\*(\d+(?:\.\d+)?))?)?")
_NUMBER = re.compile(r"\d+k?")
_EXPECTED = "parts like 64q1s4k, 8q2k, 48q1s3000..4927 or 64q1s128*1.09, joined by + or _, then perhaps a prefix, @8k"


class Workload(NamedTuple):
    """Query and key lengths of a step's sequences, decodes first; all share their first `shared` keys."""

    text: str
    query_lens: list[int]
    seq_lens: list[int]
    shared: int = 0

    def keys_read(self, window: int = 0) -> int:
        """Keys of all sequences that some query sees, the shared ones counted once. window: 0 is none."""
        if window:
            return sum(min(s, window + q - 1) for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return self.shared + sum(n - self.shared for n in self.seq_lens)

    def flops(self, heads: int, dim: int, window: int = 0) -> float:
        """Multiply-adds of causal attention, counted twice each."""
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return 4.0 * heads * dim * sum(_seen(q, s, window or s) for q, s in pairs)

    @property
    def num_decodes(self) -> int:
        """How many sequences bring one new token to a context; they stand in front."""
        return sum(map(_is_decode, zip(self.query_lens, self.seq_lens, strict=True)))


def parse(text: str) -> Workload:
    """`8q2k` (prompts of 2048), `64q1s4k` (decodes), `2q2ks16k` (chunks on a context), `1q2ks4k+64q1s2k` (mixed).

    `@8k` at the end is a prefix that all share.

    `48q1s3000..4927` spreads lengths evenly between the two, `64q1s128*1.09` has int(128 * 1.09**i) keys in sequence i.

    Raises:
        InvalidInputError: another text, no sequence, no token, more new tokens than keys, or a prefix beyond a context.
    """
    text = text.replace("_", "+")
    parts, at, prefix = text.partition("@")
    if at and not _NUMBER.fullmatch(prefix):
        raise InvalidInputError("workload", _EXPECTED, repr(text))
    shared = _number(prefix) if at else 0
    pairs: list[tuple[int, int]] = []
    for part in parts.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidInputError("workload", _EXPECTED, repr(text))
        count, query = int(match[1] or 1), _number(match[2])
        first = _number(match[3] or match[2])
        pairs += [(query, _length(i, count, first, match[4], match[5])) for i in range(count)]
    if not pairs or any(not 0 < query <= keys for query, keys in pairs):
        raise InvalidInputError("workload", "sequences of at least one new token and as many keys", repr(text))
    if any(shared > keys - query for query, keys in pairs):
        raise InvalidInputError("workload", "a prefix within the context of every sequence", repr(text))
    pairs.sort(key=_is_decode, reverse=True)
    return Workload(text, [query for query, _ in pairs], [keys for _, keys in pairs], shared)


def _length(i: int, count: int, first: int, last: str | None, ratio: str | None) -> int:
    if ratio is not None:
        return int(first * float(ratio) ** i)
    return first + (i * (_number(last) - first) // max(count - 1, 1) if last is not None else 0)


def _seen(query: int, keys: int, window: int) -> float:
    """Pairs of the last `query` of `keys` tokens and what they see: query i, from 0 on, min(keys - query + i + 1,
    window) keys."""
    whole = min(max(window - (keys - query), 0), query)  # queries that see all before them
    return whole * (keys - query) + whole * (whole + 1) / 2 + (query - whole) * window


def _is_decode(pair: tuple[int, int]) -> bool:
    return pair[0] == 1 and pair[1] > 1


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
