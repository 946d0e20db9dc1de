"""Which calls go to the prefill kernel for Hopper; what it computes on one is in tests/backends/test_hopper.py."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache, ops
from pagedattn.kernels import hopper
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.prefill_sm90.plan import TileSchedulerParams
from pagedattn.kernels.shape import AttentionShape, BatchBounds, shape_of
from pagedattn.ops import attention_plan
from pagedattn.ops.attention_plan import plan_call
from pagedattn.runtime.workspace import new_workspace

HEADS, KV_HEADS, DIM, BLOCKS, SIZE = 8, 2, 128, 5, 16


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")


def listing(kv_heads: int, group: int, max_keys: int = 1 << 17, window: int = 0, **of: Any) -> TileSchedulerParams:
    return TileSchedulerParams(kv_heads, group, 128, mask=(1, window), max_keys=max_keys, num_sms=132, **of)


def joined(
    num_decodes: int = 64,
    kv_heads: int = 8,
    group: int = 4,
    max_seq_len: int = 4096,
    tokens: int = 1000,
    window: int = 0,
) -> bool:
    bounds = BatchBounds(num_decodes + tokens, num_decodes + 1, num_decodes, tokens, max_seq_len)
    return attention_plan.should_fuse_decodes(listing(kv_heads, group, window=window, max_query_len=tokens), bounds)


def test_decodes_that_join_prompts() -> None:
    assert joined() and joined(128, max_seq_len=3000) and joined(1, max_seq_len=1000)
    assert not joined(0), "no decodes"
    assert not joined(32) and not joined(16, max_seq_len=8000), "two long ones for an SM, and then none"
    assert joined(16, max_seq_len=8000, window=500), "of which few keys are seen"
    assert not joined(group=6), "three items a head, which would read the same keys"
    assert joined(5, max_seq_len=8000, tokens=200), "few tiles, whose keys are split"
    assert not joined(5, max_seq_len=8000, tokens=400) and not joined(0, max_seq_len=8000, tokens=200)
    assert joined(5, group=7, max_seq_len=8000, tokens=40) and not joined(5, group=7, max_seq_len=8000, tokens=200)


def taken(
    num_seqs: int = 64, group: int = 4, max_query_len: int = 8, max_seq_len: int = 4096, max_keys: int = 1 << 17
) -> bool:
    bounds = BatchBounds(1, num_seqs, 0, max_query_len, max_seq_len)
    params = listing(8, group, max_keys=max_keys, max_query_len=max_query_len)
    return attention_plan.handles_short_queries(params, bounds)


def test_several_tokens_that_are_items_of_its_own() -> None:
    assert taken() and taken(17, max_seq_len=2048) and taken(group=16, max_query_len=2)
    assert taken(max_query_len=5) and not taken(max_query_len=4), "rows that one block of the decode kernel has"
    assert not taken(group=32, max_query_len=1), "a decode"
    assert not taken(16, max_seq_len=100), "fewer than SMs, and too short to be cut"
    assert not taken(max_seq_len=8000), "some SMs would be left with a long one, and there are many"
    assert taken(16, max_seq_len=8000) and taken(1, max_seq_len=4096), "few, whose keys are shared out"
    assert not taken(16, max_seq_len=8000, max_keys=0), "parts of tables of unknown size"
    assert taken(group=6) and not taken(group=71), "a tile has no room for a group"


@pytest.mark.parametrize(
    ("group", "num_seqs", "max_query_len", "max_seq_len", "window", "served"),
    [
        (4, 16, 5, 2047, 0, True),
        (4, 16, 4, 2047, 0, False),  # rows that one block of the decode kernel has
        (4, 17, 5, 2047, 0, False),  # more tiles than SMs
        (4, 16, 5, 2048, 0, False),  # keys that would be split
        (4, 16, 5, 9000, 1000, True),  # of which few are seen
        (7, 16, 5, 500, 0, True),
        (65, 1, 5, 500, 0, False),  # a tile of each query head
        (32, 1, 1, 500, 0, False),  # a decode
    ],
)
def test_several_tokens_that_see_few_keys_are_items_of_its_own(
    group: int, num_seqs: int, max_query_len: int, max_seq_len: int, window: int, served: bool
) -> None:
    bounds = BatchBounds(1, num_seqs, 0, max_query_len, max_seq_len)
    params = listing(8, group, window=window, max_query_len=max_query_len)
    assert attention_plan.see_few_keys(params, bounds) == served


def parts(
    tokens: int = 100, num_seqs: int = 1, num_decodes: int = 0, longest: int = 100, keys: int = 8000, **of: int
) -> bool:
    return sm90.splits_kv(listing(8, 4, **of), BatchBounds(tokens, num_seqs, num_decodes, longest, keys))


def test_prompts_whose_keys_are_shared_out() -> None:
    assert parts() and parts(2000, longest=2000) and parts(400, num_seqs=4)
    assert parts(keys=700) and not parts(keys=600), "an SM would be left with too few tiles less"
    assert parts(400, num_seqs=12, keys=2048) and not parts(400, num_seqs=12, keys=2047), "nor with more tiles than SMs"
    assert parts(2000, longest=2000) and not parts(4000, longest=2001), "as many tokens as keys"
    assert not parts(4000, num_seqs=2, longest=2000) and not parts(100, num_seqs=64), "an item for each SM"
    assert parts(8192), "rows of nobody"
    assert parts(num_decodes=2) and not parts(num_decodes=2, num_seqs=14), "of more tiles the decodes would stay whole"
    assert not parts(max_keys=0)
    assert parts(window=600) and not parts(window=500), "keys that nobody sees"
    assert not parts(deterministic=True), "where a row's keys are cut would depend on its chunk"


def test_heads_that_go_over_a_list_together() -> None:
    assert [sm90.heads_together(n) for n in (1, 8, 16, 17, 24, 32, 36, 40, 128)] == [0, 0, 0, 1, 12, 16, 12, 10, 16]


def call(**changes: Any) -> AttentionInputs:
    dtype = changes.pop("dtype", torch.bfloat16)
    cache = torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM, dtype=changes.pop("stored", dtype))
    starts, lens = torch.tensor([0, 1, 40], dtype=torch.int32), torch.tensor([30, 60], dtype=torch.int32)
    given = {
        "query": torch.zeros(40, HEADS, DIM, dtype=dtype),
        "key": cache,
        "value": cache.clone(),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "query_start_loc": starts,
        "seq_lens": lens,
        **dict.fromkeys(("sinks", "alibi_slopes", "k_scale", "v_scale", "lse")),
        "out": torch.zeros(40, HEADS, DIM, dtype=dtype),
        **{"scale": 0.1, "out_scale": 1.0, "mask": (1, 0), "softcap": 0.0},
        **{"max_query_len": 39, "max_seq_len": 60, "num_decodes": 1, "deterministic": False},
    }
    return AttentionInputs(**{**given, **changes})


def refused(inputs: AttentionInputs) -> str:
    return sm90.why_not(shape_of(inputs), "") or sm90.why_not_tensors(inputs)


def caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values as the library allocates them."""
    pool = PagedKVCache(2, BLOCKS, SIZE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cpu", layout=layout)
    layer = pool.layer(1)
    return layer.key, layer.value


def test_the_usual_call_is_served() -> None:
    assert refused(call()) == ""
    fused = torch.zeros(40, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    assert refused(call(query=fused[:, :HEADS])) == ""


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_our_own_caches_are_served(layout: str) -> None:
    key, value = caches(layout)
    assert refused(call(key=key, value=value)) == ""


def test_packed_keys_are_served_but_for_none_and_codes() -> None:
    rows = torch.zeros(60, KV_HEADS, DIM, dtype=torch.bfloat16)
    assert refused(call(block_table=None, key=rows, value=rows)) == ""
    assert "no keys" in refused(call(block_table=None, key=rows[:0], value=rows[:0]))
    codes = rows.to(torch.float8_e4m3fn)
    assert "over a cache of" in refused(call(block_table=None, key=codes, value=codes))
    fused = torch.zeros(60, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    slices = fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :]
    assert refused(call(block_table=None, key=slices[0], value=slices[1])) == ""


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_caches_are_served_with_their_scales(stored: torch.dtype) -> None:
    assert refused(call(stored=stored)) == ""
    assert refused(call(stored=stored, k_scale=torch.ones(1), v_scale=torch.ones(KV_HEADS), out_scale=2.0)) == ""
    assert refused(call(stored=stored, scale=-0.1)) != ""


@pytest.mark.parametrize("codes", ["e4m3", "int8"])
def test_codes_are_read_in_one_part_alone(codes: str) -> None:
    shape = shape_of(call())._replace(stored_dtype=torch.int8, codes=(codes, codes))
    for dims, served in (((128, 128), True), ((80, 80), False), ((192, 128), False), ((96, 96), False)):
        reason = sm90.why_not(shape._replace(head_dim=dims[0], head_dim_v=dims[1]), "")
        assert reason == ("" if served else f"head dims {dims[0]} and {dims[1]}, not 64, 128, 256")


def test_a_deterministic_call_is_served_but_over_no_copy() -> None:
    shape = shape_of(call(deterministic=True))
    assert sm90.why_not(shape, "") == "" and sm90.params_of(shape, BatchBounds(1, 1, 0, 1, 1), 132).deterministic
    assert sm90.why_not_copied(shape, "") == "deterministic"
    assert sm90.why_not_copied(shape._replace(deterministic=False), "") == ""


def test_earlier_blocks_are_served_over_a_copy_but_not_over_16_bit() -> None:
    def copied(mask: Mask) -> str:
        return sm90.why_not_copied(shape._replace(mask=mask.constants), "")

    shape, blocks = shape_of(call()), Mask(True, earlier_blocks=32, recent_blocks=2, from_block=1)
    assert copied(blocks) == "" and "earlier_blocks" in sm90.why_not(shape._replace(mask=blocks.constants), "")
    assert "to_block" in copied(blocks.replace(to_block=2)) and "own_block" in copied(Mask(True, own_block=32))
    assert "a window" in copied(blocks.replace(sliding_window=100)) and copied(Mask(True, 100)) == ""
    assert "not causal" in copied(blocks.replace(causal=False))


REFUSED = {
    "no keys": {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
    "a scale that is not positive": {"scale": -0.1},
    "queries of torch.float32": {"dtype": torch.float32},
    "over a cache of torch.float8_e4m3fn": {"stored": torch.float8_e4m3fn, "dtype": torch.float32},
    "head dims 128 and 64": {
        "value": torch.zeros(BLOCKS, SIZE, KV_HEADS, 64, dtype=torch.bfloat16),
        "out": torch.zeros(40, HEADS, 64, dtype=torch.bfloat16),
    },
    "blocks of 48": dict.fromkeys(("key", "value"), torch.zeros(BLOCKS, 48, KV_HEADS, DIM, dtype=torch.bfloat16)),
    "blocks of 8": dict.fromkeys(("key", "value"), torch.zeros(BLOCKS, 8, KV_HEADS, DIM, dtype=torch.bfloat16)),
    "scales of a cache that is not fp8": {"v_scale": torch.ones(2)},
    "scales of": {"out_scale": 2.0},
    "ALiBi": {"alibi_slopes": torch.zeros(HEADS)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_refused_with_a_reason(reason: str) -> None:
    assert reason in refused(call(**REFUSED[reason]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_keys_are_multiplied_as_they_are_stored_with_bfloat16_queries_alone(dtype: torch.dtype) -> None:
    """float16 has more significant bits than two e4m3."""
    assert not refused(call(stored=torch.float8_e4m3fn, dtype=dtype))
    assert sm90.converts_keys("e4m3", dtype) == sm90.converts_keys("e5m2", dtype) == (dtype == torch.float16)
    assert sm90.converts_keys("int8", dtype)


def strided(*stride: int) -> torch.Tensor:
    size = 1 + sum((n - 1) * step for n, step in zip((BLOCKS, SIZE, KV_HEADS, DIM), stride, strict=True))
    return torch.zeros(size, dtype=torch.bfloat16).as_strided((BLOCKS, SIZE, KV_HEADS, DIM), stride)


@pytest.mark.parametrize(
    ("stride", "served"),
    [
        ((SIZE * 256, 256, 128, 1), True),
        ((2 * SIZE * 256, 256, 128, 1), True),  # keys and values of a block beside each other
        ((SIZE * 256 + 128, 256, 128, 1), False),  # blocks not a whole number of slots apart
        ((SIZE * 256, 128, SIZE * 128, 1), True),  # HND
        ((SIZE * 384, 128, SIZE * 128 + 64, 1), False),
        ((SIZE * 260, 260, 130, 1), False),  # rows that do not begin at 16 bytes
        ((0, 256, 128, 1), False),  # an expanded cache
    ],
)
def test_strides(stride: tuple[int, ...], served: bool) -> None:
    assert (refused(call(key=strided(*stride))) == "") == served


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "k8v4"])
def test_scales_are_read_as_vectors(layout: str, kv_cache_dtype: str) -> None:
    """Of our own caches. Others may have those of a slot's heads beside each other, or begin anywhere."""
    pool = PagedKVCache(2, BLOCKS, 32, KV_HEADS, DIM, device="cpu", layout=layout, kv_cache_dtype=kv_cache_dtype)
    layer = pool.layer(1)
    assert sm90.has_vectors(layer.key_scale, layer.value_scale) and sm90.has_vectors(None, None)
    for other in (torch.zeros(BLOCKS, 32, KV_HEADS, 1), unaligned(1), unaligned(0, per_head=34)):
        assert not sm90.has_vectors(layer.key_scale, other) and not sm90.has_vectors(other, None)
    rows = torch.zeros(BLOCKS, KV_HEADS, 32, 68)  # of vLLM: codes of K and V, and both scales
    assert not sm90.has_vectors(rows[..., 64:65].transpose(1, 2), rows[..., 65:66].transpose(1, 2))
    given = {"key": layer.key, "value": layer.value, "kv_cache_dtype": kv_cache_dtype}
    for plane in (layer.key_scale, unaligned(1)):
        assert refused(call(**given, k_scale_cache=plane, v_scale_cache=layer.value_scale)) == ""


def unaligned(first: int, per_head: int = 32) -> torch.Tensor:
    """Scales in blocks of 32 that begin at an element of memory, a head's one after the other."""
    memory, per_block = torch.zeros(BLOCKS * 64 * KV_HEADS + 1), 64 * KV_HEADS
    return memory.as_strided((BLOCKS, 32, KV_HEADS, 1), (per_block, 1, per_head, 1), first)


@pytest.mark.parametrize(
    ("group", "pack", "tokens"),
    [(1, 1, 128), (4, 4, 32), (5, 1, 128), (6, 2, 64), (8, 8, 16), (96, 32, 4), (128, 64, 2)],
)
def test_heads_of_an_item(group: int, pack: int, tokens: int) -> None:
    assert sm90.heads_per_tile(group) == pack and sm90.tokens_per_tile(pack) == tokens


@pytest.mark.parametrize(
    ("group", "longest", "pack"),
    [
        *((7, 5, 8), (7, 96, 8), (7, 112, 1), (7, 4096, 1), (3, 64, 4), (3, 96, 1), (6, 32, 8), (6, 48, 2), (5, 16, 8)),
        *((5, 17, 5), (5, 64, 5), (5, 150, 5), (5, 256, 1), (3, 65, 3), (3, 160, 3), (3, 500, 1), (5, 0, 1)),
        *((8, 5, 8), (1, 5, 1), (48, 3, 64), (71, 3, 1), (96, 3, 32), (65, 1, 1)),
    ],
)
def test_few_tokens_share_a_tile_with_all_heads_of_a_group(group: int, longest: int, pack: int) -> None:
    """Padded, or of 3 and 5 eight tokens of a head at a time, where that makes fewer tiles, which all read the keys."""
    assert sm90.heads_per_tile(group, longest, True) == pack
    params = listing(8, group, max_query_len=longest, whole_groups=True)
    assert (params.pack, params.heads) == (pack, 8 * -(-group // pack))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Kernels that were to be launched, by family, and what with."""
    pytest.importorskip("triton")
    module, seen = import_module("pagedattn.ops.paged_attention"), []

    def load(name: str) -> Any:
        family = name.split(".")[1]
        return SimpleNamespace(launch=lambda *args: seen.append((family, args)))

    monkeypatch.setattr(module, "load", load)
    return seen


def test_prompts_go_there_and_decodes_do_not(
    device: torch.device, launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed batch that is not split together: the schedule is of the sequences that are no decodes, and covers their
    rows alone."""
    monkeypatch.setattr(sm90, "splits_kv", lambda params, bounds: False)
    inputs = call(dtype=torch.float16, max_seq_len=1500)
    tensors = [x.to(device) for x in inputs[:6] if x is not None]
    bounds: dict[str, Any] = {"max_query_len": 39, "max_seq_len": 1500, "num_decodes": 1}
    bounds |= {"scale": 0.1, "path": "triton"}
    ops.paged_attention(*tensors, **bounds)
    (decode, _), (prefill, (part, schedule, pack, workspace)) = launched
    assert pack == 4
    assert (decode, prefill) == ("decode", "prefill_sm90") and workspace is not None
    assert part.seq_lens.tolist() == [60] and part.query_start_loc.tolist() == [1, 40]
    entries = schedule[2 : 2 + int(schedule[1, 0]), :5].tolist()
    assert entries == [[33, 7, 53, 60, 0], [1, 32, 21, 60, 0]]
    launched.clear()
    plan = plan_call(inputs._replace(**dict(zip(inputs._fields, tensors, strict=False))))
    ops.paged_attention(*tensors, **bounds, plan=plan)
    _, (_, (_, schedule, _, workspace)) = launched
    assert schedule is plan.tile_schedule and workspace is plan.workspace


def test_calls_whose_metadata_planned_otherwise(
    device: torch.device, launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata do not know every block size, nor which strides TMA follows."""
    cache, few = torch.zeros(200, SIZE, KV_HEADS, DIM, dtype=torch.float16, device=device), [0, 16]
    starts, lens = (torch.tensor(n, dtype=torch.int32, device=device) for n in (few, [3000]))
    table = torch.zeros(1, 200, dtype=torch.int32, device=device)
    query = torch.zeros(16, HEADS, DIM, dtype=torch.float16, device=device)
    heads = (KV_HEADS, HEADS // KV_HEADS, DIM, DIM)
    planned = AttentionShape(query.dtype, cache.dtype, *heads, (1, 0), False, True, False, SIZE)

    def run(shape: AttentionShape, max_keys: int) -> tuple[str, bool]:
        """The kernel launched, and whether with a tile schedule that was made before."""
        plan = attention_plan.plan_attention(shape, BatchBounds(16, 1, 0, 16, 3000, max_keys), device)
        plan.allocate(device, table)
        plan.workspace = new_workspace(plan.workspace_size, device)
        bounds: dict[str, Any] = {"max_query_len": 16, "max_seq_len": 3000}
        ops.paged_attention(query, cache, cache, table, starts, lens, **bounds, scale=0.1, path="triton", plan=plan)
        family, args = launched.pop()
        assert any(one is plan.workspace for one in args), "one that is large enough"
        return family, any(one is plan.tile_schedule for one in args if plan.tile_schedule is not None)

    assert run(planned, 3200) == ("prefill_sm90", True)
    assert run(planned._replace(block_size=None), 0) == ("decode", False), "tables of unknown size are not split"
    assert run(planned._replace(block_size=32), 3200) == ("prefill_sm90", False), "of blocks of another size"
    assert run(planned._replace(mask=(1, 2500)), 3200) == ("prefill_sm90", False)
    monkeypatch.setattr(sm90, "why_not_tensors", lambda inputs: "strides that TMA cannot follow")
    assert run(planned, 3200) == ("decode", False)


HEAD_PARTS = {64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 104: (64, 64), 112: (64, 64), 128: (128, 0)}
HEAD_PARTS |= {136: (128, 16), 160: (128, 32), 192: (128, 64), 200: (128, 128), 240: (128, 128), 256: (256, 0)}


@pytest.mark.parametrize(("dim", "parts"), HEAD_PARTS.items())
def test_heads_are_read_in_powers_of_two(dim: int, parts: tuple[int, int]) -> None:
    assert sm90.head_parts(dim) == parts and sum(parts) >= dim


@pytest.mark.parametrize("dim", range(64, 257, 8))
def test_every_head_dim_has_room_in_shared_memory(dim: int) -> None:
    kernel = import_module("pagedattn.kernels.prefill_sm90.kernel")
    for dim_v in range(64, 257, 8):
        shape = shape_of(call())._replace(head_dim=dim, head_dim_v=dim_v)
        (first, more), (first_v, more_v) = sm90.head_parts(dim), sm90.head_parts(dim_v)
        if first != first_v or more_v not in (0, more):
            assert "not read in like parts" in sm90.why_not(shape, "")
            continue
        assert not sm90.why_not(shape, "")
        made = kernel.constants_of(dim, 4, 16, pack=4, mask=Mask(True), softcap=False, dim_v=dim_v)
        width, width_v = sum(sm90.head_parts(dim)), sum(sm90.head_parts(dim_v))
        tiles = made["STAGES"] * made["BLOCK_N"] * (width + width_v) + made["Q_STAGES"] * sm90.TILE_ROWS * width
        assert 2 * tiles <= 232448 - 4096, (dim, dim_v)
