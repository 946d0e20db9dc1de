"""mla_decode: the op and its launch configuration, beyond what the conformance cases of latent rows ask."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from pagedattn import Mask, ops
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.kernels import hopper
from pagedattn.kernels.mla_decode import plan as mla_plan
from pagedattn.kernels.mla_decode.plan import (
    MLADecodeConfig,
    can_load,
    max_rows,
    mla_decode_config,
    plan_mla_decode,
    why_not_hopper,
)
from pagedattn.kernels.shape import AttentionShape, BatchBounds
from pagedattn.runtime.target import Target
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing import attention_oracle

P, S, L, R = 40, 4, 16, 8
HOPPER, AMPERE = Target(132, 232448, supports_pdl=True), Target(108, 166912)


def i32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def given(device: torch.device, heads: int = 3, **changes: Any) -> dict[str, Any]:
    """Two sequences of 9 and 5 keys, the first with two new tokens."""
    call: dict[str, Any] = {
        "query": torch.randn(3, heads, L + R, device=device),
        "rows": torch.randn(P, S, 1, L + R, device=device),
        "block_table": i32([[2, 7, 1], [3, 9, 0]], device),
        "query_start_loc": i32([0, 2, 3], device),
        "seq_lens": i32([9, 5], device),
        "latent_dim": L,
        "max_query_len": 2,
        "max_seq_len": 9,
        "scale": 0.3,
    }
    return {**call, **changes}


def expected(call: dict[str, Any]) -> torch.Tensor:
    """Row by row over the slots of the table, in float64; slots of blocks that are not there are not seen."""
    out, starts = [], call["query_start_loc"].tolist()
    flat = call["rows"].double().flatten(0, 1)
    for seq, length in enumerate(call["seq_lens"].tolist()):
        table, count = call["block_table"][seq].tolist(), starts[seq + 1] - starts[seq]
        for row in range(count):
            slots = [table[at // S] * S + at % S for at in range(length - count + row + 1)]
            seen = flat[[slot for slot in slots if 0 <= slot < P * S]]
            query = call["query"][starts[seq] + row][None]
            out.append(attention_oracle(query, seen, seen[..., :L], scale=call["scale"])[0])
    return torch.cat(out)


@pytest.mark.parametrize("scale", [None, 0.03, torch.tensor([0.03])], ids=["none", "float", "tensor"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_rows_of_e4m3_are_read_with_their_scale(device, path: str, scale: Any, split: bool) -> None:
    """Split over programs, states of several are added up."""
    length = 150 if split else 9
    table = i32([[at % P for at in range(40)], [3, 9, *[0] * 38]], device)
    call = given(device, block_table=table, seq_lens=i32([length, 5], device), max_seq_len=length)
    number = 1.0 if scale is None else float(scale)
    codes = (call["rows"] / number).clamp(-448, 448).to(torch.float8_e4m3fn)
    given_scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    lse = torch.empty(3, 3, device=device)
    got = ops.mla_decode(**{**call, "rows": codes}, k_scale=given_scale, lse=lse, path=path)
    want = expected({**call, "rows": codes.double() * number})
    torch.testing.assert_close(got.cpu().double(), want.cpu(), rtol=1e-5, atol=1e-5)
    unscaled = torch.empty(3, 3, device=device)
    ops.mla_decode(**{**call, "rows": codes.float() * number}, lse=unscaled, path=path)
    torch.testing.assert_close(lse, unscaled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [3, 97])
def test_states_of_some_heads_at_a_time_are_added_up(device, monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Of two: the last thread block of an odd number has one. 97 heads are seven parts of 14, the last one short."""
    made = mla_plan._merging
    monkeypatch.setattr(mla_plan, "_merging", lambda *some: made(*some)._replace(heads=2))
    monkeypatch.setattr(mla_plan, "mla_decode_config", mla_decode_config.__wrapped__)  # without its cache
    table = i32([[at % P for at in range(40)], [3, 9, *[0] * 38]], device)
    call = given(device, heads, block_table=table, seq_lens=i32([150, 5], device), max_seq_len=150)
    out = ops.mla_decode(**call, path="triton")
    torch.testing.assert_close(out.double(), expected(call), rtol=1e-5, atol=1e-5)


