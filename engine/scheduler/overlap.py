"""OverlapScheduler: schedules a step before the tokens of the step before it are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedattn.errors import PagedAttnError

from ..kv.manager import KVCacheManager
from ..request import Request, RequestStatus
from ..scheduler_output import PLACEHOLDER_TOKEN, SampledToken, SchedulerOutput
from .output_builder import SchedulerOutputBuilder
from .scheduler import Scheduler


class OverlapScheduler(Scheduler):
    """A scheduler between whose steps `advance_with_placeholders`, `schedule`, `apply_tokens` come in this order.

    `advance_with_placeholders` takes a launched step for done: each token that it samples stands as PLACEHOLDER_TOKEN
    at its request's end, and the next step goes on from there. `apply_tokens` puts the tokens in place, and ends the
    requests that they end. Steps run one after another on the device, so blocks that a late end frees may be handed out
    at once.
    """

    _assumed: SchedulerOutput | None = None

    def advance_with_placeholders(self, step: SchedulerOutput) -> None:
        """Count the step in flight as computed. Its input tokens are all known by now: `apply_tokens` came since."""
        if step is not self._in_flight:
            raise PagedAttnError("advance_with_placeholders() got another step than the one in flight")
        self._count(step)
        self._gone: dict[Request, tuple[list, list[int], int]] = {}
        running = RequestStatus.RUNNING
        for request, start, num_tokens, samples in step.scheduled:
            if request.status is not running:
                self.stats.dropped_tokens += num_tokens
                continue
            computed = request.num_computed_tokens = start + num_tokens
            if computed >= request.commit_at:
                self.kv.commit(request)
            if samples:
                request.token_ids.append(PLACEHOLDER_TOKEN)
        for request, _ in self._admitted:  # what was swapped in is read before anything is swapped out to its place
            self.kv.swap.drop(request)
        self._in_flight, self._assumed = None, step

    def apply_tokens(self, sampled: Sequence[SampledToken | None]) -> list[tuple[Request, SampledToken | None]]:
        """Put the tokens of the assumed step in place.

        Args:
            sampled: aligned with its `scheduled`; empty where no step was assumed.

        Returns:
            As `update`.
        """
        items = () if self._assumed is None else self._assumed.scheduled
        self._assumed, advanced, ended, self._ended = None, [], self._ended, []
        for (request, *_), token in zip(items, sampled, strict=True):
            if token is None or request.token_ids[-1] != PLACEHOLDER_TOKEN:
                continue
            if token.error is not None:
                request.token_ids.pop()
                self._fail(request, token.error)
                advanced.append((request, None))
                continue
            request.token_ids[-1] = token_id = token.token_id
            advanced.append((request, token))
            may_end = len(request.token_ids) >= request.max_total_tokens or token_id in request.stop_ids
            if may_end and (status := request.ending()) is not None and not self.finish(request, status):
                request.status, request.explanation = status, None  # it ended for lack of room, not knowing this
        self.stats.generated_tokens += sum(token is not None for _, token in advanced)
        seen = {request for request, _ in advanced} if ended else ()
        return advanced + [(request, None) for request in ended if request not in seen]

    def restart(self, kv: KVCacheManager, requests: Iterable[Request]) -> None:
        """As `Scheduler.restart`; tokens that were not read are sampled again."""
        requests = list(requests)
        for request in requests:
            while request.token_ids[-1] == PLACEHOLDER_TOKEN:
                request.token_ids.pop()
        self._assumed = None
        super().restart(kv, requests)

    def _fail(self, request: Request, why: str) -> None:
        """End a request whose values are not to be trusted, also where its blocks were given back meanwhile."""
        if request in self._gone:
            request.last_prefix_nodes, request.num_cached_blocks, request.num_cached_tokens = self._gone[request]
        if request.last_prefix_nodes or request.swapped is not None:
            self.kv.discard(request)
        if not self.finish(request, RequestStatus.FINISHED_ERROR, why):
            request.status, request.explanation = RequestStatus.FINISHED_ERROR, why

    def _preempt(self, victim: Request, plan: SchedulerOutputBuilder) -> None:
        self._remember(victim)
        super()._preempt(victim, plan)

    def _requeue(self, request: Request, status: RequestStatus) -> None:
        self._remember(request)
        super()._requeue(request, status)

    def _end_for_lack_of_room(self, request: Request) -> None:
        self._remember(request)
        super()._end_for_lack_of_room(request)

    def _remember(self, request: Request) -> None:
        """Keep what of a request's blocks carries keys, in case its token turns out to be an error."""
        if self._assumed is not None and request.token_ids[-1] == PLACEHOLDER_TOKEN and request.last_prefix_nodes:
            self._gone[request] = request.last_prefix_nodes, request.num_cached_blocks, request.num_cached_tokens
