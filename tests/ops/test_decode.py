"""The decode kernel: keys shared out evenly over programs, whatever the lengths, and partial states combined once."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from covers import values

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.kernels.decode.plan import DecodeConfig, DecodeTuning, decode_config
from pagedattn.kernels.inputs import AttentionInputs, scale_parts
from pagedattn.kernels.shape import bounds_of, shape_of
from pagedattn.ops.attention_plan import decode_config_of, plan_call
from pagedattn.ops.paged_attention import _check_extent, execute
from pagedattn.runtime.target import target_of
from pagedattn.runtime.workspace import COUNTERS, new_workspace
from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_close, assert_lse_close
from pagedattn.testing.problem import Problem, make_problem

RAGGED = {"query_lens": (1, 1, 0, 1, 1, 1), "seq_lens": (5, 90, 0, 0, 33, 16), "head_dim": 16, "write": False}
LONG = {"query_lens": (1,), "seq_lens": (700,), "heads": (2, 1), "head_dim": 16, "write": False}
TOKENS = {"query_lens": (3, 0, 16, 1, 8), "seq_lens": (40, 7, 16, 70, 3), "head_dim": 16, "write": False}


def inputs_of(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> AttentionInputs:
    """The op's arguments, as `ops.paged_attention` makes them."""
    spec, cache, common = problem.spec, problem.cache, problem.common
    assert cache is not None
    scales = [
        scale_parts(name, scale, spec.kv_heads, out.device)
        for name, scale in zip(("k_scale", "v_scale"), (side.scale for side in problem.stored), strict=True)
    ]
    (k_scale, k_factor), (v_scale, v_factor) = scales
    tensors = (problem.query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens)
    extras = (problem.sinks, problem.alibi_slopes, k_scale, v_scale, out, lse)
    shape = (spec.softmax_scale * k_factor, v_factor, spec.mask.constants, spec.softcap or 0.0)
    bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
    stored = (cache.key_scale, cache.value_scale, spec.kv_cache_dtype)
    return AttentionInputs(*tensors, *extras, *shape, *bounds, *stored)