SCALES: dict[str, tuple[Any, Any, str]] = {
    "zero": (torch.float8_e4m3fn, 0.0, "k_scale must be a positive finite number"),
    "nan": (torch.float8_e4m3fn, float("nan"), "k_scale must be a positive finite number"),
    "two elements": (torch.float8_e4m3fn, torch.ones(2), r"k_scale must be float32 \[1\] on cpu"),
    "native rows": (torch.float32, 0.5, "k_scale must be None, as rows are stored as they are"),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_do_not_fit_are_refused(name: str) -> None:
    stored, scale, message = SCALES[name]
    call = given(torch.device("cpu"))
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        ops.mla_decode(**{**call, "rows": call["rows"].to(stored)}, k_scale=scale)


@pytest.mark.parametrize("bad", [-1, P, P + 1, 2**31 - 1, -(2**31)])
def test_blocks_outside_the_cache_are_not_followed(device, path: str, bad: int) -> None:
    """Block 0 is read in their place and is NaN here: with weight 0 it would reach the output all the same."""
    call = given(device, block_table=i32([[2, bad, 1], [bad, 9, 4]], device))
    whole = torch.full((P + 4, S, 1, L + R), torch.nan, device=device)
    whole[2 : P + 2].copy_(call["rows"])
    call["rows"] = whole[2 : P + 2]
    call["rows"][0] = torch.nan
    got = ops.mla_decode(**call, path=path)
    torch.testing.assert_close(got.cpu().double(), expected(call).cpu(), rtol=1e-5, atol=1e-5)


def test_queries_rows_and_outputs_may_be_strided(device, path: str) -> None:
    call = given(device)
    query = torch.randn(3, 5, L + R + 3, device=device)[:, 1:4, : L + R]
    rows = torch.randn(P, 1, S, L + R, device=device).transpose(1, 2)
    out, lse = torch.full((3, 4, L + 2), torch.nan, device=device)[:, :3, :L], torch.empty(3, 3, device=device)
    call |= {"query": query, "rows": rows}
    got = ops.mla_decode(**call, out=out, lse=lse, path=path)
    assert got is out and bool(lse.isfinite().all())
    torch.testing.assert_close(got.cpu().double(), expected(call).cpu(), rtol=1e-5, atol=1e-5)


def test_a_plan_and_its_workspace_serve_call_after_call(device) -> None:
    shape = AttentionShape(torch.float32, torch.float32, 1, 3, L + R, L, (1, 0), False, True, False, S, (None, None))
    plan = plan_mla_decode(shape, BatchBounds(3, 2, 0, 2, 9, 12), device)
    plan.take_workspace(None, device)
    kept = plan.workspace
    for _ in range(2):
        call = given(device)
        got = ops.mla_decode(**call, plan=plan, path="triton")
        torch.testing.assert_close(got.cpu().double(), expected(call).cpu(), rtol=1e-5, atol=1e-5)
    assert plan.workspace is kept and "2 sequences" in plan.describe()
    other = given(device, heads=5)
    got = ops.mla_decode(**other, plan=plan, path="triton")  # another shape: a plan of its own
    torch.testing.assert_close(got.cpu().double(), expected(other).cpu(), rtol=1e-5, atol=1e-5)
    if kept is not None:
        assert not bool(kept[: 3 * COUNTERS].any())


def test_a_plan_of_fewer_tokens_writes_nothing_beyond_its_workspace(device) -> None:
    """What a caller that gives a wrong plan gets is not said, but that no memory of others changes is."""
    shape = AttentionShape(torch.float32, torch.float32, 1, 1, L + R, L, (1, 0), False, True, False, S, (None, None))
    plan = plan_mla_decode(shape, BatchBounds(1, 1, 1, 1, 64, 64), device)
    assert plan.config.splits_keys and plan.config.workspace - plan.config.splits_at < 3 * 500
    room = torch.full((plan.config.workspace + 2000,), 77, dtype=torch.int32, device=device)
    room[: 3 * COUNTERS] = 0
    plan.workspace = room[: plan.config.workspace]
    call = given(device, heads=1, block_table=i32([[at % P for at in range(125)]], device), seq_lens=i32([500], device))
    call |= {"query": torch.randn(500, 1, L + R, device=device), "query_start_loc": i32([0, 500], device)}
    ops.mla_decode(**{**call, "max_query_len": 500, "max_seq_len": 500}, plan=plan, path="triton")
    assert bool((room[plan.config.workspace :] == 77).all()) and not bool(room[: 3 * COUNTERS].any())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of two heads": ({"rows": torch.zeros(P, S, 2, L + R)}, "rows must be"),
    "latent": ({"latent_dim": L + R + 1}, "latent_dim must be in 1..24"),
    "mask_mod": ({"mask": Mask(mask_mod=lambda b, h, q, k: q >= k)}, "mask must be without a mask_mod"),
    "out": ({"out": torch.zeros(3, 3, L + 1)}, "out must be"),
    "query": ({"query": torch.zeros(3, 3, L)}, "key must be"),
    "dtype": ({"rows": torch.zeros(P, S, 1, L + R).half()}, "key and value must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        ops.mla_decode(**given(torch.device("cpu"), **changes))


def test_what_the_kernel_does_not_serve_goes_to_torch_unless_it_is_asked_for(device) -> None:
    call = given(device, query=torch.randn(3, 2, 600, device=device), rows=torch.randn(P, S, 1, 600, device=device))
    call["latent_dim"] = 590
    assert ops.mla_decode(**call).shape == (3, 2, 590)
    with pytest.raises(UnsupportedError, match="latent parts of at most 512 elements; use path='torch'"):
        ops.mla_decode(**call, path="triton")
    call["latent_dim"] = 400
    with pytest.raises(UnsupportedError, match="rotated parts of at most 128 elements"):
        ops.mla_decode(**call, path="triton")


def config(
    heads: int,
    tokens: int = 1,
    seqs: int = 64,
    keys: int = 4096,
    target: Target = HOPPER,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    hopper: bool = False,
) -> MLADecodeConfig:
    bounds = {"num_seqs": seqs, "num_tokens": seqs * tokens, "max_query_len": tokens, "max_seq_len": keys}
    stored = stored or dtype
    row = {"latent_dim": 512, "rope_dim": 64, "itemsize": dtype.itemsize, "stored_itemsize": stored.itemsize}
    bounds["max_rows"] = max_rows(dtype, stored)
    return mla_decode_config(num_heads=heads, **row, **bounds, target=target, hopper=hopper)


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 171])
@pytest.mark.parametrize("heads", [1, 5, 8, 16, 48, 64, 96, 128])
def test_every_row_has_its_place_and_tiles_fit(heads: int, tokens: int, dtype: torch.dtype, target: Target) -> None:
    found = config(heads, tokens, target=target, dtype=dtype)
    assert found.heads * found.parts >= heads > found.heads * (found.parts - 1)
    assert found.heads <= found.block_m <= 64 and found.block_m & (found.block_m - 1) == 0
    assert found.programs % found.parts == 0 and 1 <= found.programs // found.parts
    assert found.programs <= max(target.num_sms, found.parts)
    tile = (found.block_m + found.tuning.block_n) * 576 * dtype.itemsize
    assert tile <= target.shared_bytes
    assert found.workspace == 0 or found.states_at % 4 == 0


