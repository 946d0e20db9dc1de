"""Requests that begin alike and arrive together: the later ones wait for the step that computes what they share."""

from __future__ import annotations

from array import array

from .prefix_cache import PrefixCache
from .request import Request


class ComingBlocks:
    """Contents that the step in the making will add to the cache, by the prompts that compute them.

    A block can be found only once it is computed. Without this, twins that are admitted in one step would compute the
    same tokens twice.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._prompts: dict[tuple[str | None, bytes], list[tuple[Request, int, int]]] = {}

    def add(self, request: Request, start: int, end: int) -> None:
        """Note that a prompt's tokens [start, end) are computed in this step."""
        first, last = self._prefixes.aligned(start), self._prefixes.aligned(end)
        if first < last and self._prefixes.is_new(request):
            self._prompts.setdefault(self._key(request), []).append((request, first, last))

    def serve(self, request: Request) -> bool:
        """Whether the step computes blocks that a waiting request would otherwise compute itself."""
        limit = self._prefixes.longest_hit(request) if self._prompts else 0
        for prompt, first, last in self._prompts.get(self._key(request), ()) if limit else ():
            shared = _shared_length(request.token_ids, prompt.token_ids, min(last, limit))
            if self._prefixes.aligned(shared) > first:
                return True
        return False

    def _key(self, request: Request) -> tuple[str | None, bytes]:
        return request.cache_salt, request.token_ids[: self._prefixes.alignment].tobytes()


def _shared_length(one: array[int], other: array[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
