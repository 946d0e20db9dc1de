"""A layer over full blocks and a second cache of recent ones: what is read depends on the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import random_work
import torch
from covers import beside

from pagedattn import Attention, AttentionType, BlockPool, CommonAttentionMetadata, Mask, PagedKVCache, plan_step
from pagedattn.cache.specs import SlidingWindowSpec
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.registry import format_of
from pagedattn.layers.functional import paged_attention
from pagedattn.spec import GraphLevel
from pagedattn.testing.oracle import attention_oracle

SIZE, HEADS, KV_HEADS, DIM, LENGTH = 32, 4, 2, 64, 150
BACKENDS = ("TORCH", "TRITON")
STORED = ("int4", "turboquant4:window=40", "int8:window=32", "turboquant3:window=10:first=40", "int4:first=1")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY, VALUE = normal(LENGTH, HEADS, DIM), normal(LENGTH, KV_HEADS, DIM, seed=1)
KEY = normal(LENGTH, KV_HEADS, DIM, seed=2) + 2 * normal(KV_HEADS, DIM, seed=3)


class Sequences:
    """A layer, both caches with pools of their own, and sequences in them by their block ids."""

    def __init__(
        self, backend: str, stored: str = "int4", num_blocks: int = 40, recent_blocks: int = 20, **options: Any
    ) -> None:
        self.layer = Attention(HEADS, DIM, KV_HEADS, kv_cache_dtype=stored, backend=backend, block_size=SIZE, **options)
        self.before, self.kept = format_of(stored).recent_blocks(SIZE), format_of(stored).first_blocks(SIZE)
        shape = (1, num_blocks, SIZE, KV_HEADS, DIM)
        self.cache = PagedKVCache(*shape, kv_cache_dtype=stored, recent_blocks=recent_blocks)
        self.cache.slabs.fill_(0x7F)  # scales that are NaN, and rows too
        self.recent.slabs.fill_(0xFF)
        self.pool, self.recent_pool = BlockPool(num_blocks), BlockPool(recent_blocks)

    @property
    def recent(self) -> PagedKVCache:
        assert self.cache.recent is not None
        return self.cache.recent

    def new(self) -> Sequence1:
        return Sequence1(self)


class Sequence1:
    """One sequence: its length, and its blocks in either cache, -7 where one was released."""

    def __init__(self, owner: Sequences) -> None:
        self.owner, self.length = owner, 0
        self.blocks: list[int] = []
        self.recent: list[int] = []

    def append(
        self, count: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (QUERY, KEY, VALUE)
    ) -> torch.Tensor:
        """The output of `count` more tokens, in a step of its own; recent blocks that they do not read are released."""
        start, self.length = self.length, self.length + count
        self._release(max(start // SIZE - self.owner.before, 0))
        for blocks, pool in ((self.blocks, self.owner.pool), (self.recent, self.owner.recent_pool)):
            blocks += pool.allocate(max(-(-self.length // SIZE) - len(blocks), 0))
        tables = (torch.tensor([[*ids, 2**31 - 1]]).int() for ids in (self.blocks, self.recent))
        table, recent_table = tables
        common = CommonAttentionMetadata.from_lengths(
            [count], [self.length], table, block_size=SIZE, recent_table=recent_table
        )
        query, key, value = (x[start : self.length] for x in rows)
        return self.owner.layer(query, key, value, self.owner.cache.layer(0), common)

    def _release(self, first: int) -> None:
        kept = self.owner.kept
        passed = [block for block in self.recent[kept:first] if block >= 0]
        self.owner.recent.zero_blocks(passed)
        self.owner.recent.slabs[:, passed] = 0xFF
        self.owner.recent_pool.free(passed)
        self.recent[kept:first] = [-7] * (first - kept)

    def take_back(self, count: int) -> None:
        """The last tokens are rejected; their blocks stay."""
        self.length -= count

    def fork(self) -> Sequence1:
        other = Sequence1(self.owner)
        other.length, is_open = self.length, self.length % SIZE > 0
        full = -(-self.length // SIZE)
        other.blocks, pairs = self.owner.pool.fork(self.blocks[:full], has_open_block=is_open)
        self.owner.cache.copy_blocks(pairs)
        if is_open:
            (copy,) = self.owner.recent_pool.allocate(1)
            self.owner.recent.copy_blocks([(self.recent[full - 1], copy)])
            other.recent = [-7] * (full - 1) + [copy]
        else:
            other.recent = [-7] * full
        return other


@lru_cache
def by_definition(stored: str = "int4", length: int = LENGTH, window: int | None = None) -> torch.Tensor:
    """Each position alone: its own block, those of the format's window and first ones as they came, others encoded."""
    out, form = [], format_of(stored)
    full = length // SIZE * SIZE
    before, kept = (
        -(-int(stored.partition(f"{name}=")[2].partition(":")[0] or 0) // SIZE) for name in ("window", "first")
    )
    encoded = [
        side.decode(side.encode(x[:full].unflatten(0, (-1, SIZE))), DIM, torch.float64).flatten(0, 1)
        for side, x in ((form.key, KEY), (form.value, VALUE))
    ]
    for at in range(length):
        first = max(at // SIZE - before, 0) * SIZE
        low = min(kept * SIZE, first)
        key, value = (
            torch.cat((b[:low].double(), a[low:first], b[first : at + 1].double()))
            for a, b in zip(encoded, (KEY, VALUE), strict=True)
        )
        mask = Mask(True, window)
        out.append(attention_oracle(QUERY[at : at + 1], key, value, scale=DIM**-0.5, mask=mask)[0])
    return torch.cat(out)


WANTED = by_definition()


def test_it_is_not_exact_attention_but_near() -> None:
    exact, _ = attention_oracle(QUERY, KEY, VALUE, scale=DIM**-0.5)
    off = (WANTED - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    assert not off[:SIZE].any() or float(off[:SIZE].max()) < 1e-12, "the first block is read as it came"
    assert 0.02 < float(off[SIZE:].mean()) < 0.15


def row_counts(backend: str, stored: str, chunk: int) -> list[int]:
    """How many rows come at once; decodes by the interpreter, which are slow, before and behind two ends of blocks."""
    if backend == "TRITON" and chunk == 1:
        return [1] * 100 if random_work.everything else [58, *[1] * 8, 56, *[1] * 8]
    return [min(chunk, LENGTH - begin) for begin in range(0, LENGTH, chunk)]


@pytest.mark.cover(by=beside("backend"))
@pytest.mark.parametrize("chunk", [1, 7, 32, 45, 4096])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_of_any_size_give_one_result(backend: str, stored: str, chunk: int) -> None:
    sequence = Sequences(backend, stored).new()
    out = torch.cat([sequence.append(count) for count in row_counts(backend, stored, chunk)])
    torch.testing.assert_close(out.double(), by_definition(stored)[: len(out)], rtol=0, atol=5e-6)


def test_a_window_brings_attention_nearer_to_exact() -> None:
    exact, _ = attention_oracle(QUERY, KEY, VALUE, scale=DIM**-0.5)
    off = [float((by_definition(f"turboquant4:window={n}") - exact)[SIZE:].norm()) for n in (1, 33, 65)]
    assert off[0] > 1.3 * off[1] > 1.3**2 * off[2] > 0


@pytest.mark.parametrize("stored", (*STORED[:2], STORED[3]))
def test_chunks_give_the_same_bits_where_that_is_asked_for(stored: str) -> None:
    found = []
    for chunk in (*((7,) if random_work.everything else ()), 32, 45, 4096):
        sequence, out = Sequences("TRITON", stored, deterministic=True).new(), []
        while sequence.length < LENGTH:
            out.append(sequence.append(min(chunk, LENGTH - sequence.length)))
        found.append(torch.cat(out))
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sliding_window_reaches_over_both_caches(backend: str, stored: str) -> None:
    sequence = Sequences(backend, stored, sliding_window=70).new()
    out = torch.cat([sequence.append(count) for count in (20, 1, 60, 33, 36)])
    torch.testing.assert_close(out.double(), by_definition(stored, window=70), rtol=0, atol=5e-6)


@pytest.mark.cover(by=beside("backend"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rejected", [1, 3, 8])
def test_drafts_that_are_taken_back_across_a_seal(backend: str, stored: str, rejected: int) -> None:
    """Eight drafts fill a block; fewer are accepted, so that it is open again, and is filled by others."""
    wanted, sequence = by_definition(stored), Sequences(backend, stored).new()
    sequence.append(60)
    drafts = tuple(torch.cat((x[:60], normal(8, *x.shape[1:], seed=9), x[68:])) for x in (QUERY, KEY, VALUE))
    right = 8 - rejected
    for given, taken in zip(drafts, (QUERY, KEY, VALUE), strict=True):
        given[60 : 60 + right] = taken[60 : 60 + right]
    drafted = sequence.append(8, drafts)  # type: ignore[arg-type]
    torch.testing.assert_close(drafted[:right].double(), wanted[60 : 60 + right], rtol=0, atol=5e-6)
    sequence.take_back(rejected)
    out = torch.cat([sequence.append(count) for count in (1, 7, 20, 50)])
    start = 60 + right
    torch.testing.assert_close(out.double(), wanted[start : start + 78], rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [31, 32, 33, 64])
def test_a_fork_shares_full_blocks_and_leaves_the_first_as_it_was(backend: str, length: int) -> None:
    first = Sequences(backend).new()
    first.append(length)
    second = first.fork()
    shared = length // SIZE
    assert first.blocks[:shared] == second.blocks[:shared] and not {*first.blocks[shared:]} & {*second.blocks[shared:]}
    other = tuple(torch.cat((x[:length], normal(40, *x.shape[1:], seed=5))) for x in (QUERY, KEY, VALUE))
    changed = second.append(40, other)  # type: ignore[arg-type]
    out = first.append(40)
    torch.testing.assert_close(out.double(), WANTED[length : length + 40], rtol=0, atol=5e-6)
    assert not torch.allclose(changed, out, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_were_away_read_as_before(backend: str) -> None:
    sequence = Sequences(backend).new()
    sequence.append(80)
    owner, last = sequence.owner, sequence.recent[-1]
    host, recent_host = (
        one.over(torch.zeros(1, 4, one.bytes_per_block, dtype=torch.uint8)) for one in (owner.cache, owner.recent)
    )
    owner.cache.swap_blocks(host, list(zip(sequence.blocks, range(3), strict=True)))
    owner.recent.swap_blocks(recent_host, [(last, 0)])
    owner.cache.slabs.fill_(0x7F)
    owner.recent.slabs.fill_(0xFF)
    sequence.blocks, sequence.recent = owner.pool.allocate(3), [-7, -7, *owner.recent_pool.allocate(1)]
    host.swap_blocks(owner.cache, list(zip(range(3), sequence.blocks, strict=True)))
    recent_host.swap_blocks(owner.recent, [(0, sequence.recent[-1])])
    torch.testing.assert_close(sequence.append(30).double(), WANTED[80:110], rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_is_found_for_every_length_of_a_block(backend: str) -> None:
    """The second cache begins empty: a prefix of whole blocks has no open one."""
    owner = Sequences(backend, num_blocks=60)
    first, node, found = owner.new(), None, 0
    first.append(96)
    contents = [bytes([at]) for at in range(3)]
    for block, content in zip(first.blocks, contents, strict=True):
        node = owner.pool.commit(block, node, content)
    for length in range(65, 97) if backend == "TORCH" else (65, 80, 96):
        node, hits = None, []
        for content in contents[: (length - 1) // SIZE]:
            node = owner.pool.find(node, content)
            assert node is not None
            hits.append(owner.pool.block_of(node))
        other = owner.new()
        owner.pool.touch(hits)  # type: ignore[arg-type]
        other.blocks, other.recent, other.length = list(hits), [-7] * len(hits), len(hits) * SIZE  # type: ignore[arg-type]
        found += len(hits)
        out = other.append(length - other.length)
        torch.testing.assert_close(out.double(), WANTED[64:length], rtol=0, atol=5e-6)
        owner.pool.free(other.blocks)
        other._release(len(other.recent))
    assert found >= 6


def mixed(query_lens: Sequence[int], seq_lens: Sequence[int]) -> CommonAttentionMetadata:
    tables = (torch.arange(1, 1 + 5 * len(seq_lens)).view(-1, 5).int() for _ in range(2))
    table, recent_table = tables
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size=SIZE, recent_table=recent_table)


@pytest.mark.parametrize("stored", (*STORED[:2], STORED[3]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_metadata_are_rewritten_in_place(backend: str, stored: str) -> None:
    """What a graph has recorded reads the same tensors, from which it finds slots, blocks to seal, and lengths."""
    level = GraphLevel.ALWAYS if backend == "TRITON" else GraphLevel.NEVER
    owner = Sequences(backend, stored, graph_level=level)
    layer, cache = owner.layer, owner.cache.layer(0)
    if backend == "TORCH":
        with pytest.raises(UnsupportedError, match="graph level"):
            layer.build(mixed([1, 1], [40, 70]), capture=True)
        return
    other = torch.zeros(3, 5, dtype=torch.int32)
    captured = layer.build(mixed([1, 1, 1], [150, 150, 150]).replace(recent_table=other), capture=True)
    addresses = {
        name: getattr(captured.common, name).data_ptr() for name in ("seq_lens", "slot_mapping", "recent_table")
    }
    rows = [torch.cat((x[:94], x[:94])) for x in (QUERY, KEY, VALUE)]
    layer(*rows, cache, mixed([94, 94], [94, 94]))
    for at in range(94, 99):
        step = mixed([1, 1], [at + 1, at + 1])
        assert layer.builder.build(step, captured) is captured
        out = layer(*(x[[at, at, 0]] for x in (QUERY, KEY, VALUE)), cache, captured)
        torch.testing.assert_close(out[:2].double(), by_definition(stored)[[at, at]], rtol=0, atol=5e-6)
    assert addresses == {name: getattr(captured.common, name).data_ptr() for name in addresses}
    assert "full blocks" in captured.describe() and "open blocks" in captured.describe()
    with pytest.raises(InvalidInputError, match="recent_table must be given"):
        layer.builder.build(step.replace(recent_table=None), captured)


def test_rows_that_have_no_slot_are_not_written() -> None:
    """As where rows of a batch share a prompt that one of them writes."""
    owner = Sequences("TORCH")
    step = mixed([40, 40], [40, 40])
    written = step.slot_mapping.clone()
    written[40:] = -1
    built = owner.layer.build(step.replace(slot_mapping=written))
    assert (built.common.slot_mapping[:40] >= SIZE).all() and (built.common.slot_mapping[40:] == -1).all()
    before = owner.recent.slabs[0, 6:8].clone()
    owner.layer(*(torch.cat((x[:40], x[:40])) for x in (QUERY, KEY, VALUE)), owner.cache.layer(0), built)
    assert torch.equal(owner.recent.slabs[0, 6:8], before)


def test_two_backends_and_a_planned_step() -> None:
    owner = Sequences("prefill=TRITON,decode=TORCH")
    cache, layer = owner.cache.layer(0), owner.layer
    rows = [torch.cat((x[:70], x[:40])) for x in (QUERY, KEY, VALUE)]
    out = layer(*rows, cache, plan_step([layer], mixed([70, 40], [70, 40])))
    torch.testing.assert_close(out.double(), torch.cat((WANTED[:70], WANTED[:40])), rtol=0, atol=5e-6)
    rows = [torch.cat((x[70:71], x[40:80])) for x in (QUERY, KEY, VALUE)]
    out = layer(*rows, cache, plan_step([layer], mixed([1, 40], [71, 80])))
    torch.testing.assert_close(out.double(), torch.cat((WANTED[70:71], WANTED[40:80])), rtol=0, atol=5e-6)


def test_the_function_does_as_the_layer_does() -> None:
    cache = Sequences("TORCH").cache.layer(0)
    query, key, value = (x[:100] for x in (QUERY, KEY, VALUE))
    out, lse = paged_attention(query, key, value, cache, mixed([100], [100]), return_lse=True)
    torch.testing.assert_close(out.double(), WANTED[:100], rtol=0, atol=5e-6)
    assert lse is not None and bool(lse.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_come_with_the_call_are_read_as_they_are(backend: str) -> None:
    layer = Sequences(backend).layer
    out = layer(QUERY[:50], KEY[:50], VALUE[:50], None, CommonAttentionMetadata.from_lengths([50], [50]))
    exact, _ = attention_oracle(QUERY[:50], KEY[:50], VALUE[:50], scale=DIM**-0.5)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-6)


def call(common: CommonAttentionMetadata, **changes: Any) -> None:
    owner = Sequences("TORCH")
    owner.layer(*(x[:40] for x in (QUERY, KEY, VALUE)), changes.get("cache", owner.cache.layer(0)), common)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = mixed([40], [40])
    with pytest.raises(InvalidInputError, match="recent_table must be given for a cache of kv_cache_dtype='int4'"):
        call(step.replace(recent_table=None))
    plain = PagedKVCache(1, 9, SIZE, KV_HEADS, DIM, kv_cache_dtype="int4", recent_blocks=3)
    host = plain.over(torch.zeros_like(plain.slabs))
    with pytest.raises(InvalidInputError, match="kv_cache must be with `recent`"):
        call(step, cache=host.layer(0))
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    with pytest.raises(InvalidInputError, match="recent_table must be given"):
        call(step.replace(recent_table=None))
    with pytest.raises(InvalidInputError, match="kv_cache must be a cache of int4 with `recent`"):
        call(step, cache=host.layer(0))
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    call(step)
    with pytest.raises(InvalidInputError, match=r"recent_table must be blocks in .*, got 99 at row 0, column 1"):
        call(step.replace(recent_table=torch.tensor([[1, 99]]).int()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, "block_size must be a multiple of 32 for kv_cache_dtype='int4', got 16"),
        ({"attn_type": AttentionType.CROSS}, "attn_type=cross .*decoder over int4"),
        ({"causal": False}, "causal=False .*causal attention over int4"),
        ({"mask": Mask(own_block=32)}, "own_block=32 .*none over int4"),
        ({"backend": "FLASHINFER"}, "kv_cache_dtype=int4"),
    ],
)
def test_layers_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedError), match=message):
        Attention(HEADS, DIM, KV_HEADS, kv_cache_dtype="int4", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "block_size must be a multiple of 32 .* got 48; pass block_size=64"),
        ({"block_size": 32}, "recent_blocks must be given for kv_cache_dtype='int4', got None"),
        ({"kv_cache_dtype": "int8", "recent_blocks": 3}, "recent_blocks must be None for kv_cache_dtype='int8'"),
    ],
)
def test_caches_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PagedKVCache(**{"num_layers": 1, "num_blocks": 4, "kv_cache_dtype": "int4", **options})


def test_layers_of_several_kinds_are_refused() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "block_size": 32, "kv_cache_dtype": "int4"}
    specs = [SlidingWindowSpec(**shape, sliding_window=width) for width in (8, 16)]
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int4' has one KV group, these layers are of 2"):
        PagedKVCache.from_specs(specs, 4, recent_blocks=2)