def test_rows_are_packed_and_heads_cut_into_equal_parts() -> None:
    packed = {(heads, tokens): config(heads, tokens)[:3] for heads, tokens in ((16, 1), (16, 2), (8, 3), (96, 1))}
    assert packed == {(16, 1): (16, 16, 1), (16, 2): (32, 16, 1), (8, 3): (32, 8, 1), (96, 1): (64, 48, 2)}
    assert config(128).parts == 2 and config(128, dtype=torch.float32).parts == 8
    e4m3, groups = torch.float8_e4m3fn, torch.uint8
    assert config(128, stored=e4m3)[:3] == (32, 32, 4) and config(16, stored=e4m3)[:3] == (16, 16, 1)
    assert config(128, stored=groups)[:3] == (32, 32, 4) and config(8, 4, stored=groups)[:3] == (32, 8, 1)


def test_a_step_of_one_tile_needs_no_workspace_and_no_second_launch() -> None:
    assert not config(16, seqs=1, keys=64).splits_keys and config(16, seqs=1, keys=64).workspace == 0
    many = config(16)
    assert many.splits_keys and many.workspace == many.states_at + 2 * many.programs * many.state


def test_few_keys_are_shared_by_so_many_programs_as_their_states_are_worth() -> None:
    def programs(heads: int, seqs: int, keys: int, hopper: bool = True) -> int:
        return config(heads, seqs=seqs, keys=keys, hopper=hopper).programs

    assert [programs(64, 1, keys) for keys in (64, 2048, 8192, 32768, 65536, 131072)] == [1, 32, 64, 96, 128, 132]
    assert [programs(128, 1, keys) for keys in (8192, 16384, 32768)] == [64, 96, 128]
    assert programs(64, 4, 8192) == 96 and programs(64, 64, 4096) == 132
    assert programs(16, 100, 128) == 100, "each item has a program of its own"
    assert programs(64, 5, 4096) == 95 and programs(128, 6, 4096) == 132, "as many for each item"
    assert programs(64, 1, 8192, hopper=False) > 64