def config_of(problem: Problem, programs: int, **tuning: Any) -> DecodeConfig:
    """A launch of so many programs for each KV head."""
    spec, common, cache = problem.spec, problem.common, problem.cache
    assert cache is not None
    config = decode_config(
        num_seqs=common.num_seqs,
        num_kv_heads=spec.kv_heads,
        group=spec.gqa_ratio,
        head_dim=spec.head_dim,
        head_dim_v=spec.value_dim,
        itemsize=spec.dtype.itemsize,
        stored_itemsize=cache.key.dtype.itemsize,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        target=target_of(problem.query.device),
        tuning=DecodeTuning(**{"block_n": 16, "num_warps": 4, "num_stages": 2, "per_sm": 1, **tuning}),
    )
    return config._replace(programs=programs * spec.kv_heads * -(-spec.gqa_ratio // config.heads))


def check(case: Case, programs: int, device: torch.device, workspace: torch.Tensor | None = None, **tuning: Any):
    """One launch against the oracle; rows that belong to nobody keep what they held, and counters return to zero."""
    problem = make_problem(case, device)
    rows, spare = len(problem.query), 3
    query = torch.cat((problem.query, problem.query.new_full((spare, *problem.query.shape[1:]), torch.nan)))
    problem.query = query.repeat(1, 1, 2)[..., : query.shape[2]]
    wide = torch.full((rows + spare, case.heads[0], 2 * problem.spec.value_dim), 7.0, dtype=case.dtype, device=device)
    out = wide[..., : problem.spec.value_dim]
    lse = torch.full(out.shape[:2], 7.0, device=device) if case.lse else None
    config = config_of(problem, programs, **tuning)
    room = new_workspace(config.workspace, device) if workspace is None else workspace
    import_module("pagedattn.kernels.decode.kernel").launch(config, inputs_of(problem, out, lse), room)
    name = f"{case.id}, {programs} programs, {tuning}"
    assert_close(name, out[:rows], problem.expected, problem.naive, softcap=case.softcap is not None)
    assert bool((out[rows:] == 7).all()) and bool((wide[..., out.shape[2] :] == 7).all()), "rows of nobody"
    if lse is not None:
        assert_lse_close(name, lse[:rows], problem.expected_lse, case.dtype)
        assert bool((lse[rows:] == 7).all())
    assert not room[: 3 * COUNTERS].any(), "a counter was not left zero"
    return out[:rows]


def parts(case: Case, programs: int, block_n: int = 16) -> list[int]:
    """How many programs share each item of a head, by definition: the items in order, cut in equal ranges, rounded up
    to whole ones if there are programs enough for that."""
    items = []
    for queries, keys in zip(case.query_lens, case.seq_lens, strict=True):
        low = max(keys - queries - case.sliding_window + 1, 0) if case.sliding_window else 0
        tiles = max(-(-keys // block_n) - low // block_n, 1)
        items += [tiles] if queries else []
    share = -(-sum(items) // programs)
    for longer in (share, share + -(-share // 8)):
        if sum(-(-n // longer) for n in items) <= programs:
            return [-(-n // longer) for n in items]
    starts = [sum(items[:i]) for i in range(len(items))]
    return [(start + n - 1) // share - start // share + 1 for start, n in zip(starts, items, strict=True)]


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 7, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ragged_lengths(dtype: torch.dtype, programs: int, device: torch.device) -> None:
    check(Case(**RAGGED, dtype=dtype), programs, device)


def test_the_splits_differ() -> None:
    """Else the cases above would not show what they are for."""
    seen = {programs: parts(Case(**RAGGED), programs) for programs in (1, 2, 4, 7, 40)}
    assert set(seen[1]) == {1} and set(seen[2]) == {1, 2} and set(seen[4]) == {1, 2, 3} and max(seen[40]) == 6
    assert seen[7] == [1, 2, 1, 1, 1], "whole shares"
    assert parts(Case(**LONG), 44) == [44] and parts(Case(**LONG), 13) == [11]


def test_too_few_programs_for_whole_shares(device: torch.device) -> None:
    """Six items of 13 tiles by eight programs: in whole shares of 10 tiles, and of 12, they would take twelve."""
    case = Case(query_lens=(1,) * 6, seq_lens=(200,) * 6, head_dim=16, write=False)
    assert parts(case, 8) == [2, 2, 2, 3, 2, 2]
    check(case, 8, device)


@pytest.mark.parametrize(("programs", "fan_in"), [(44, 44), (44, 16), (44, 7), (44, 2), (13, 3), (44, 43)])
def test_many_programs_to_an_item(programs: int, fan_in: int, device: torch.device) -> None:
    check(Case(**LONG), programs, device, fan_in=fan_in)


@pytest.mark.parametrize("reduction_unroll_regs", [1, 4, 64])
def test_as_many_states_at_once_as_registers_hold(reduction_unroll_regs: int, device: torch.device) -> None:
    case = Case(**LONG)
    config = config_of(make_problem(case, device), 44, fan_in=7, reduction_unroll_regs=reduction_unroll_regs)
    assert config.reduction_unroll == {1: 2, 4: 8, 64: 8}[reduction_unroll_regs]
    check(case, 44, device, fan_in=7, reduction_unroll_regs=reduction_unroll_regs)


@pytest.mark.cover(by=values)
@pytest.mark.parametrize("programs", [2, 3, 7, 16, 40, 60])
@pytest.mark.parametrize("tile_overhead", [1, 3])
def test_items_that_count_for_more(tile_overhead: int, programs: int, device: torch.device) -> None:
    """More tiles than their keys have: some ranges then end before an item's first keys, or begin there."""
    for shape in (RAGGED, TOKENS):
        check(Case(**shape, sinks=0.5), programs, device, tile_overhead=tile_overhead, fan_in=2)


@pytest.mark.parametrize("programs", [1, 5, 24])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (10, 2), (8, 1)], ids=str)
def test_several_tokens(heads: tuple[int, int], programs: int, device: torch.device) -> None:
    check(Case(**TOKENS, heads=heads), programs, device, fan_in=2)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 20, "poison_behind": True},
    "window of one": {"sliding_window": 1},
    "sinks": {"sinks": 0.5},
    "alibi": {"alibi": True},
    "cap": {"softcap": 5.0, "magnitude": 3.0},
    "not causal": {"causal": False},
    "window both ways": {"causal": False, "sliding_window": 9},
    "all": {"sliding_window": 33, "sinks": 0.5, "alibi": True, "softcap": 5.0},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    "fp8 and a float": {"kv_cache_dtype": "fp8_e5m2", "kv_scale": "float"},
    "other strides": {"layout": "HND"},
    "values of another width": {"head_dim_v": 48},
    "no LSE": {"lse": False},
    "small blocks": {"block_size": 3},
    "infinite poison": {"poison": float("inf")},
}


@pytest.mark.parametrize("name", sorted(FEATURES))
@pytest.mark.parametrize("shape", [RAGGED, TOKENS], ids=["one token", "more"])
def test_features(shape: dict[str, Any], name: str, device: torch.device) -> None:
    check(Case(**{**shape, **FEATURES[name]}), 9, device, fan_in=2)


@pytest.mark.parametrize("window", [None, 20])
def test_block_ids_loaded_when_they_are_needed(window: int | None, device: torch.device) -> None:
    check(Case(**RAGGED, sliding_window=window), 9, device, prefetch_block_table=False)


def test_more_sequences_than_are_read_at_once(device: torch.device) -> None:
    queries = tuple(int(i % 9 == 3 or i > 590) for i in range(600))
    keys = tuple((i * 37) % 50 if i % 5 else 0 for i in range(600))
    case = Case(query_lens=queries, seq_lens=keys, heads=(1, 1), head_dim=16, write=False)
    assert len(case.query_lens) > 2 * 256
    check(case, 11, device, block_n=32)
    check(case, 60, device, block_n=32)


def test_one_workspace_for_many_shapes(device: torch.device) -> None:
    room = new_workspace(1 << 20, device)
    for case, programs in ((LONG, 44), (TOKENS, 7), (RAGGED, 30), (LONG, 13), (TOKENS, 40)):
        check(Case(**case), programs, device, workspace=room, fan_in=3)


def test_the_same_bits_again(device: torch.device) -> None:
    """Whoever arrives last adds in the same order."""
    first, second = (check(Case(**LONG), 44, device, fan_in=5) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_a_thousand_times_under_load(device: torch.device) -> None:
    """Ragged decodes, whose keys programs share: in whatever order they arrive, and whatever else runs."""
    lens = (9000, 1, 700, 0, 33, 2500, 16)
    kind = {"heads": (8, 2), "head_dim": 128, "dtype": torch.bfloat16, "lse": True, "write": False}
    case = Case(query_lens=(1,) * len(lens), seq_lens=lens, **kind)
    problem = make_problem(case, device)
    out, lse = torch.empty_like(problem.query), torch.empty(problem.query.shape[:2], device=device)
    inputs = inputs_of(problem, out, lse)
    config = decode_config_of(shape_of(inputs), bounds_of(inputs), target_of(device))
    assert sum(n > 1 for n in parts(case, config.programs // 2, config.tuning.block_n)) >= 3, "nothing is combined"
    room, launch = new_workspace(config.workspace, device), import_module("pagedattn.kernels.decode.kernel").launch
    launch(config, inputs, room)
    assert_close("first", out, problem.expected, problem.naive)
    want, want_lse = out.clone(), lse.clone()
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=device)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(1000):
        if turn % 10 == 0:
            with torch.cuda.stream(side):
                torch.mm(noise, noise)
        out.fill_(torch.nan)
        launch(config, inputs, room)
        differing += (out != want).sum() + (lse != want_lse).sum()
    assert int(differing) == 0 and not room[: 3 * COUNTERS].any()


def call(device: torch.device, **options: Any) -> torch.Tensor:
    problem = make_problem(Case(**LONG), device)
    common, cache = problem.common, problem.cache
    assert cache is not None
    return ops.paged_attention(
        problem.query,
        cache.key,
        cache.value,
        common.block_table,
        common.query_start_loc,
        common.seq_lens,
        max_query_len=1,
        max_seq_len=700,
        scale=problem.spec.softmax_scale,
        path="triton",
        **options,
    )


def test_a_workspace_of_another_plan_is_used_where_it_is_large_enough(device: torch.device) -> None:
    problem = make_problem(Case(**LONG), device)
    inputs = inputs_of(problem, torch.empty_like(problem.query), None)
    large = new_workspace(1 << 20, device)
    plan = plan_call(inputs, workspace=large)
    assert plan.workspace is large and plan.serves(inputs)
    execute(plan, inputs)
    assert torch.equal(inputs.out, call(device)) and not large[: 3 * COUNTERS].any()
    own = plan_call(inputs, workspace=new_workspace(0, device)).workspace
    assert own is not None and own.numel() == plan.workspace_size <= large.numel()


def test_a_plan_for_other_calls_is_not_executed(device: torch.device) -> None:
    problem = make_problem(Case(**LONG), device)
    inputs = inputs_of(problem, torch.empty_like(problem.query), None)
    plan = plan_call(inputs)
    assert plan.serves(inputs) and not plan.serves(inputs._replace(mask=(1, 5)))
    other = plan_call(inputs._replace(mask=(1, 5)))
    want = call(device)
    assert torch.equal(call(device, plan=plan), want) and torch.equal(call(device, plan=other), want)


def test_a_table_narrower_than_the_lengths(device: torch.device) -> None:
    """Keys beyond the table are left out, also where the window begins there, in the tile in which the table ends.

    What lies behind the table's 48 keys are blocks of the sequence: whoever reads on finds its keys.
    """
    for window, prefetch_block_table in product((0, 20, 640, 652, 653), (True, False)):
        problem = make_problem(Case(**LONG), device)
        problem.common = problem.common.replace(block_table=problem.common.block_table[:, :3])
        out = torch.empty_like(problem.query)
        inputs = inputs_of(problem, out, None)._replace(mask=(1, window))
        config = config_of(problem, 5, block_n=32, prefetch_block_table=prefetch_block_table)
        room = new_workspace(config.workspace, device)
        import_module("pagedattn.kernels.decode.kernel").launch(config, inputs, room)
        assert bool(torch.isfinite(out).all()) and bool(out.any()) == (window in (0, 653)), (
            window,
            prefetch_block_table,
        )


@pytest.mark.parametrize("decodes", [-1, 3])
def test_more_decodes_than_sequences_or_fewer_than_none(decodes: int, device: torch.device) -> None:
    with pytest.raises(InvalidInputError, match=rf"^num_decodes must be in 0\.\.1, .*got {decodes}"):
        call(device, num_decodes=decodes)


@pytest.mark.parametrize("name", ["key", "value"])
def test_slots_too_far_apart_for_the_kernels(name: str, device: torch.device) -> None:
    problem = make_problem(Case(**LONG), device)
    inputs = inputs_of(problem, torch.empty_like(problem.query), None)
    far = torch.empty_strided(inputs.key.shape, (1, 2**31 // 7, 1, 1), device="meta")
    with pytest.raises(InvalidInputError, match=rf"^{name} must be a cache whose blocks reach over less than 2"):
        _check_extent(inputs._replace(**{name: far}))


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "seq_lens", "query_start_loc"])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_columns_are_refused(name: str, path: str, device: torch.device) -> None:
    """The kernels read these without strides."""
    problem = make_problem(Case(**TOKENS), device)
    common = problem.common
    given: dict[str, Any] = {
        "block_table": common.block_table,
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "sinks": torch.zeros(problem.spec.num_heads, device=device),
        "alibi_slopes": None,
    }
    given[name] = torch.stack([given["sinks"] if name == "alibi_slopes" else given[name]] * 2, 1)[:, 0]
    bounds = {"max_query_len": common.max_query_len, "max_seq_len": common.max_seq_len, "scale": 1.0, "path": path}
    cache = problem.cache
    assert cache is not None
    with pytest.raises(InvalidInputError, match=f"^{name} must be .*contiguous"):
        ops.paged_attention(problem.query, cache.key, cache.value, **given, **bounds)
