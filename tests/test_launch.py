"""Launch configurations are pure functions of shapes and target: what they promise is checked without a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from pagedattn.kernels.decode.plan import (
    FEW_ITEMS,
    FULL,
    LATENCY,
    ONE_TILE,
    PAIRED,
    SHORT,
    WIDE,
    WIDE_FEW_ITEMS,
    DecodeConfig,
    DecodeTuning,
    decode_config,
)
from pagedattn.kernels.prefill.plan import AttentionConfig, attention_config
from pagedattn.kernels.prefill_sm90.plan import TileSchedulerParams, params_of
from pagedattn.kernels.shape import AttentionShape, BatchBounds
from pagedattn.ops import attention_plan
from pagedattn.ops.attention_plan import decode_config_of, plan_spans, prefers_split_kv
from pagedattn.runtime.target import Target, target_of
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.spec import Mask

TARGETS = {"99 KB": Target(46, 101376), "163 KB": Target(108, 166912), "227 KB": Target(132, 232448)}
GROUPS = (1, 2, 4, 5, 7, 8, 16, 128)
LENGTHS = ((1, 1), (1, 64), (1, 1000), (1, 131072), (3, 500), (7, 4096), (64, 64), (512, 16384))
SEQS = (1, 3, 64, 1024)


SHAPE = {"group": 4, "head_dim": 128, "head_dim_v": 128, "itemsize": 2}
STEP = {"num_seqs": 4, "num_kv_heads": 2, "stored_itemsize": 2, "max_query_len": 1, "max_seq_len": 4096}


def configure(target: Target, **changes: int) -> AttentionConfig:
    return attention_config(**{**SHAPE, **changes}, target=target)


def configure_decode(target: Target, **changes: Any) -> DecodeConfig:
    return decode_config(**{**SHAPE, **STEP, **changes}, target=target)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shared_bytes(block_m: int, block_n: int, buffers: int, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """The query tile and a key and a value tile per buffer, each as wide as the next power of two."""
    keys = buffers * block_n * (power_of_2(head_dim) + power_of_2(head_dim_v))
    return (block_m * power_of_2(head_dim) + keys) * itemsize


DIMS = [(d, d) for d in (16, 64, 72, 80, 96, 128, 192, 256, 512)] + [(192, 128), (24, 40)]


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_tiles_fit_shared_memory(name: str, itemsize: int, dims: tuple[int, int]) -> None:
    target, shape = TARGETS[name], {"head_dim": dims[0], "head_dim_v": dims[1], "itemsize": itemsize}
    for group, (queries, keys), seqs in product(GROUPS, LENGTHS, SEQS):
        config = configure(target, group=group, **shape)
        assert shared_bytes(config.block_m, config.block_n, config.num_stages, *dims, itemsize) <= target.shared_bytes
        step = {"num_seqs": seqs, "max_query_len": queries, "max_seq_len": keys}
        small = configure_decode(target, group=group, **shape, **step)
        tile = small.block_m, small.tuning.block_n, max(1, small.tuning.num_stages - 1)
        assert shared_bytes(*tile, *dims, itemsize) <= target.shared_bytes, (group, queries, keys, small)


def test_few_keys_are_no_reason_for_two_stages() -> None:
    """A query's own block: more programs run at once, which wait for memory."""
    target = TARGETS["227 KB"]
    usual, own = configure(target), attention_config(**SHAPE, target=target, mask=Mask(True, own_block=32))
    assert (own.block_n, own.num_stages) == (32, 1) and (usual.block_n, usual.num_stages) == (64, 2)
    for mask in (Mask(True, own_block=32, recent_blocks=2), Mask(True, earlier_blocks=32), Mask(True)):
        assert attention_config(**SHAPE, target=target, mask=mask) == usual


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_are_what_the_kernels_take(itemsize: int) -> None:
    for target, (dim, dim_v), group, (queries, keys) in product(TARGETS.values(), DIMS, GROUPS, LENGTHS):
        shape = {"head_dim": dim, "head_dim_v": dim_v, "group": group, "itemsize": itemsize}
        config = configure(target, **shape)
        small = configure_decode(target, **shape, max_query_len=queries, max_seq_len=keys)
        for one, tile in ((config, config), (small, small.tuning)):
            assert all(n == power_of_2(n) for n in (one.block_m, tile.block_n, tile.num_warps))
            assert one.block_m >= 16 and tile.block_n >= 16 and tile.num_stages >= 1
            assert 1 <= one.heads <= min(group, one.block_m)
        assert small.rows == power_of_2(small.rows) <= small.block_m
        assert small.rows >= min(queries, small.block_m // small.heads) * small.heads
        assert small.state % 4 == 0, "partial outputs are loaded 16 bytes at a time"


@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("keys", [0, 1, 63, 128, 129, 131072, 10_000_000])
def test_no_program_is_without_work_by_the_bounds(seqs: int, keys: int) -> None:
    for target, itemsize, group, queries in product(TARGETS.values(), (2, 4), (1, 4, 16, 128), (1, 5, 16)):
        step = {"num_seqs": seqs, "max_seq_len": keys, "max_query_len": queries}
        config = configure_decode(target, itemsize=itemsize, group=group, **step)
        tokens = config.block_m // config.heads
        items = seqs * 2 * -(-group // config.heads) * -(-queries // tokens)
        assert config.tiles == items * max(1, -(-keys // config.tuning.block_n))
        assert 1 <= config.programs <= min(config.tiles, COUNTERS, config.tuning.per_sm * target.num_sms)
        assert config.workspace == 3 * COUNTERS + 2 * config.programs * config.state


def test_busy_or_not() -> None:
    target = TARGETS["227 KB"]
    assert configure_decode(target, num_seqs=1, max_seq_len=131072).programs == 132
    assert configure_decode(target, num_seqs=66, max_seq_len=131072).tuning == LATENCY
    assert configure_decode(target, num_seqs=67, max_seq_len=131072).tuning == FULL
    assert configure_decode(target, num_seqs=132, max_seq_len=131072).programs == 2 * 132
    assert configure_decode(target, num_seqs=132, max_seq_len=513).tuning == FULL
    assert configure_decode(target, num_seqs=165, max_seq_len=512).programs == 4 * 132
    assert configure_decode(target, num_seqs=165, max_seq_len=131072, short=True).tuning == SHORT
    assert configure_decode(target, num_seqs=164, max_seq_len=512, short=True).tuning == FULL
    assert configure_decode(target, num_seqs=66, max_seq_len=512, short=True).tuning == LATENCY
    assert configure_decode(target, num_seqs=1, max_seq_len=256).programs == 4
    assert configure_decode(target, num_seqs=132, max_seq_len=32).tuning == ONE_TILE
    assert configure_decode(target, num_seqs=165, max_seq_len=33).programs == 4 * 132
    assert configure_decode(target, num_seqs=132, max_seq_len=32, stored_itemsize=1).tuning.num_warps == 4
    assert configure_decode(target, num_seqs=132, max_seq_len=32, itemsize=4, stored_itemsize=4).tuning.num_warps == 4
    assert configure_decode(target, num_seqs=132, max_seq_len=32, head_dim_v=256).tuning.num_warps > 1
    mine = DecodeTuning(
        block_n=32, num_warps=2, num_stages=4, per_sm=3, max_registers=64, fan_in=5, prefetch_block_table=False
    )
    assert configure_decode(target, tuning=mine).tuning == mine


def test_few_items_of_many_rows_or_narrow_heads() -> None:
    def tuning(**changes: int) -> DecodeTuning:
        return configure_decode(
            TARGETS["227 KB"], **{"num_seqs": 5, "num_kv_heads": 4, "max_seq_len": 9000, **changes}
        ).tuning

    assert tuning(group=16) == tuning(group=4, max_query_len=4) == FEW_ITEMS, "states of which a thread adds up few"
    assert tuning() == tuning(group=8) == LATENCY != tuning(num_seqs=1) == FEW_ITEMS
    narrow = {"head_dim": 64, "head_dim_v": 64}
    assert tuning(**narrow) == PAIRED and tuning(**narrow, num_seqs=2) == LATENCY
    padded = {"group": 7, "max_query_len": 2}
    assert tuning(**padded) == FEW_ITEMS and tuning(**padded, num_seqs=17) == LATENCY, "few share an item of many"


def test_few_items_of_wide_heads() -> None:
    """Four KV heads on 132 SMs. Of many items two programs an SM hide each other's softmax."""

    def tuning(num_seqs: int = 5, group: int = 4) -> DecodeTuning:
        wide = {"head_dim": 256, "head_dim_v": 256, "num_kv_heads": 4, "max_seq_len": 9000}
        return configure_decode(TARGETS["227 KB"], num_seqs=num_seqs, group=group, **wide).tuning

    assert tuning() == WIDE and tuning(group=8) == WIDE_FEW_ITEMS, "states of which a thread adds up few"
    assert tuning(group=8, num_seqs=17) == WIDE
    assert tuning(num_seqs=50) == PAIRED._replace(num_stages=2), "no room for more buffers of two programs"


def test_64_rows_on_two_programs_an_sm_or_on_one() -> None:
    """By query blocks times keys for each SM: 2 of 2 KV heads each, here."""
    target, rows = TARGETS["227 KB"], {"max_query_len": 16, "num_seqs": 66}
    tuning = [configure_decode(target, **rows, max_seq_len=keys).tuning for keys in (1023, 1024)]
    assert [(one.num_warps, one.per_sm) for one in tuning] == [(8, 1), (4, 2)]
    wide = configure_decode(target, **rows, max_seq_len=9999, head_dim=256, head_dim_v=256)
    assert wide.tuning.num_warps == 8


def test_many_programs_for_small_tiles_on_small_gpus() -> None:
    """As many per SM as their tiles have room for."""
    tuning = DecodeTuning(block_n=128, num_warps=4, num_stages=3, per_sm=4)
    assert configure_decode(TARGETS["227 KB"], tuning=tuning, num_seqs=1024).programs == 132
    assert configure_decode(TARGETS["227 KB"], tuning=tuning._replace(block_n=32), num_seqs=1024).programs == 4 * 132
    assert configure_decode(TARGETS["99 KB"], tuning=tuning).tuning.num_stages == 2


MIXED = {"num_decodes": 3, "max_query_len": 17}
PAGED = AttentionShape(torch.float16, torch.float16, 8, 4, 128, 128, (1, 0), False, True, False, 16)


@pytest.mark.parametrize(
    ("batch", "served"),
    [
        ({"num_decodes": 5, "max_query_len": 1}, [("decode", 0, 5, 1)]),
        ({"num_decodes": 0, "max_query_len": 16}, [("decode", 0, 5, 16)]),
        ({"num_decodes": 3, "max_query_len": 16}, [("decode", 0, 5, 16)]),
        ({"num_decodes": 3, "max_query_len": 17}, [("decode", 0, 3, 1), ("prefill", 3, 5, 17)]),
        ({"num_decodes": 0, "max_query_len": 17}, [("prefill", 0, 5, 17)]),
        ({"num_decodes": 3, "max_query_len": 17, "split": True}, [("decode", 0, 3, 1), ("decode", 3, 5, 17)]),
        ({**MIXED, "fused": True, "split": True}, [("decode", 0, 3, 1), ("decode", 3, 5, 17)]),
        ({**MIXED, "split": True, "fuse": False}, [("decode", 0, 3, 1), ("prefill", 3, 5, 17)]),
        ({"num_decodes": 5, "max_query_len": 1, "paged": False}, [("prefill", 0, 5, 1)]),
        ({"num_decodes": 3, "max_query_len": 17, "deterministic": True}, [("prefill", 0, 5, 17)]),
        ({**MIXED, "deterministic": True, "hopper": True}, [("prefill_sm90", 0, 5, 17)]),
        ({"num_decodes": 5, "max_query_len": 1, "deterministic": True, "hopper": True}, [("prefill_sm90", 0, 5, 1)]),
        ({"num_decodes": 3, "max_query_len": 17, "hopper": True}, [("decode", 0, 3, 1), ("prefill_sm90", 3, 5, 17)]),
        ({**MIXED, "hopper": True, "split": True}, [("decode", 0, 3, 1), ("prefill_sm90", 3, 5, 17)]),
        ({"num_decodes": 3, "max_query_len": 17, "hopper": True, "fused": True}, [("prefill_sm90", 0, 5, 17)]),
        ({"num_decodes": 0, "max_query_len": 16, "hopper": True, "fused": True}, [("prefill_sm90", 0, 5, 16)]),
        ({"num_decodes": 0, "max_query_len": 16, "hopper": True, "fused": True, "fuse": False}, [("decode", 0, 5, 16)]),
    ],
    ids=str,
)  # fmt: skip
def test_which_kernel_serves_what(
    batch: dict[str, Any], served: list[tuple[str, int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        "paged": True,
        "deterministic": False,
        "hopper": False,
        "fused": False,
        "split": False,
        "fuse": True,
        **batch,
    }
    for name, fact in {
        "should_fuse_decodes": "fused",
        "handles_short_queries": "fused",
        "see_few_keys": "fused",
        "prefers_split_kv": "split",
    }.items():
        monkeypatch.setattr(attention_plan, name, lambda *_, fact=fact: facts[fact])
    shape = PAGED._replace(paged=facts["paged"], deterministic=facts["deterministic"])
    bounds = BatchBounds(100, 5, batch["num_decodes"], batch["max_query_len"], 100)
    spans = plan_spans(shape, bounds, params_of(shape, bounds, 132), portable=not facts["hopper"], fuse=facts["fuse"])
    assert [span for span in spans if span.last > span.first] == served


def test_decodes_are_planned_for_the_keys_that_are_seen() -> None:
    def config(**mask: Any) -> DecodeConfig:
        shape = PAGED._replace(mask=Mask(causal=True, **mask).constants)
        return decode_config_of(shape, BatchBounds(256, 256, 256, 1, 1 << 17), TARGETS["227 KB"])

    assert config().tiles == 256 * 8 * (1 << 17) // config().tuning.block_n
    own, window = config(own_block=32), config(sliding_window=300)
    assert own.tuning == ONE_TILE and own.tiles == 256 * 8 and window.tuning == SHORT and window.tiles == 256 * 8 * 10
    one = decode_config_of(
        PAGED._replace(mask=Mask(True, own_block=64).constants), BatchBounds(1, 1, 1, 1, 1 << 17), TARGETS["227 KB"]
    )
    assert (one.tuning.block_n, one.programs) == (64, 8), "no program and no part of a tile without keys"


def test_prompts_whose_keys_the_decode_kernel_splits() -> None:
    """On GPUs without the kernel for Hopper, which splits keys itself."""

    def split(num_seqs: int = 1, max_query_len: int = 100, max_seq_len: int = 8192, group: int = 4) -> bool:
        params = TileSchedulerParams(8, group, 128, (1, 0), 0, 132)
        return prefers_split_kv(params, BatchBounds(1000, num_seqs + 7, 7, max_query_len, max_seq_len))

    assert split() and split(max_seq_len=2048) and split(2)
    assert not split(max_seq_len=2047) and not split(max_seq_len=399), "few keys"
    assert not split(3) and not split(max_query_len=300) and not split(group=16), "SMs that are busy"


def test_the_interpreter_splits_short_sequences_too() -> None:
    config = configure_decode(
        target_of(torch.device("cpu")), num_seqs=4, itemsize=4, stored_itemsize=4, max_seq_len=129
    )
    assert config.programs > 4 * 2, "else no interpreted test combines partial states"


def test_the_same_question_has_the_same_answer() -> None:
    assert configure(TARGETS["99 KB"]) == configure(Target(*TARGETS["99 KB"]))
    assert target_of(torch.device("cpu")) == target_of(torch.device("cpu"))
    assert target_of(torch.device("cpu")).num_sms > 0
