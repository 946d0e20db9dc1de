"""A runner without a model: its next token is a function of all tokens before, its cache knows what was written.

Every slot holds the identity of the whole prefix whose last token was written there, cache salt included. Before a
step runs, each context position that a request may read is looked up through its block table: a wrong hit, a stale or
overwritten block, or a position that was never computed fails the step with AssertionError.

Where there is a group of blocks that are not encoded, tokens are written to these, and each block that they fill, or
put behind the window, to the other group; what is read are blocks before the window there, and the rest here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedattn.engine import KVGroup, Request, SampledToken, ScheduledRequest, SchedulerOutput
from pagedattn.engine.api.llm import LLM
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.kv_group import SwapConfig
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.scheduler_output import PLACEHOLDER_TOKEN

VOCAB = 97
EOS = 96


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) % VOCAB for char in text]


class FakeDetokenizer:
    """Token t is the letter t mod 26; nothing is held back."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    def flush(self) -> str:
        return ""


class FakeRunner:
    """Runs steps on prefix identities. `before` and `after` are called around each step and may raise."""

    def __init__(
        self,
        num_kv_blocks: int = 64,
        groups: Sequence[KVGroup] = (KVGroup(4),),
        *,
        max_model_len: int = 256,
        tokenizer: FakeTokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        swap_blocks: int = 0,
        keeps_prefixes: bool = False,
        placeholder_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self.num_kv_blocks = num_kv_blocks
        if placeholder_tokens is not None:
            self.placeholder_tokens = placeholder_tokens
        self.kv_groups = tuple(groups)
        self.swap_config = SwapConfig(swap_blocks, tokens_per_block=1.0, keeps_prefixes=keeps_prefixes)
        self.vocab_size = VOCAB
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.before: Callable[[SchedulerOutput], None] = lambda step: None
        self.after: Callable[[SchedulerOutput], None] = lambda step: None
        self.broken: Callable[[Request], bool] = lambda request: False
        self.steps: list[SchedulerOutput] = []
        self.ref_count: Callable[[int], int] | None = None
        self._slots = [
            np.zeros((group.recent_blocks or num_kv_blocks) * group.block_size, dtype=np.int64) for group in groups
        ]
        self._host = [np.zeros((swap_blocks, group.block_size), dtype=np.int64) for group in groups]
        self._recent = len(groups) - 1 if groups[-1].recent_blocks else None
        self._window = groups[-1].window_blocks
        self._identities: dict[tuple[int, int], int] = {}
        self._roots: dict[str | None, int] = {}
        self._known: dict[int, tuple[Request, list[int], np.ndarray]] = {}

    def make_detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()

    def execute(self, step: SchedulerOutput) -> list[SampledToken | None]:
        assert step.scheduled and all(item.num_tokens > 0 for item in step.scheduled)
        decodes = [item.num_tokens == 1 and item.start > 0 for item in step.scheduled]
        assert decodes == [index < step.num_decodes for index in range(len(decodes))]
        self.before(step)
        self._move(step)
        for item in step.scheduled:
            self._check_context(item, item.start)
        for item in step.scheduled:
            self._write(item)
        for item in step.scheduled:
            self._check_context(item, item.start + item.num_tokens)
        self.after(step)
        self.steps.append(step)
        return [self._sample(item.request) if item.samples else None for item in step.scheduled]

    def identities(self, request: Request) -> np.ndarray:
        """Per position of the request, what its slot must hold."""
        kept, known, array = self._known.get(id(request), (request, [], np.zeros(0, dtype=np.int64)))
        assert kept is request
        if len(array) == len(request.token_ids):  # not len(known): an interrupt may have come before the array was kept
            return array
        parent = known[-1] if known else self._roots.setdefault(request.cache_salt, -1 - len(self._roots))
        for token in request.token_ids[len(known) :]:
            parent = self._identities.setdefault((parent, token), len(self._identities) + 1)
            known.append(parent)
        array = np.array(known, dtype=np.int64)
        self._known[id(request)] = request, known, array
        return array

    def _move(self, step: SchedulerOutput) -> None:
        """A host block, like any other, holds what all groups have in it."""
        assert all(len({target for _, target in pairs}) == len(pairs) for pairs in (step.swap_out, step.swap_in))
        for group, slots, host in zip(self.kv_groups, self._slots, self._host, strict=True):
            rows = slots.reshape(-1, group.block_size)
            if group.recent_blocks:
                rows[list(step.recent_fresh)] = 0
                rows[[target for _, target in step.recent_copies]] = rows[[source for source, _ in step.recent_copies]]
                continue
            for source, target in step.swap_out:
                host[target] = rows[source]
            rows[list(step.fresh_blocks)] = 0
            for source, target in step.swap_in:
                rows[target] = host[source]
            sources = [(target, rows[source].copy()) for source, target in step.copies]
            for target, row in sources:
                rows[target] = row

    def _check_context(self, item: ScheduledRequest, end: int) -> None:
        request = item.request
        assert request.num_computed_tokens == item.start and item.start + item.num_tokens <= len(request.token_ids)
        assert item.samples == (item.start + item.num_tokens == len(request.token_ids))
        for index, group in enumerate(self.kv_groups):
            first, stop = 0 if group.sliding_window is None else max(0, item.start - group.sliding_window + 1), end
            if self._recent is not None:
                full = max(0, end // group.block_size - self._window) * group.block_size
                kept = min(group.first_blocks * group.block_size, full)
                first, stop = (full, end) if index == self._recent else (kept, full)
                if index == self._recent:
                    self._check_slots(request, index, 0, kept)
            self._check_slots(request, index, first, stop)

    def _check_slots(self, request: Request, index: int, first: int, stop: int) -> None:
        size, truth = self.kv_groups[index].block_size, self.identities(request)
        blocks, skipped = self._blocks(request, index, first, stop), first % size
        found = self._slots[index].reshape(-1, size)[blocks].ravel()[skipped : skipped + stop - first]
        assert (found == truth[first:stop]).all(), f"{request}: group {index} reads wrong values at {first}..{stop}"

    def _write(self, item: ScheduledRequest) -> None:
        request, first, end = item.request, item.start, item.start + item.num_tokens
        truth = self.identities(request)
        for index, group in enumerate(self.kv_groups):
            size, slots = group.block_size, self._slots[index]
            for entry, block in enumerate(self._blocks(request, index, first, end), first // size):
                shared = self.ref_count is not None and index != self._recent and self.ref_count(block) > 1
                assert not shared, f"{request} writes shared block {block}"
                if self._recent not in (None, index):
                    continue
                begin, stop = max(first, entry * size), min(end, (entry + 1) * size)
                slot = (block - entry) * size
                slots[slot + begin : slot + stop] = truth[begin:stop]
        if self._recent is not None:
            size = self.kv_groups[0].block_size
            full, recent = (self._slots[index].reshape(-1, size) for index in (0, self._recent))
            sealed, sources = request.block_ids[0], request.block_ids[self._recent]
            for entry in range(max(0, first // size - self._window), end // size - self._window):
                full[sealed[entry]] = recent[sources[entry]]

    def _blocks(self, request: Request, index: int, first: int, end: int) -> list[int]:
        """The blocks that positions first..end lie in."""
        size = self.kv_groups[index].block_size
        blocks = request.block_ids[index][first // size : -(-end // size)]
        assert len(blocks) == -(-end // size) - first // size, f"{request} has no block for what it reads or writes"
        most = self.kv_groups[index].recent_blocks or self.num_kv_blocks
        assert not blocks or 0 < min(blocks) <= max(blocks) < most, f"{request} reaches the null block"
        return blocks

    def _sample(self, request: Request) -> SampledToken:
        if self.broken(request):
            return SampledToken(-1, error="no token has a finite logit")
        token = next_token(request.token_ids, 0 if request.sampling.greedy else request.seed)
        if request.sampling.logprobs is None:
            return SampledToken(token)
        return SampledToken(token, -float(token), {token: -float(token)})


class LaunchingRunner(FakeRunner):
    """A fake device that runs ahead: it knows the tokens that it drew before anybody has read them."""

    prefers_overlap = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.unknown = 0
        self.on_read: Callable[[SchedulerOutput], None] = lambda step: None
        self._drawn: dict[int, tuple[Request, int]] = {}

    def launch(self, step: SchedulerOutput) -> LaunchedFake:
        hidden = [item.request for item in step.scheduled if item.request.token_ids[-1] == PLACEHOLDER_TOKEN]
        self.unknown += len(hidden)
        for request in hidden:
            request.token_ids[-1] = self._drawn[id(request)][1]
        try:
            tokens = self.execute(step)
        finally:
            for request in hidden:
                request.token_ids[-1] = PLACEHOLDER_TOKEN
        for item, token in zip(step.scheduled, tokens, strict=True):
            if token is not None:
                self._drawn[id(item.request)] = item.request, max(token.token_id, 0)
        return LaunchedFake(self, step, tokens)


class LaunchedFake(NamedTuple):
    """A step whose tokens are there already."""

    runner: LaunchingRunner
    step: SchedulerOutput
    tokens: list[SampledToken | None]

    def read(self) -> list[SampledToken | None]:
        self.runner.on_read(self.step)
        return self.tokens


def next_token(tokens: Iterable[int], seed: int = 0) -> int:
    """The token that the fake model continues `tokens` with."""
    return zlib.crc32(bytes([*tokens]) + seed.to_bytes(16, "little", signed=True)) % VOCAB


def expected(
    prompt: Sequence[int], sampling: SamplingParams, max_model_len: int = 256, eos: Sequence[int] = ()
) -> list[int]:
    """What a request generates when it has everything to itself."""
    tokens, stops = list(prompt), set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    limit = max_model_len if sampling.max_tokens is None else min(max_model_len, len(prompt) + sampling.max_tokens)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, 0 if sampling.greedy else sampling.seed or 0))
        if tokens[-1] in stops and len(tokens) - len(prompt) >= sampling.min_tokens:
            break
    return tokens[len(prompt) :]


def greedy(max_tokens: int = 8, **options: object) -> SamplingParams:
    """Greedy sampling of `max_tokens`."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def fake_llm(runner: FakeRunner | None = None, **options: object) -> LLM:
    """An LLM over a fake runner, with small limits."""
    settings: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_prefill_share": 1.0, **options}
    runner = FakeRunner() if runner is None else runner
    llm = LLM.from_runner(EngineConfig.from_options("fake", settings), runner)
    runner.ref_count = lambda block: llm._scheduler.kv.pool.ref_count(block)
    return llm
