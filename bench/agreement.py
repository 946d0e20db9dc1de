"""How far greedy tokens of two engines agree, and their log-probabilities as far as both have seen the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


def largest_gap(ours: Mapping[str, Any], peers: Mapping[str, Any]) -> float:
    """The largest difference of log-probabilities up to and with the first token that differs, whose choices must have
    been about equal.

    Args:
        ours, peers: `tokens` and `logprobs`, a list of each per request.

    Raises:
        RuntimeError: log-probabilities that are not finite, beside which equal tokens say nothing.
    """
    pairs = zip(ours["tokens"], peers["tokens"], strict=True)
    seen = [min(common_prefix(one, other) + 1, len(one)) for one, other in pairs]
    gaps = [
        abs(x - y)
        for count, one, other in zip(seen, ours["logprobs"], peers["logprobs"], strict=True)
        for x, y in zip(one[:count], other[:count], strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        raise RuntimeError("log-probabilities are not finite, so that equal tokens say nothing")
    return max(gaps)
