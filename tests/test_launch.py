"""Launch configurations are pure functions of shapes and target: what they promise is checked without a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pagedattn.ops.launch import AttentionConfig, Target, attention_config, target_of

TARGETS = {"99 KB": Target(46, 101376), "163 KB": Target(108, 166912), "227 KB": Target(132, 232448)}
GROUPS = (1, 2, 4, 5, 7, 8, 16, 128)
LENGTHS = ((1, 1), (1, 64), (1, 1000), (1, 131072), (3, 500), (7, 4096), (64, 64), (512, 16384))
SEQS = (1, 3, 64, 1024)


def configure(target: Target, **changes: int) -> AttentionConfig:
    shape = {
        "num_seqs": 4,
        "num_kv_heads": 2,
        "group": 4,
        "head_dim": 128,
        "head_dim_v": 128,
        "itemsize": 2,
        "max_query_len": 1,
        "max_seq_len": 4096,
    }
    return attention_config(**{**shape, **changes}, target=target, deterministic=False)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shared_bytes(config: AttentionConfig, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """The query tile and a key and a value tile per stage, each as wide as the next power of two."""
    keys = config.num_stages * config.block_n * (power_of_2(head_dim) + power_of_2(head_dim_v))
    return (config.block_m * power_of_2(head_dim) + keys) * itemsize


DIMS = [(d, d) for d in (16, 64, 72, 80, 96, 128, 192, 256, 512)] + [(192, 128), (24, 40)]


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_tiles_fit_shared_memory(name: str, itemsize: int, dims: tuple[int, int]) -> None:
    for group, (queries, keys) in product(GROUPS, LENGTHS):
        config = configure(
            TARGETS[name],
            group=group,
            head_dim=dims[0],
            head_dim_v=dims[1],
            itemsize=itemsize,
            max_query_len=queries,
            max_seq_len=keys,
        )
        assert shared_bytes(config, *dims, itemsize) <= TARGETS[name].shared_bytes, (group, queries, keys, config)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_are_what_the_kernel_takes(itemsize: int) -> None:
    one_blocks = 0
    for target, (dim, _), group, (queries, keys) in product(TARGETS.values(), DIMS, GROUPS, LENGTHS):
        config = configure(
            target, head_dim=dim, head_dim_v=dim, group=group, itemsize=itemsize, max_query_len=queries,
            max_seq_len=keys,
        )  # fmt: skip
        assert all(n == power_of_2(n) for n in (config.block_m, config.block_n, config.num_warps))
        assert config.block_m >= 16 and config.block_n >= 16 and config.num_stages >= 1
        assert 1 <= config.heads <= min(group, config.block_m)
        if config.one_block:
            assert config.block_m // config.heads >= queries
            one_blocks += 1
    assert one_blocks > 100


@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("keys", [1, 63, 64, 128, 129, 1000, 131072, 10_000_000])
def test_a_split_is_never_without_a_tile_of_keys(seqs: int, keys: int) -> None:
    for target, itemsize, group in product(TARGETS.values(), (2, 4), (1, 4, 16)):
        config = configure(target, num_seqs=seqs, max_seq_len=keys, itemsize=itemsize, group=group)
        assert config.one_block and 1 <= config.splits <= 128
        assert config.splits == 1 or config.splits * config.block_n <= keys


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    target = TARGETS["227 KB"]
    assert configure(target, num_seqs=1, max_seq_len=131072).splits == 132 // 2
    assert configure(target, num_seqs=1024, max_seq_len=131072).splits == 1
    assert configure(target, num_seqs=1, max_seq_len=256).splits == 2
    assert configure(target, num_seqs=1, max_query_len=512, max_seq_len=131072).splits == 1


def test_the_interpreter_splits_short_sequences_too() -> None:
    config = configure(target_of(torch.device("cpu")), num_seqs=4, itemsize=4, max_seq_len=129)
    assert config.one_block and config.splits > 1, "else no interpreted test merges partial states"


def test_the_same_question_has_the_same_answer() -> None:
    assert configure(TARGETS["99 KB"]) == configure(Target(*TARGETS["99 KB"]))
    assert target_of(torch.device("cpu")) == target_of(torch.device("cpu"))
    assert target_of(torch.device("cpu")).num_sms > 0
