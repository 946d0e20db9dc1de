"""Operations on a KVCacheManager beside a naive model that knows what every slot of every block holds."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from invariants import check_tables

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, KVGroup, Request
from pagedattn.engine.kv.prefix_cache import PrefixCache
from pagedattn.engine.sampling_params import SamplingParams

WEIGHTS = {"admit": 6, "grow": 14, "lookahead": 2, "fail": 3, "fork": 3, "finish": 3, "preempt": 2, "discard": 1}
WEIGHTS |= {"pressure": 2, "relax": 2, "reset": 1, "drain": 2}
MAX_REQUESTS = 8
MAX_TOKENS = 40


class KVCacheMachine:
    """Each operation takes two numbers that choose whom and how much. `counts` says what happened."""

    def __init__(
        self, groups: Sequence[KVGroup], num_blocks: int = 40, digest: Callable[[bytes], int] | None = None
    ) -> None:
        self.kv = KVCacheManager(BlockPool(num_blocks, digest=digest), groups)
        self.counts: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.past: list[tuple[list[int], str | None]] = []
        self.pressed: list[int] = []
        self.tainted: set[int] = set()
        self.identities: dict[tuple[int, int], int] = {}
        # Per group: what each slot holds, and which blocks can be found, by the identity of their last token.
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.keyed: list[dict[int, int]] = [{} for _ in groups]
        self.has_recent, self.window = self.kv.recent_pool is not None, groups[-1].window_blocks

    def step(self, name: str, a: int, b: int) -> None:
        self.counts[name] += bool(getattr(self, name)(a, b))

    def run(self, seed: int, operations: int, check_every: int) -> None:
        draw = random.Random(seed)
        names = draw.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=operations)
        for index, name in enumerate(names):
            self.step(name, draw.getrandbits(16), draw.getrandbits(16))
            if index % check_every == 0:
                self.check()

    def admit(self, a: int, b: int) -> bool:
        """A new request, which mostly begins as an earlier one did; its hit is the longest possible."""
        if len(self.requests) >= MAX_REQUESTS:
            return False
        tokens, salt = self.past[a % len(self.past)] if self.past and a % 5 else ([], (None, None, "x", "y")[b % 4])
        tokens = [*tokens[: b % MAX_TOKENS], *random.Random(b).choices(range(2), k=1 + a % 4)]
        request = self.new_request(tokens, salt)
        request.skip_prefix_cache_reads = a % 11 == 0
        return self.start(request, 1 + b % 3, a % 3)

    def start(self, request: Request, num_tokens: int, headroom: int) -> bool:
        hit = self.kv.lookup(request)
        assert hit == PrefixCache(self.kv.pool, self.kv.groups, self.kv.copies).lookup(
            request, self.kv._invalid_nodes
        ), "as at first sight"
        expected, certain = self.longest_hit(request)
        assert hit.num_tokens == expected if certain else hit.num_tokens <= expected
        free, num_tokens = self.free, min(num_tokens, len(request.token_ids) - hit.num_tokens)
        if not self.kv.start(request, hit, num_tokens, headroom):
            assert self.free == free and not request.block_ids
            self.counts["refused"] += 1
            return False
        assert self.kv.pool.num_free >= headroom
        self.counts["hits"] += hit.num_tokens > 0
        self.counts["certain hits"] += certain and hit.num_tokens > 0
        self.counts["salted hits"] += hit.num_tokens > 0 and request.cache_salt is not None
        self.requests.append(request)
        self.forget_fresh(request, self.ids(hit.blocks))
        self.compute(request, num_tokens)
        return True

    def grow(self, a: int, b: int) -> bool:
        request = self.pick(a)
        return request is not None and self.extend(request, 1 + b % 7, 0, b)

    def lookahead(self, a: int, b: int) -> bool:
        request = self.pick(a)
        return request is not None and self.extend(request, 1 + b % 3, 1 + a % 6, b)

    def fail(self, a: int, b: int) -> bool:
        """A step that wrote some of its tokens and was then taken back."""
        request = self.pick(a)
        if request is None or not self.allocate(request, 1 + b % 7, 0):
            return False
        self.write(request, 1 + b % 3)
        self.kv.trim(request)
        return True

    def fork(self, a: int, b: int) -> bool:
        parent = self.pick(a)
        if parent is None or len(self.requests) >= MAX_REQUESTS or parent.num_computed_tokens < 2:
            return False
        length = max(2, parent.num_computed_tokens - b % 9)
        child = self.new_request(parent.token_ids[:length].tolist(), parent.cache_salt)
        free = self.free
        copies = self.kv.fork(parent, child)
        if copies is None:
            assert self.free == free and not child.block_ids
            self.counts["fork refused"] += 1
            return False
        self.requests.append(child)
        self.forget_fresh(child, self.blocks(parent))
        for group, size in enumerate(self.kv.block_sizes):
            is_recent = self.kv.groups[group].recent_blocks is not None
            for source, target in self.kv.take_recent()[1] if is_recent else copies:
                for offset in range(size):
                    if (source, offset) in self.slots[group]:
                        self.slots[group][target, offset] = self.slots[group][source, offset]
        self.counts["copies"] += len(copies)
        self.compute(child, 1)
        return True

    def finish(self, a: int, b: int) -> bool:
        request = self.pick(a)
        if request is None:
            return False
        self.requests.remove(request)
        self.past = [*self.past[-9:], (request.token_ids.tolist(), request.cache_salt)]
        self.kv.free(request)
        return True

    def preempt(self, a: int, b: int) -> bool:
        """Freed, and admitted again with all its tokens."""
        request = self.pick(a)
        if request is None:
            return False
        self.requests.remove(request)
        self.kv.free(request)
        return self.start(request, 1 + b % 9, 0)

    def discard(self, a: int, b: int) -> bool:
        request = self.pick(a)
        if request is None:
            return False
        self.requests.remove(request)
        known, cached = self.known(request), request.num_cached_tokens
        self.tainted.update(known[end - 1] for end in range(cached + 1, request.num_computed_tokens + 1))
        tokens, computed = request.token_ids.tolist(), request.num_computed_tokens
        self.kv.discard(request)
        assert self.kv.lookup(self.new_request([*tokens[:computed], 0], request.cache_salt)).num_tokens <= cached
        return True

    def pressure(self, a: int, b: int) -> bool:
        """Blocks are taken by others, sometimes all of them."""
        free = self.kv.pool.num_free
        taken = self.kv.pool.allocate(free if a % 4 == 0 else min(free, a % 9))
        self.pressed += taken
        self.forget({(False, block) for block in taken})
        return bool(taken)

    def relax(self, a: int, b: int) -> bool:
        taken, self.pressed = self.pressed, []
        self.kv.pool.free(taken)
        return bool(taken)

    def reset(self, a: int, b: int) -> bool:
        idle = self.kv.pool.num_free == self.kv.pool.num_usable
        assert self.kv.reset_prefix_cache() == idle
        if idle:
            self.tainted.clear()
            self.keyed = [{} for _ in self.keyed]
        return idle

    def drain(self, a: int, b: int) -> bool:
        """Everyone ends, now and then."""
        if a % 8:
            return False
        while self.requests:
            self.finish(0, 0)
        self.relax(0, 0)
        assert self.kv.pool.num_free == self.kv.pool.num_usable
        assert self.kv.recent_pool is None or self.kv.recent_pool.num_free == self.kv.recent_pool.num_usable
        return self.reset(0, 0) if b % 4 == 0 else True

    def check(self) -> None:
        """Every live position of every request holds what it must; references and sizes are right."""
        check_tables(self.kv, self.requests, held=self.pressed)
        for request in self.requests:
            known = self.known(request)
            for group, size in enumerate(self.kv.block_sizes):
                first, end = self.first_needed_block(group, request.num_computed_tokens), request.num_computed_tokens
                if self.has_recent and self.kv.groups[group].recent_blocks is None:
                    end = max(0, end // size - self.window) * size  # the rest lies in the other group
                kept = min(self.num_kept(group, first) * size, end)
                for position in (*range(kept), *range(first * size, end)):
                    block = request.block_ids[group][position // size]
                    assert self.slots[group][block, position % size] == known[position]

    @property
    def free(self) -> list[int]:
        """Blocks of each pool."""
        return [pool.num_free for pool in (self.kv.pool, self.kv.recent_pool) if pool is not None]

    def pick(self, a: int) -> Request | None:
        return self.requests[a % len(self.requests)] if self.requests else None

    def new_request(self, tokens: list[int], salt: str | None) -> Request:
        return Request("r", array("i", tokens), SamplingParams(), arrival=0, max_total_tokens=999, cache_salt=salt)

    def extend(self, request: Request, num_tokens: int, lookahead: int, b: int) -> bool:
        """Compute more tokens, generating them where the prompt is at its end."""
        end = request.num_computed_tokens + num_tokens
        if end > 2 * MAX_TOKENS or not self.allocate(request, num_tokens, lookahead):
            return False
        missing = max(0, end - len(request.token_ids))
        request.token_ids.extend(random.Random(b).choices(range(2), k=missing))
        self.compute(request, num_tokens)
        if lookahead:
            self.kv.trim(request)
        return True

    def allocate(self, request: Request, num_tokens: int, lookahead: int) -> bool:
        before = self.blocks(request)
        tables, free = [table[:] for table in request.block_ids], self.free
        if not self.kv.allocate_slots(request, num_tokens, lookahead):
            assert request.block_ids == tables and self.free == free
            self.counts["refused"] += 1
            return False
        assert all(table[: len(old)] == old for table, old in zip(request.block_ids, tables, strict=True))
        self.forget_fresh(request, before)
        return True

    def compute(self, request: Request, num_tokens: int) -> None:
        """Write tokens for which there is room, and commit them."""
        self.write(request, num_tokens)
        released, known = sum(request.num_released), self.known(request)
        tables = [table[:] for table in request.block_ids]
        request.num_computed_tokens += num_tokens
        self.kv.commit(request)
        self.counts["released"] += sum(request.num_released) - released
        for group, size in enumerate(self.kv.block_sizes):
            late = 0 if self.is_recent(group) else self.window
            for index in range(request.num_computed_tokens // size - late):
                if tables[group][index] and self.kv._pools[group].enable_caching:
                    self.keyed[group][tables[group][index]] = known[(index + 1) * size - 1]

    def write(self, request: Request, num_tokens: int) -> None:
        known = self.known(request)
        start = request.num_computed_tokens
        end = min(start + num_tokens, len(known), request.num_slots)
        for group, size in enumerate(self.kv.block_sizes):
            for position in range(start, end):
                block = request.block_ids[group][position // size]
                pool = self.kv._pools[group]
                assert pool.ref_count(block) == 1 and block not in self.keyed[group], "written while shared"
                if not self.has_recent or self.is_recent(group):
                    self.slots[group][block, position % size] = known[position]
        if self.has_recent:
            self.seal(request, start, end)

    def seal(self, request: Request, start: int, end: int) -> None:
        """Encode the blocks that were filled, or that the window has passed; what others may read stays the same."""
        size, (blocks, recent) = self.kv.block_sizes[0], request.block_ids
        for index in range(max(0, start // size - self.window), end // size - self.window):
            rows = {offset: self.slots[1][recent[index], offset] for offset in range(size)}
            if blocks[index] in self.keyed[0]:
                assert rows == {offset: self.slots[0][blocks[index], offset] for offset in range(size)}
            self.slots[0].update({(blocks[index], offset): row for offset, row in rows.items()})
            self.counts["sealed again"] += blocks[index] in self.keyed[0]

    def known(self, request: Request) -> list[int]:
        """The identity of each prefix of the request, salt included."""
        identity, known = -1 - ord(request.cache_salt or "-"), []
        for token in request.token_ids:
            identity = self.identities.setdefault((identity, token), len(self.identities) + 1)
            known.append(identity)
        return known

    def forget(self, blocks: set[tuple[bool, int]]) -> None:
        """These blocks, each of `recent_pool` or not, were handed out anew: what they held is gone."""
        for group, keyed in enumerate(self.keyed):
            for recent, block in blocks:
                if recent == self.is_recent(group):
                    keyed.pop(block, None)

    def forget_fresh(self, request: Request, before: set[tuple[bool, int]]) -> None:
        self.forget(self.blocks(request) - before)

    def blocks(self, request: Request) -> set[tuple[bool, int]]:
        return self.ids(request.block_ids)

    def ids(self, tables: Iterable[Sequence[int]]) -> set[tuple[bool, int]]:
        """Those that may carry keys, of `recent_pool` or not."""
        return {(self.is_recent(group), block) for group, table in enumerate(tables) for block in table}

    def num_kept(self, group: int, first: int) -> int:
        return min(self.kv.groups[group].first_blocks, first) if self.is_recent(group) else 0

    def is_recent(self, group: int) -> bool:
        return self.kv.groups[group].recent_blocks is not None

    def first_needed_block(self, group: int, position: int) -> int:
        window = self.kv.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.kv.block_sizes[group]

    def longest_hit(self, request: Request) -> tuple[int, bool]:
        """How long the hit should be by plain search, and whether that is certain (not where content was discarded)."""
        known, found = self.known(request), [set(keyed.values()) for keyed in self.keyed]
        certain = self.tainted.isdisjoint(known)
        for length in range(0 if request.skip_prefix_cache_reads else len(known) - 1, 0, -1):
            if all(length % size == 0 for size in self.kv.block_sizes) and all(
                known[(index + 1) * size - 1] in found[group]
                for group, size in enumerate(self.kv.block_sizes)
                for first in [self.first_needed_block(group, length)]
                for index in (*range(self.num_kept(group, first)), *range(first, length // size))
            ):
                return length, certain
        return 0, certain