def test_what_the_kernels_do_not_serve_is_said() -> None:
    shape = AttentionShape(torch.bfloat16, torch.bfloat16, 1, 16, 576, 512, (1, 0), False, True, False, 64)
    assert mla_plan.why_not(shape) == ""
    assert mla_plan.why_not(shape._replace(stored_dtype=torch.float8_e4m3fn)) == ""
    for other in (torch.float8_e5m2, torch.float16):
        assert "rows of their dtype or of e4m3" in mla_plan.why_not(shape._replace(stored_dtype=other))
    assert "float32" in mla_plan.why_not(shape._replace(dtype=torch.float64, stored_dtype=torch.float64))


def shape_of_rows(**changes: Any) -> AttentionShape:
    whole = AttentionShape(
        torch.bfloat16, torch.bfloat16, 1, 16, 576, 512, (1, 0), False, True, False, 64, (None, None)
    )
    return whole._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"block_size": 8, "mask": (1, 100)}, ""),
        ({"dtype": torch.float16, "stored_dtype": torch.float16, "group": 128}, ""),
        ({"dtype": torch.float32, "stored_dtype": torch.float32}, "rows of torch.float32"),
        ({"stored_dtype": torch.float8_e4m3fn}, ""),
        ({"dtype": torch.float16, "stored_dtype": torch.uint8, "group": 128}, ""),
        ({"stored_dtype": torch.float16}, "rows of torch.float16"),
        ({"dtype": torch.float32, "stored_dtype": torch.uint8}, "rows of torch.uint8"),
        ({"head_dim": 512}, "rows that are not 512 . 64"),
        ({"head_dim": 320, "head_dim_v": 256}, "rows that are not 512 . 64"),
        ({"block_size": 4}, "blocks of 4"),
        ({"block_size": 48}, "blocks of 48"),
        ({"block_size": None}, "blocks of None"),
    ],
)
def test_what_the_kernel_for_hopper_serves(changes: dict[str, Any], reason: str) -> None:
    assert re.match(reason or "$", why_not_hopper(shape_of_rows(**changes), ""))
    assert why_not_hopper(shape_of_rows(**changes), "no Hopper GPU") == "no Hopper GPU"


