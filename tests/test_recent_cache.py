"""A layer over full blocks and a second cache of recent ones: what is read depends on the position alone."""

from __future__ import annotations

import pytest
import random_work
import torch
from covers import beside
from recent_sequences import BACKENDS, DIM, KEY, LENGTH, QUERY, SIZE, VALUE, Sequences, by_definition, mixed, normal

from pagedattn import CommonAttentionMetadata, plan_step
from pagedattn.backends import recent
from pagedattn.backends.recent import RecentBuilder
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.registry import format_of
from pagedattn.layers.functional import paged_attention
from pagedattn.spec import GraphLevel
from pagedattn.testing.oracle import attention_oracle

STORED = ("int4", "turboquant4:window=40", "int8:window=32", "turboquant3:window=10:first=40", "int4:first=1")
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
@pytest.mark.parametrize("chunk", [1, 7, 32, 45, LENGTH])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_of_any_size_give_one_result(backend: str, stored: str, chunk: int) -> None:
    sequence = Sequences(backend, stored).new()
    out = torch.cat([sequence.append(count) for count in row_counts(backend, stored, chunk)])
    torch.testing.assert_close(out.double(), by_definition(stored)[: len(out)], rtol=0, atol=5e-6)


@pytest.mark.parametrize("stored", STORED)
def test_keys_that_are_read_as_they_came_are_counted(stored: str) -> None:
    """As the masks of a layer's calls say: over full blocks, and over those of the second cache."""
    builder, form, at = Sequences("TORCH", stored).layer.builder, format_of(stored), torch.arange(LENGTH)
    assert isinstance(builder, RecentBuilder)
    encoded, *native = (one.spec.mask.visible(at[:, None], at) for one in (builder._sealed, *builder._recent))
    assert torch.equal(encoded.int() + sum(one.int() for one in native), (at <= at[:, None]).int()), "each key once"
    counted = [form.native_keys(position, SIZE) for position in range(LENGTH)]
    assert counted == sum(one.sum(1) for one in native).tolist()  # type: ignore[union-attr]
    assert [format_of(name).native_keys(40, SIZE) for name in ("auto", "int8")] == [41, 0]


def test_outputs_of_both_calls_are_rounded_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (QUERY.half(), KEY.half(), VALUE.half())
    wanted = Sequences("TORCH").new().append(LENGTH, (rows[0].float(), rows[1].float(), rows[2].float())).half()
    once = Sequences("TORCH", dtype=torch.float16).new().append(LENGTH, rows)
    monkeypatch.setattr(recent, "_MOST_BYTES", 4 * QUERY.numel() - 1)
    twice = Sequences("TORCH", dtype=torch.float16).new().append(LENGTH, rows)
    torch.testing.assert_close(twice, wanted, atol=1e-3, rtol=1e-3)
    differ = [float((out != wanted).float().mean()) for out in (once, twice)]
    assert differ[0] < 0.01 and differ[1] > 0.1


def test_a_window_brings_attention_nearer_to_exact() -> None:
    exact, _ = attention_oracle(QUERY, KEY, VALUE, scale=DIM**-0.5)
    off = [float((by_definition(f"turboquant4:window={n}") - exact)[SIZE:].norm()) for n in (1, 33, 65)]
    assert off[0] > 1.3 * off[1] > 1.3**2 * off[2] > 0


@pytest.mark.parametrize("stored", (*STORED[:2], STORED[3]))
def test_chunks_give_the_same_bits_where_that_is_asked_for(stored: str) -> None:
    found = []
    for chunk in (*((7,) if random_work.everything else ()), 32, 45, LENGTH):
        sequence, out = Sequences("TRITON", stored, deterministic=True).new(), []
        while sequence.length < LENGTH:
            out.append(sequence.append(min(chunk, LENGTH - sequence.length)))
        found.append(torch.cat(out))
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_the_same_bits_of_steps_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """For sums of 16 bits there is always room, where their rounding would depend on the step."""
    monkeypatch.setattr(recent, "_MOST_BYTES", 4 * QUERY[:40].numel())
    rows, found = (QUERY.half(), KEY.half(), VALUE.half()), []
    for chunk in (40, LENGTH):
        sequence, out = Sequences("TRITON", dtype=torch.float16, deterministic=True).new(), []
        while sequence.length < LENGTH:
            out.append(sequence.append(min(chunk, LENGTH - sequence.length), rows))
        found.append(torch.cat(out))
    assert torch.equal(*found)


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
