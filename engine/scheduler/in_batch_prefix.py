"""Requests that begin alike and arrive together: the later ones wait for the step that computes what they share."""

from __future__ import annotations

from ..kv.prefix_cache import PrefixCache
from ..request import Request


class InBatchPrefix:
    """Contents that the step being built will add to the cache, by the prompts that compute them.

    A block can be found only once it is computed. Without this, equal prompts that are admitted in one step would
    compute the same tokens twice.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        # By salt, position and tokens of the first block that a prompt adds; and all these positions.
        self._prompts: dict[tuple[str | None, int, bytes], list[Request]] = {}
        self._firsts: set[int] = set()

    def add(self, request: Request, start: int, end: int) -> None:
        """Note that a prompt's tokens [start, end) are computed in this step, or loaded if they are not keyed yet."""
        prefixes = self._prefixes
        first, last = prefixes.aligned(min(start, prefixes.cached_len(request))), prefixes.num_findable(end)
        if first < last and prefixes.is_new(request):
            self._prompts.setdefault(self._key(request, first), []).append(request)
            self._firsts.add(first)

    def serve(self, request: Request) -> bool:
        """Whether the step computes blocks that a waiting request would otherwise compute itself."""
        limit = self._prefixes.longest_hit(request) if self._prompts else 0
        tokens = request.token_ids
        for first in self._firsts:
            if first + self._prefixes.alignment <= limit:
                for prompt in self._prompts.get(self._key(request, first), ()):
                    if tokens[:first] == prompt.token_ids[:first]:
                        return True
        return False

    def _key(self, request: Request, first: int) -> tuple[str | None, int, bytes]:
        block = request.token_ids[first : first + self._prefixes.alignment]
        return request.cache_salt, first, block.tobytes()
