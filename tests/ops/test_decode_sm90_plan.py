"""Which decodes go to the kernel for codes; what it computes is in tests/backends/test_decode_sm90.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.test_decode import inputs_of

from pagedattn.kernels import hopper
from pagedattn.kernels.decode_sm90 import plan
from pagedattn.kernels.decode_sm90.plan import has_words, hopper_decode_config, why_not
from pagedattn.kernels.shape import K8V4, AttentionShape, BatchBounds, bounds_of, shape_of
from pagedattn.ops.attention_plan import _is_countable, plan_attention, plan_call
from pagedattn.runtime.target import Target, target_of
from pagedattn.testing.case import Case
from pagedattn.testing.problem import make_problem

CPU = torch.device("cpu")
CODES = ("int8", "int8")
SHAPE = AttentionShape(torch.bfloat16, torch.int8, 8, 4, 128, 128, (1, 0), False, True, False, 16, CODES)
H200 = Target(132, 232448, True)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")


def kernels(shape: AttentionShape, bounds: BatchBounds, **facts: Any) -> list[str]:
    return [launch.span.kernel for launch in plan_attention(shape, bounds, CPU, **facts).launches]


def decodes(count: int = 4, keys: int = 4096, tokens: int = 1) -> BatchBounds:
    return BatchBounds(count * tokens, count, count if tokens == 1 else 0, tokens, keys, keys)


def test_decodes_of_8_bit_caches_are_its_own() -> None:
    assert kernels(SHAPE, decodes()) == ["decode_sm90"]
    mixed = BatchBounds(503, 4, 3, 500, 4096, 4096)
    assert kernels(SHAPE, mixed) == ["decode_sm90", "prefill_sm90"]
    assert kernels(SHAPE, decodes(tokens=4)) == ["decode_sm90"]
    assert kernels(SHAPE._replace(stored_dtype=torch.bfloat16, codes=(None, None)), decodes()) == ["decode"]


@pytest.mark.parametrize("codes", plan._4_BITS)
def test_4_bits_are_served_by_twice_the_keys_where_a_block_has_them(codes: tuple[str, str]) -> None:
    shape = SHAPE._replace(stored_dtype=torch.uint8, codes=codes, block_size=32, mask=(1, 0, 0, 32, 2, 1))
    assert kernels(shape, decodes()) == ["decode_sm90"]
    wide, tall = shape._replace(block_size=64), shape._replace(head_dim=256)
    found = [hopper_decode_config(one, decodes(64), H200).tuning for one in (shape, wide, tall)]
    assert [(one.keys, one.tile) for one in found] == [(32, 32), (32, 32), (16, 16)]
    assert hopper_decode_config(shape._replace(block_size=48), decodes(64), H200).tuning.keys == 16
    several = hopper_decode_config(shape, decodes(64, tokens=4), H200).tuning
    assert (several.keys, several.warps) == (32, 2), "one warp would spill"
    assert kernels(shape._replace(mask=(1, 0, 32)), decodes()) == ["decode"], "codes are of earlier blocks"
    assert kernels(shape._replace(codes=(codes[0], "int8")), decodes()) == ["decode"]


def test_heads_of_other_sizes_are_served_where_their_rows_are_whole_words() -> None:
    def served(dim: int, codes: tuple[str, str], tokens: int = 1) -> bool:
        shape = SHAPE._replace(head_dim=dim, head_dim_v=dim, codes=codes)
        return kernels(shape, decodes(tokens=tokens)) == ["decode_sm90"]

    assert all(served(dim, CODES) for dim in (72, 80, 96, 112, 120, 136, 192))
    assert all(served(dim, K8V4, 16) for dim in (72, 80, 96, 120)), "64 rows, as of heads of 128"
    assert not served(192, K8V4, 5)
    two, three = ("turboquant2", "turboquant2"), ("turboquant4", "turboquant3")
    assert [served(dim, two) for dim in (80, 96, 104)] == [True, True, False]
    assert [served(dim, three) for dim in (80, 96, 160)] == [False, True, True], "lower and upper bits"
    config = hopper_decode_config(SHAPE._replace(head_dim=96, head_dim_v=80), decodes(64), H200)
    assert config == hopper_decode_config(SHAPE, decodes(64), H200), "states are of 128 elements"


def test_many_decodes_over_16_bits_are_its_own() -> None:
    native, enough = SHAPE._replace(stored_dtype=torch.bfloat16, codes=(None, None)), target_of(CPU).num_sms // 4
    assert kernels(native, decodes(enough)) == kernels(native._replace(head_dim=64), decodes(64)) == ["decode_sm90"]
    config = hopper_decode_config(native, decodes(enough), H200)
    assert (config.rows, config.tuning.tile, config.programs) == (8, 64, 3 * 132 // 8 * 8)
    for shape, bounds in (
        (native, decodes(enough - 1)),  # fewer than two items an SM
        (native, decodes(64, 512)),
        (native._replace(mask=(1, 300)), decodes(64)),
        (native, decodes(64, tokens=2)),
        (native._replace(group=9), decodes(64)),
        (native._replace(head_dim=256), decodes(64)),
        (native._replace(head_dim=96, head_dim_v=96), decodes(64)),
        (native._replace(block_size=8), decodes(64)),
        (native._replace(stored_dtype=torch.float16), decodes(64)),
        (native._replace(dtype=torch.float32, stored_dtype=torch.float32), decodes(64)),
    ):
        assert kernels(shape, bounds) == ["decode"], (shape, bounds)
    assert kernels(native, decodes(64), has_words=False) == ["decode"]
    plan = plan_attention(native, decodes(64), CPU, prefix_len=4000, max_prefix_len=4000)
    assert [one.span.kernel for one in plan.launches] == ["decode"], "few keys follow"


def test_what_it_does_not_serve_goes_to_the_kernel_for_every_cache() -> None:
    assert kernels(SHAPE._replace(head_dim=64, codes=K8V4), decodes(tokens=5)) == ["decode"], "values of another size"
    assert kernels(SHAPE._replace(head_dim=256, head_dim_v=256, codes=K8V4), decodes(tokens=3)) == ["decode"]
    assert kernels(SHAPE, decodes(), has_words=False) == ["decode"]
    assert kernels(SHAPE._replace(deterministic=True), decodes()) == ["prefill_sm90"]
    assert kernels(SHAPE._replace(deterministic=True, alibi=True), decodes()) == ["prefill"]
    for other in (
        {"dtype": torch.float32},
        {"head_dim": 100},
        {"head_dim_v": 60},
        {"head_dim": 264},
        {"block_size": 8},
        {"block_size": None},
        {"group": 65},
        {"group": 17, "head_dim": 64},
        {"group": 9, "head_dim": 136},
        {"codes": ("int8", None)},  # bytes of another meaning
    ):
        shape = SHAPE._replace(**other)
        assert why_not(shape, 1, "") and kernels(shape, decodes()) == ["decode"], other


def test_more_rows_are_served_in_blocks_of_64_where_no_other_kernel_is_faster() -> None:
    shape, fp8 = SHAPE._replace(codes=K8V4), SHAPE._replace(codes=("e4m3", "e4m3"), stored_dtype=torch.float8_e4m3fn)
    four = SHAPE._replace(codes=("turboquant4", "turboquant4"))
    for codes in (CODES, K8V4):
        assert kernels(SHAPE._replace(codes=codes), decodes(tokens=8)) == ["decode_sm90"]
        assert kernels(SHAPE._replace(codes=codes), decodes(tokens=9)) == ["prefill_sm90"], "other warps convert"
    for tokens in (5, 16):
        assert kernels(four, decodes(tokens=tokens)) == ["decode_sm90"]
        assert kernels(fp8, decodes(tokens=tokens)) == ["prefill_sm90"]
    assert kernels(SHAPE._replace(group=8), decodes(tokens=4)) == ["decode_sm90"]
    assert kernels(SHAPE._replace(group=8), decodes(tokens=5)) == ["prefill_sm90"], "other warps convert"
    exact = fp8._replace(dtype=torch.float16)  # whose keys are converted too
    assert kernels(exact, decodes(tokens=8)) == ["decode_sm90"] and kernels(exact, decodes(tokens=9)) == [
        "prefill_sm90"
    ]
    assert kernels(SHAPE, decodes(tokens=5), has_words=False) == ["prefill_sm90"]
    narrow = shape._replace(head_dim=64, head_dim_v=64)
    assert kernels(narrow, decodes(tokens=5)) == ["decode_sm90"]
    assert kernels(narrow._replace(codes=CODES), decodes(tokens=5)) == ["prefill_sm90"]
    config = hopper_decode_config(shape, decodes(64, tokens=8), H200)
    assert (config.rows, config.tuning.tile, config.programs, config.state) == (32, 64, 2 * 132, 32 * (128 + 2))
    assert hopper_decode_config(narrow, decodes(64, tokens=8), H200).rows == 64, "a thread has two channels of them"
    config = hopper_decode_config(shape, decodes(64, tokens=16), H200)
    assert (config.rows, config.tuning.tile, config.programs) == (64, 64, 2 * 132)
    assert config.tiles == 64 * 8 * 4096 // 64 and config.state == 64 * (128 + 2)
    twice = hopper_decode_config(shape, decodes(64, tokens=17), H200)
    assert twice.tiles == 2 * config.tiles, "two blocks of queries"
    alone = hopper_decode_config(shape, decodes(1, 1 << 17, 16), H200)
    assert alone.programs == 16 * 8, "no more states of an item than one program adds up"
    assert hopper_decode_config(shape._replace(group=3), decodes(tokens=16), H200).rows == 64
    assert hopper_decode_config(shape._replace(group=7, head_dim=80, head_dim_v=80), decodes(tokens=4), H200).rows == 32


def test_few_rows_of_wide_heads_whose_states_one_program_would_add_up() -> None:
    wide = SHAPE._replace(stored_dtype=SHAPE.dtype, codes=(None, None), head_dim=256, head_dim_v=256)
    for tokens, kernel in ((1, "decode"), (2, "decode"), (3, "prefill_sm90")):
        assert kernels(wide, decodes(4, tokens=tokens)) == [kernel]
    assert kernels(wide._replace(head_dim=128, head_dim_v=128), decodes(4, tokens=4)) == ["decode"]


def test_a_prefix_that_all_share_is_attended_to_by_the_kernel_that_serves_its_rows() -> None:
    def prefix_of(shape: AttentionShape, bounds: BatchBounds) -> tuple[list[str], str, int]:
        plan = plan_attention(shape, bounds, CPU, prefix_len=4000, max_prefix_len=4000)
        assert plan.prefix is not None and not plan.accumulates
        copies = max(2 * plan.copy_turns - 1, 0)  # beside what attends to the last one
        assert plan.num_launches == 1 + len(plan.launches) + copies
        ((span, config),) = plan.prefix.launches
        assert (span.first, span.last) == (0, 1) and plan.workspace_size >= plan.prefix.workspace_size
        return [one.span.kernel for one in plan.launches], span.kernel, getattr(config, "rows", span.max_query_len)

    by_codes, narrow = ["decode_sm90"], {"head_dim": 64, "head_dim_v": 64}
    fp8 = SHAPE._replace(codes=("e4m3", "e4m3"), stored_dtype=torch.float8_e4m3fn)
    assert prefix_of(fp8, decodes(80)) == (by_codes, "prefill_sm90", 80)
    assert prefix_of(fp8, decodes(20)) == (by_codes, "decode_sm90", 64)
    assert prefix_of(fp8, decodes(4)) == (by_codes, "decode_sm90", 16)
    for codes in (CODES, K8V4):
        assert prefix_of(SHAPE._replace(codes=codes), decodes(1024)) == (by_codes, "decode_sm90", 64)
    assert prefix_of(SHAPE._replace(**narrow), decodes(80)) == (by_codes, "prefill_sm90", 80)
    assert prefix_of(SHAPE._replace(codes=K8V4, **narrow), decodes(64)) == (by_codes, "decode_sm90", 64)
    native = SHAPE._replace(codes=(None, None), stored_dtype=torch.bfloat16)
    assert prefix_of(native, decodes(80)) == (["decode"], "prefill_sm90", 80)
    assert prefix_of(native, decodes(20)) == (["decode"], "decode", 64)
    one_block = {"num_kv_heads": 64}  # of 64 rows, whose work is as much
    assert prefix_of(fp8._replace(**one_block), decodes(16)) == (by_codes, "prefill_sm90", 16)
    assert prefix_of(native._replace(**one_block), decodes(16)) == (["decode"], "decode", 64)
    mixed = BatchBounds(503, 4, 3, 500, 4096, 4096)
    assert prefix_of(SHAPE, mixed) == (["decode_sm90", "prefill_sm90"], "decode_sm90", 16)
    short = BatchBounds(43, 4, 3, 40, 4096, 4096)  # whose prompt is served by the same family
    padded = SHAPE._replace(codes=K8V4, head_dim=96, head_dim_v=96)
    assert prefix_of(padded, short) == (["decode_sm90"] * 2, "decode_sm90", 16)


def test_prompts_of_few_rows_are_served_without_a_copy() -> None:
    def prompts(tokens: int) -> BatchBounds:
        return BatchBounds(2 * tokens + 3, 5, 3, tokens, 4096, 4096)

    shape = SHAPE._replace(codes=K8V4, head_dim=96, head_dim_v=96)
    assert kernels(shape, prompts(64)) == ["decode_sm90", "decode_sm90"]
    plan = plan_attention(shape, prompts(65), CPU)
    assert [launch.span.kernel for launch in plan.launches] == ["decode_sm90", "prefill_sm90"] and plan.copy_turns
    for codes in (CODES, K8V4):
        read = kernels(SHAPE._replace(codes=codes), prompts(64))
        assert read == ["decode_sm90", "prefill_sm90"], "which reads such codes"
    assert kernels(shape._replace(deterministic=True), prompts(64)) == ["prefill"]
    assert "decode_sm90" not in kernels(shape, prompts(64), has_words=False)


def test_prompts_over_4_bits_take_a_copy_if_that_is_small_and_tiles_would_be_converted_twice() -> None:
    def copied(codes: tuple[str, str], tokens: int, count: int = 1, keys: int = 2000, **of: int) -> bool:
        shape = SHAPE._replace(codes=codes, stored_dtype=torch.uint8, **of)
        plan = plan_attention(shape, BatchBounds(count * tokens, count, 0, tokens, keys, keys), CPU)
        assert [one.span.kernel for one in plan.launches if one.span.last > one.span.first][-1] == (
            "prefill_sm90" if plan.copy_turns else "decode_sm90"
        )
        return bool(plan.copy_turns)

    for codes in (("turboquant4", "turboquant4"), ("int4_per_channel", "rotated_int4")):
        assert copied(codes, 17) and copied(codes, 64) and copied(codes, 60, 4, 500)
        assert not copied(codes, 30, 16, 1000), "67 MB"
        assert not copied(codes, 60, group=1), "one block of rows"
    assert not copied(K8V4, 64, head_dim=96, head_dim_v=96)
    assert not copied(("turboquant4", "turboquant4"), 64, 4, 8000)
    assert not copied(("turboquant4", "turboquant4"), 17, 240, 17, block_size=1024), "a copy of whole blocks is large"


@pytest.mark.parametrize("here", ["no Hopper GPU", "kernels are interpreted"])
def test_elsewhere_it_is_not_used(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: here)
    assert kernels(SHAPE, decodes()) == ["decode"] and why_not(SHAPE, 1, here) == here


def test_a_plan_is_not_for_a_cache_of_odd_strides() -> None:
    case = Case(query_lens=(1, 1), seq_lens=(20, 5), head_dim=64, dtype=torch.bfloat16, kv_cache_dtype="int8")
    problem = make_problem(case, CPU)
    inputs = inputs_of(problem, torch.empty(2, 4, 64, dtype=torch.bfloat16), None)
    plan = plan_call(inputs)
    assert [launch.span.kernel for launch in plan.launches] == ["decode_sm90"] and plan.serves(inputs)
    wide = torch.zeros(*inputs.key.shape[:-1], 65, dtype=torch.int8)
    odd = inputs._replace(key=wide[..., :64])
    assert has_words(inputs) and not has_words(odd) and not has_words(inputs._replace(value=wide[..., 1:]))
    channels = torch.zeros(2, 1, 2, 129, dtype=torch.float16)
    assert has_words(inputs._replace(k_scale_cache=torch.zeros(2, 1, 2, 128, dtype=torch.float16)))
    assert not has_words(inputs._replace(k_scale_cache=channels[..., :128])), "of each channel, in words too"
    halves = torch.zeros(2, 16, 2, 2, dtype=torch.float16)
    assert has_words(inputs._replace(v_scale_cache=halves[..., :1]))
    assert not has_words(inputs._replace(v_scale_cache=halves[..., 1:])), "of which the first is half a word"
    assert not plan.serves(odd) and [launch.span.kernel for launch in plan_call(odd).launches] == ["decode"]
    assert shape_of(odd) == shape_of(inputs) and bounds_of(odd) == bounds_of(inputs)


def test_programs_and_workspace() -> None:
    many = hopper_decode_config(SHAPE, decodes(64), H200)
    assert (many.programs, many.rows, many.tuning.warps) == (12 * 132, 8, 1)
    some = hopper_decode_config(SHAPE, decodes(32), H200)
    assert (some.programs, some.tuning.warps) == (6 * 132, 2)
    few = hopper_decode_config(SHAPE, decodes(1, 1 << 17), H200)
    assert (few.programs, few.tuning.warps) == (3 * 132 // 8 * 8, 4)
    few_keys = hopper_decode_config(SHAPE, decodes(1, 1 << 13), H200)
    assert (few_keys.programs, few_keys.tuning.warps) == (132 // 8 * 8, 4), "partial states cost more than keys"
    assert hopper_decode_config(SHAPE, decodes(64, 256), H200).programs == many.programs, "a warp for each item or so"
    short = hopper_decode_config(SHAPE, decodes(1, 300), H200)
    assert short.programs == 5 * 8, "no more than tiles of keys"
    large = hopper_decode_config(SHAPE._replace(head_dim=256), decodes(64), H200)
    assert large.programs == 8 * 132 and large.tuning.max_registers == 255
    tokens = hopper_decode_config(SHAPE, decodes(tokens=4), H200)
    assert tokens.rows == 16 and tokens.workspace > 2 * tokens.programs * 16 * 128
    assert all(one.programs % SHAPE.num_kv_heads == 0 for one in (many, some, few, few_keys, short, large, tokens))
    assert not _is_countable(hopper_decode_config(SHAPE, decodes(1 << 14, 1 << 23), H200))
    assert kernels(SHAPE._replace(num_kv_heads=4096), decodes()) != ["decode_sm90"], "more heads than counters"


def test_the_plan_says_so() -> None:
    bounds = decodes(2, 512)
    plan = plan_attention(SHAPE, bounds, CPU)
    assert plan.describe() == "decode kernel: 2 sequences (for Hopper, 64 programs, tiles of 64 keys)"
    assert plan.workspace_size == plan.launches[0].config.workspace  # type: ignore[union-attr]
