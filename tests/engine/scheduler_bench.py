"""A scheduler over a fake runner, without the engine around it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fake_runner import VOCAB, FakeRunner, next_token
from invariants import check_scheduler

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, KVGroup, Request, SampledToken, SchedulerOutput
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.scheduler.scheduler import Advanced, Scheduler


def update(scheduler: Scheduler, step: SchedulerOutput | None, sampled: Sequence[SampledToken | None]) -> Advanced:
    """Make a step count whose tokens are known; None is a turn in which nothing ran."""
    if step is not None:
        scheduler.advance_with_placeholders(step)
    return scheduler.apply_tokens(sampled)


class Bench:
    """Adds requests, runs steps, and checks the state after each."""

    def __init__(
        self,
        num_blocks: int = 64,
        groups: Sequence[KVGroup] = (KVGroup(4),),
        *,
        caching: bool = True,
        seqs: int = 8,
        budget: int = 32,
        share: float = 1.0,
        swap_blocks: int = 0,
        swap_cost: float = 0.0,
    ) -> None:
        self.kv = KVCacheManager(BlockPool(num_blocks, enable_caching=caching), groups, swap_blocks)
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_prefill_share": share}
        self.scheduler = Scheduler(self.kv, **limits, tokens_per_swapped_block=swap_cost)  # type: ignore[arg-type]
        self.runner = FakeRunner(num_blocks, groups, swap_blocks=swap_blocks)
        self.runner.ref_count = self.kv.pool.ref_count
        self.requests: list[Request] = []

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: object) -> Request:
        request = Request(
            str(len(self.requests)),
            array("i", prompt),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            arrival=len(self.requests),
            max_total_tokens=len(prompt) + max_tokens,
            **options,  # type: ignore[arg-type]
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        update(self.scheduler, step, self.runner.execute(step) if step is not None else [])
        check_scheduler(self.scheduler)
        return step

    def finish(self, limit: int = 2000) -> list[SchedulerOutput]:
        steps = []
        while self.scheduler.running or self.scheduler.waiting:
            before = sum(request.finished for request in self.requests)
            step = self.step()
            assert step is not None or sum(request.finished for request in self.requests) > before, "no progress"
            steps += [step] if step is not None else []
            assert len(steps) < limit, "the requests never end"
        for request in self.requests:
            check_tokens(request)
        for pool in filter(None, (self.kv.pool, self.kv.recent_pool)):
            assert pool.num_free == pool.num_usable
        assert self.kv.swap.num_free == self.kv.swap.num_blocks
        return steps


def check_tokens(request: Request) -> None:
    """Every generated token is the one that follows from all tokens before it."""
    tokens = request.token_ids.tolist()
    for end in range(request.prompt_len, len(tokens)):
        assert tokens[end] == next_token(tokens[:end])


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * index) % VOCAB for index in range(length)]
