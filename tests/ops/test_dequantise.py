"""Prompts over a copy of a quantised cache: what is copied, and when. Outputs: backends/test_dequantised_prompts.py."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache, ops
from pagedattn.formats.int4.format import INT4
from pagedattn.formats.registry import stored_as
from pagedattn.kernels.dequantise import kernel
from pagedattn.kernels.dequantise.plan import MOST_BYTES, copy_turns
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.shape import INT4 as INT4_CODES
from pagedattn.kernels.shape import K8V4, AttentionShape, BatchBounds
from pagedattn.ops.attention_plan import plan_attention
from pagedattn.ops.launch_plan import LaunchPlan

SHAPE = AttentionShape(
    torch.bfloat16, torch.int8, 8, 4, 128, 128, Mask(causal=True).constants, False, True, False, 16, ("int8", "int8")
)
PROMPT = BatchBounds(1 << 14, 1, 0, 1 << 14, 1 << 14, 1 << 14)
TILE = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def int32(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("name", ["int8", "k8v4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("layout", "size"), [("NHD", 16), ("HND", 16), ("NHD", 24)])
def test_rows_are_what_their_codes_stand_for(name: str, layout: str, size: int) -> None:
    heads, dim, value_dim = 2, 56, 48
    options: dict[str, Any] = {"kv_cache_dtype": name, "layout": layout, "dtype": torch.float32, "device": DEVICE}
    cache = PagedKVCache(1, 12, size, heads, dim, head_dim_v=value_dim, **options).layer(0)
    make = torch.Generator(DEVICE).manual_seed(0)
    key, value = (torch.randn(12 * size, heads, n, device=DEVICE, generator=make) for n in (dim, value_dim))
    scales: dict[str, Any] = {}
    if name.startswith("fp8"):
        scales = {"k_scale": torch.tensor([0.5], device=DEVICE), "v_scale": torch.tensor([2.0, 0.25], device=DEVICE)}
    slots = torch.arange(12 * size, device=DEVICE)
    ops.reshape_and_cache(key, value, cache.key, cache.value, slots, path="torch", **scales, **cache.stored)
    table = int32([[7, 3, 99, 0, 5], [2, 11, -1, 4, 6]])  # 99 and -1 are no blocks
    lens, starts = int32([70, 21]), int32([0, 1, 2])
    query, out = (torch.zeros(2, heads, n, device=DEVICE) for n in (dim, value_dim))
    given = (query, cache.key, cache.value, table, starts, lens, None, None)
    rest = (scales.get("k_scale"), scales.get("v_scale"), out, None, 1.0, 3.0, Mask(causal=True).constants, 0.0)
    stored = (cache.key_scale, cache.value_scale, cache.stored["kv_cache_dtype"])
    made = kernel.launch(AttentionInputs(*given, *rest, 1, 80, 0, False, *stored), TILE)
    assert made.format is stored_as("auto", torch.float32) and made.out_scale == 3.0 and made.k_scale is rest[0]
    assert made.block_table is not None and made.block_table.tolist() == [[0], [-(-80 // size) * size]], "first rows"
    form = stored_as(stored[2], cache.key.dtype)
    exact = [
        rows.decode(side, one, torch.float32)
        for rows, side, one in ((form.key, cache.sides[0], dim), (form.value, cache.sides[1], value_dim))
    ]
    assert (made.k_scale_cache is None) == (cache.key_scale is None) and made.v_scale_cache is None
    for seq, length in enumerate(lens.tolist()):
        for at in range(length):
            block, slot = int(table[seq, at // size]), at % size
            if block not in range(12):
                assert not made.key[seq, at].any() and not made.value[seq, at].any()
                continue
            key_row = made.key[seq, at].float()
            if made.k_scale_cache is not None:
                key_row = key_row * made.k_scale_cache[seq, :, at // TILE, None]
            torch.testing.assert_close(key_row[:, :dim], exact[0][block, slot], rtol=0, atol=0)
            assert not key_row[:, dim:].any(), "beyond the head"
            torch.testing.assert_close(made.value[seq, at, :, :value_dim], exact[1][block, slot], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dims"), [("turboquant_k4v3", (64, 48)), ("turboquant2", (256, 32)), ("turboquant4", (80, 80))]
)
def test_rotated_keys_become_sums_of_levels_with_a_factor_each(name: str, dims: tuple[int, int]) -> None:
    heads, size = 2, 16
    options: dict[str, Any] = {"kv_cache_dtype": name, "dtype": torch.float32, "device": DEVICE}
    cache = PagedKVCache(1, 12, size, heads, dims[0], head_dim_v=dims[1], **options).layer(0)
    make = torch.Generator(DEVICE).manual_seed(0)
    key, value = (torch.randn(192, heads, dim, device=DEVICE, generator=make) for dim in dims)
    key[5] = torch.nan
    slots = torch.arange(192, device=DEVICE)
    ops.reshape_and_cache(key, value, cache.key, cache.value, slots, path="torch", **cache.stored)
    table = int32([[7, 3, 99, 0, 5], [2, 11, -1, 4, 6]])  # 99 and -1 are no blocks
    lens, starts = int32([70, 21]), int32([0, 1, 2])
    query, out = (torch.zeros(2, heads, dim, device=DEVICE) for dim in dims)
    mask = Mask(causal=True, earlier_blocks=16).constants  # nothing of the last, open block
    given = (query, cache.key, cache.value, table, starts, lens, None, None, None, None, out, None, 1.0, 3.0, mask)
    stored = (cache.key_scale, cache.value_scale, cache.stored["kv_cache_dtype"])
    made = kernel.launch(AttentionInputs(*given, 0.0, 1, 80, 0, False, *stored), TILE)
    assert made.format is stored_as("auto", torch.float32) and made.out_scale == 3.0
    assert made.block_table is not None and made.block_table.tolist() == [[0], [80]], "first rows"
    assert made.k_scale_cache is not None and made.v_scale_cache is None
    assert made.key.dtype == torch.float16 and made.k_scale_cache.shape == (2, heads, 128), "whole tiles"
    assert not made.k_scale_cache[0, :, 32:48].any(), "of no block"
    rows = [copy[..., :dim].double() for copy, dim in zip((made.key, made.value), dims, strict=True)]
    assert torch.equal(rows[0][0, :32], rows[0][0, :32].round()) and float(rows[0][0, :32].abs().max()) <= 2048
    form = stored_as(stored[2], cache.key.dtype)
    exact = [
        side.decode(planes, dim, torch.float64)
        for side, planes, dim in zip((form.key, form.value), cache.sides, dims, strict=True)
    ]
    for seq, length in enumerate(lens.tolist()):
        for at in range(length):
            block, slot = int(table[seq, at // size]), at % size
            factor = made.k_scale_cache[seq, :, at, None].double()
            seen = at // size < (length - 1) // size and block in range(12)
            for got, want, close in (
                (rows[0][seq, at] * factor, exact[0], 1e-7),
                (rows[1][seq, at], exact[1], 1e-6),
            ):
                want = want[block, slot] if seen else torch.zeros_like(want[0, 0])
                torch.testing.assert_close(got, want, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize(
    "mask", [Mask(True, earlier_blocks=32), Mask(True, earlier_blocks=32, recent_blocks=1, from_block=1)]
)
def test_only_what_queries_see_of_full_blocks_is_copied(mask: Mask) -> None:
    """Others are not encoded yet."""
    size, dims, length, table = 32, (64, 48), 150, [5, 2, 7, 1, 4]
    options: dict[str, Any] = {"kv_cache_dtype": "int4", "dtype": torch.float32, "head_dim_v": dims[1]}
    cache = PagedKVCache(1, 8, size, 2, dims[0], recent_blocks=1, **options).layer(0)
    rows = [torch.randn(8, size, 2, dim, generator=torch.Generator().manual_seed(0)) for dim in dims]
    rows[0] = rows[0] * (1 + 7 * (torch.arange(dims[0]) % 9 == 0)) + 10 * (torch.arange(dims[0]) % 11 == 0)
    for side, planes, one in zip((INT4.key, INT4.value), cache.sides, rows, strict=True):
        for plane, codes in zip(planes, side.encode(one), strict=True):
            plane.copy_(codes)
    exact = [
        side.decode(planes, dim, torch.float32)
        for side, planes, dim in zip((INT4.key, INT4.value), cache.sides, dims, strict=True)
    ]
    seen = range((mask.from_block or 0) * size, ((length - 1) // size - (mask.recent_blocks or 0)) * size)
    planes = [x.to(DEVICE) for side in zip(*cache.sides, strict=True) for x in side]  # codes, then scales
    for at in (at for at in range(0, length, size) if at not in seen):
        for plane in planes:
            plane[table[at // size]] = torch.nan if plane.dtype.is_floating_point else 255
    query, out = (torch.zeros(1, 4, dim, device=DEVICE) for dim in dims)
    lengths = (int32([table]), int32([0, 1]), int32([length]))
    given = (query, planes[0], planes[1], *lengths, None, None, None, None, out, None)
    constants: Any = list(mask.constants)  # as torch's dispatcher hands them on
    rest = (1.0, 1.0, constants, 0.0, 1, 160, 0, False, planes[2], planes[3], "int4")
    made = kernel.launch(AttentionInputs(*given, *rest), TILE)
    assert made.key.dtype == torch.float16 and made.k_scale_cache is None
    for at in range(length):
        of_key, of_value = (one[table[at // size], at % size] * (at in seen) for one in exact)
        torch.testing.assert_close(made.key[0, at].float().cpu(), of_key, rtol=0, atol=0)
        torch.testing.assert_close(made.value[0, at, :, : dims[1]].cpu(), of_value, rtol=1e-5, atol=1e-5)


def test_a_copy_has_64_mib_at_most() -> None:
    assert copy_turns(SHAPE, PROMPT) == 1, "16k tokens of 8 heads are as many"
    assert 2 * (1 << 14) * 8 * 256 == MOST_BYTES
    assert copy_turns(SHAPE, PROMPT._replace(max_seq_len=(1 << 14) + 1, max_keys=0)) == 2
    assert copy_turns(SHAPE, PROMPT._replace(max_seq_len=1 << 20)) == 1, "the table has room for no more keys"
    assert copy_turns(SHAPE, PROMPT._replace(num_seqs=3)) == 4, "of heads that divide all evenly"
    assert copy_turns(SHAPE._replace(head_dim=136, head_dim_v=96), PROMPT) == 2, "of rows that are 256 wide"
    assert copy_turns(SHAPE, PROMPT._replace(num_seqs=65, num_decodes=64)) == 1
    long = PROMPT._replace(max_seq_len=1 << 17, max_keys=1 << 17)
    assert copy_turns(SHAPE, long) == 8 and copy_turns(SHAPE, long._replace(num_seqs=2)) == 0


def test_a_copy_is_as_long_as_prompts_are() -> None:
    """However long the contexts of decodes beside them are."""
    shape = SHAPE._replace(head_dim=256, head_dim_v=256, num_kv_heads=4)
    mixed = BatchBounds(4941, 5, 1, 1235, 1 << 15, 1 << 15)
    assert not copy_turns(shape, mixed) and copy_turns(shape, mixed._replace(max_prompt_keys=1235)) == 1


def test_a_copy_is_made_as_long_as_prompts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, made = BatchBounds(25, 2, 1, 24, 300, 304, 40), []
    module = import_module("pagedattn.ops.paged_attention")
    plan = LaunchPlan(SHAPE, bounds, (), "", 0, copy_turns=2)
    family = SimpleNamespace(launch=lambda inputs, *_, **rest: made.append(inputs) or inputs)
    monkeypatch.setattr(module, "load", lambda name: family)
    for longest, room in ((300, 40), (24, 24)):  # of a call whose keys are fewer, those
        made.clear()
        module._launch_sm90(plan, 4, call_of_heads(4, longest), None)
        assert [one.max_seq_len for one in made] == 4 * [room]  # two turns, each a copy and what attends to it


def test_it_pays_where_many_queries_see_most_keys() -> None:
    def pays(shape: AttentionShape, max_query_len: int, unread: bool = False) -> bool:
        return copy_turns(shape, PROMPT._replace(max_query_len=max_query_len), unread) > 0

    assert pays(SHAPE, 224) and not pays(SHAPE, 223)
    fp8 = SHAPE._replace(stored_dtype=torch.float8_e4m3fn, codes=("e4m3", "e4m3"))
    assert pays(fp8, 256) and not pays(fp8, 255)
    for other in K8V4, INT4_CODES:
        few = SHAPE._replace(codes=other)
        assert pays(few, 16, True) and not pays(few, 15, True), "no other kernel for Hopper reads these prompts"
    for shape in (SHAPE, fp8, SHAPE._replace(head_dim=80, head_dim_v=80)):
        assert pays(shape, 64, True) and not pays(shape, 63, True), "of 8 bits that no kernel for Hopper reads"
    padded = SHAPE._replace(head_dim=80, head_dim_v=80, codes=K8V4)
    assert pays(padded, 16, True) and not pays(padded, 15, True)
    k8v4 = SHAPE._replace(codes=K8V4)
    assert pays(k8v4, 224) and not pays(k8v4, 223)
    int4 = SHAPE._replace(codes=INT4_CODES)
    assert pays(int4, 160) and not pays(int4, 159)
    rotated = SHAPE._replace(stored_dtype=torch.uint8, codes=("turboquant4", "turboquant3"), group=1)
    assert pays(rotated, 17), "a few rows are a few times slower by a kernel that reads them"
    window = SHAPE._replace(mask=Mask(causal=True, sliding_window=1000).constants)
    assert not pays(window, 2000) and pays(window, 8000)
    for changes in ({"codes": (None, None)}, {"block_size": None}, {"paged": False}):
        assert not pays(SHAPE._replace(**changes), 1 << 14), changes


def test_a_small_copy_of_codes_that_no_kernel_for_hopper_reads() -> None:
    """Whatever the rows: the portable kernel attended to 19 tokens over 1,609 keys for 145 us."""
    shape = SHAPE._replace(head_dim=256, head_dim_v=256, num_kv_heads=4, group=2)
    step = BatchBounds(19, 1, 0, 19, 1609, 1616)
    assert not copy_turns(shape, step) and copy_turns(shape, step, unread=True) == 1
    most = (16 << 20) // (4 * 2 * 256 * 2)  # keys
    assert copy_turns(shape, step._replace(max_seq_len=most, max_keys=most), unread=True) == 1
    assert not copy_turns(shape, step._replace(max_seq_len=most + 1, max_keys=most + 16), unread=True)
    assert not copy_turns(shape._replace(codes=("k3", "v3")), step, unread=True)


def test_a_copy_of_few_keys_that_many_rows_see() -> None:
    """Where no kernel for Hopper reads the codes: 300 rows a key on average are enough, 200 are not."""
    fp8 = {"dtype": torch.float16, "stored_dtype": torch.float8_e4m3fn, "codes": ("e4m3", "e4m3")}
    shape = SHAPE._replace(**fp8, mask=Mask(causal=True, sliding_window=800).constants)
    step = BatchBounds(400, 1, 0, 400, 6400, 6400)  # 1,600 rows see 1,199 keys each
    assert copy_turns(shape, step, unread=True) == 1 and not copy_turns(shape, step)
    assert not copy_turns(shape, step._replace(max_seq_len=9600, max_keys=9600), unread=True)


def test_open_blocks_of_decodes_and_prompts_are_one_launch_that_adds() -> None:
    """To what the call over the copy of full blocks leaves, which adds to nothing."""
    step, native = BatchBounds(1008, 10, 8, 500, 4096, 4096), {"stored_dtype": torch.bfloat16, "codes": (None, None)}
    for mask, kernels in ((Mask(True, own_block=32), ["prefill"]), (Mask(True), ["decode", "prefill"])):
        shape = SHAPE._replace(mask=mask.constants, block_size=32, **native)
        plan = plan_attention(shape, step, torch.device("cpu"))
        assert [launch.span.kernel for launch in plan.launches] == kernels
        assert plan.accumulates
    assert (plan.launches[0].span.first, plan.launches[-1].span.last) == (0, 10)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "decode"), (4, "decode"), (5, "prefill"), (16, "prefill")])
def test_open_blocks_of_more_rows_than_a_tile_are_not_split(tokens: int, kernel: str) -> None:
    """Groups of four heads: 16 rows are four tokens."""
    native = {"stored_dtype": torch.bfloat16, "codes": (None, None)}
    shape = SHAPE._replace(mask=Mask(True, own_block=32).constants, block_size=32, **native)
    step = BatchBounds(10 * tokens, 10, 0 if tokens > 1 else 10, tokens, 4096, 4096)
    plan = plan_attention(shape, step, torch.device("cpu"))
    assert [launch.span.kernel for launch in plan.launches] == [kernel]


def call_of_heads(heads: int, max_seq_len: int = 5) -> AttentionInputs:
    dim = 16
    cache, scales = torch.randn(3, 16, heads, dim), torch.rand(3, 16, heads, 1)
    query, lse = torch.randn(5, 2 * heads, dim), torch.rand(5, 2 * heads)
    starts, lens, table = torch.tensor([0, 5]).int(), torch.tensor([5]).int(), torch.tensor([[2]]).int()
    of_query, one, of_head = torch.arange(2.0 * heads), torch.ones(1), torch.arange(1.0 * heads)
    given = (query, cache, cache + 1, table, starts, lens, of_query, of_query + 1, one, of_head, query + 1, lse)
    return AttentionInputs(*given, 1.0, 1.0, (), 0.0, 5, max_seq_len, 0, False, scales, scales + 1, "int8")


def test_a_call_is_cut_by_kv_heads() -> None:
    whole = call_of_heads(4)
    part = whole.heads(1, 3)
    for name in ("key", "value", "k_scale_cache", "v_scale_cache"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, :, 1:3]), name
    for name in ("query", "out", "lse"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, 2:6]), name
    for name, kept in (("sinks", slice(2, 6)), ("alibi_slopes", slice(2, 6)), ("v_scale", slice(1, 3))):
        assert torch.equal(getattr(part, name), getattr(whole, name)[kept]), name
    assert part.k_scale is whole.k_scale and part.out.data_ptr() == whole.out[:, 2:].data_ptr()
    bare = whole._replace(sinks=None, alibi_slopes=None, lse=None, k_scale=None, v_scale=None).heads(0, 1)
    assert bare.sinks is bare.alibi_slopes is bare.lse is bare.k_scale is bare.v_scale is None


def test_a_row_that_is_not_finite_leaves_the_others_of_its_tile() -> None:
    cache = PagedKVCache(1, 2, 16, 1, 16, kv_cache_dtype="int8", dtype=torch.float32, device=DEVICE).layer(0)
    rows, slots = torch.randn(16, 1, 16, device=DEVICE), torch.arange(16, device=DEVICE)
    ops.reshape_and_cache(rows, rows, cache.key, cache.value, slots, path="torch", **cache.stored)
    assert cache.key_scale is not None
    exact = cache.key[0].float() * cache.key_scale[0]
    cache.key_scale[0, 3] = float("nan")
    cache.key_scale[0, 4] = float("inf")
    query = torch.zeros(16, 1, 16, device=DEVICE)
    given = (query, cache.key, cache.value, int32([[0]]), int32([0, 16]), int32([16]), None, None, None, None)
    planes, mask = (cache.key_scale, cache.value_scale, "int8"), Mask(causal=True).constants
    made = kernel.launch(AttentionInputs(*given, query, None, 1.0, 1.0, mask, 0.0, 16, 16, 0, False, *planes), TILE)
    assert made.k_scale_cache is not None
    keys = made.key[0, ..., :16].float() * made.k_scale_cache[0, 0, 0]
    assert not keys[3:5].isfinite().all(-1).any()
    others = [n for n in range(16) if n not in (3, 4)]
    torch.testing.assert_close(keys[others], exact[others], rtol=0, atol=0)
