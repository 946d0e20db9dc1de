"""SchedulerOutputBuilder: a step in the making."""

from __future__ import annotations

from ..kv.manager import KVCacheManager
from ..request import Request
from ..scheduler_output import ScheduledRequest, SchedulerOutput
from .in_batch_prefix import InBatchPrefix


class SchedulerOutputBuilder:
    """What of the budget is left, what runs, which blocks move, and the blocks that its prompts will need later."""

    __slots__ = (
        "_decodes",
        "_kv",
        "_prefills",
        "budget",
        "coming",
        "copies",
        "reserved",
        "swap_in",
        "swap_out",
        "swapped_out",
    )

    def __init__(self, kv: KVCacheManager, budget: int) -> None:
        self._kv = kv
        self._decodes: list[ScheduledRequest] = []
        self._prefills: list[ScheduledRequest] = []
        self.budget = budget
        self.coming = InBatchPrefix(kv.prefixes)
        self.reserved = 0
        self.copies: list[tuple[int, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.swapped_out: list[Request] = []

    def add(self, request: Request, num_tokens: int) -> None:
        """Let the next `num_tokens` of a request, which has the blocks for them, run in this step."""
        start, total = request.num_computed_tokens, len(request.token_ids)
        end = start + num_tokens
        self.budget -= num_tokens
        item = ScheduledRequest(request, start, num_tokens, end == total)
        (self._decodes if num_tokens == 1 and start else self._prefills).append(item)
        if num_tokens > 1:
            self.coming.add(request, start, end)
        if end != total:
            self.reserved += self._kv.blocks_for(total, num_tokens) - self._kv.blocks_for(end, num_tokens)

    def add_decode(self, request: Request) -> None:
        """As `add`, for a request with one token to compute, which has its slot: what most steps do most of."""
        self.budget -= 1
        self._decodes.append(ScheduledRequest(request, request.num_computed_tokens, 1, True))

    def step(self) -> SchedulerOutput | None:
        """The step, or None where nothing runs."""
        if not self._decodes and not self._prefills:
            return None
        items = (*self._decodes, *self._prefills)
        stores, loads = self._kv.copies.moves
        moves = tuple(self.copies), (*stores, *self.swap_out), (*self.swap_in, *loads)
        fresh, (recent_fresh, recent_copies) = self._kv.take_fresh(), self._kv.take_recent()
        blocks = tuple(fresh), tuple(recent_copies), tuple(recent_fresh)
        return SchedulerOutput(items, len(self._decodes), *moves, *blocks)