def test_a_plan_names_the_kernel_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    bounds, device = BatchBounds(64, 64, 64, 1, 4096, 4096), torch.device("cpu")
    plan = plan_mla_decode(shape_of_rows(), bounds, device)
    assert plan.module == "hopper" and "for Hopper" in plan.describe() and plan.config.block_m == 16
    assert "themselves" not in plan.describe()
    rows = torch.zeros(10, 64, 1, 576, dtype=torch.bfloat16)
    odd = torch.zeros(10, 64, 1, 577, dtype=torch.bfloat16)[..., 1:]
    assert can_load(rows) and not can_load(odd) and not can_load(rows[:0])
    assert plan.serves(shape_of_rows(), 64, rows) and not plan.serves(shape_of_rows(), 64, odd)
    assert plan_mla_decode(shape_of_rows(), bounds, device, can_load(odd)).module == "kernel"
    assert plan_mla_decode(shape_of_rows(group=48), bounds, device).config.block_m == 64


@pytest.mark.parametrize(("stored", "width"), [(torch.float8_e4m3fn, 576), (torch.uint8, 656)])
def test_a_plan_over_rows_of_codes(monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, width: int) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    bounds, device = BatchBounds(64, 64, 64, 1, 4096, 4096), torch.device("cpu")
    shape = shape_of_rows(stored_dtype=stored, group=128)
    plan = plan_mla_decode(shape, bounds, device)
    assert plan.module == "hopper_fp8" and "for Hopper" in plan.describe()
    assert "add up shared states themselves" in plan.describe()
    assert (plan.config.block_m, plan.config.parts, plan.config.tuning.block_n) == (32, 4, 64)
    rows = torch.zeros(10, 64, 1, width, dtype=torch.uint8).view(stored)
    odd = torch.zeros(10, 64, 1, width + 4, dtype=torch.uint8).view(stored)[..., 4:]
    assert plan.serves(shape, 64, rows) and not plan.serves(shape, 64, odd)
    assert plan_mla_decode(shape, bounds, device, can_load(odd)).module == "kernel"


def test_many_states_are_added_up_at_a_time_where_many_programs_share_a_sequence() -> None:
    alone, few, many = config(16, seqs=1, keys=8192), config(16, seqs=4, keys=8192), config(16)
    assert (alone.merge, few.merge, many.merge) == ((128, 64, 1), (64, 128, 1), (8, 512, 1))


def test_a_thread_block_has_several_heads_where_few_tokens_have_states() -> None:
    """More items than programs: at most as many tokens as these have states of two."""
    merges = [config(128, seqs=seqs).merge for seqs in (1, 64, 256)]
    assert [merge and merge.heads for merge in merges] == [1, 1, 4]


def test_two_programs_of_an_item_add_up_its_states_themselves_over_codes() -> None:
    """In the launch that makes them, for which the workspace has counters."""

    def merges(stored: torch.dtype | None, seqs: int, hopper: bool = True) -> bool:
        return config(16, seqs=seqs, stored=stored, hopper=hopper).merge is not None

    codes = torch.float8_e4m3fn
    assert [merges(codes, seqs) for seqs in (4, 40, 64, 300)] == [True, True, False, False]
    assert merges(None, 64) and merges(codes, 64, hopper=False)
    alone, beside = config(16, stored=codes, hopper=True), config(16, hopper=True)
    room = torch.zeros(alone.workspace, dtype=torch.int32)
    splits, states, flags = alone.places(room)
    assert splits is None and states is not None and flags is not None
    assert len(flags) == 3 * COUNTERS and len(states) == 2 * alone.programs * alone.state
    assert beside.places(room)[2] is None and beside.places(room)[0] is not None


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 64, 131])
def test_each_state_of_an_item_is_added_once(programs: int) -> None:
    """By the program that begins it in the end, and never by one that has a later part."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    merges_next = importlib.import_module("pagedattn.kernels.mla_decode.hopper_states").merges_next
    sums = {nth: {nth} for nth in range(programs)}
    for nth in reversed(range(programs)):
        span = 1
        while merges_next.fn(span, nth, programs - 1 - nth):
            assert not sums[nth] & sums[nth + span]
            sums[nth] |= sums.pop(nth + span)
            span *= 2
    assert sums == {0: set(range(programs))}
