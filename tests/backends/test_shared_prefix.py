"""TRITON attends once to a prefix that all sequences share: what it then computes, and when it does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from pagedattn import AttentionSpec, CommonAttentionMetadata, ops
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.recent import RecentBuilder, RecentMetadata
from pagedattn.backends.registry import get_backend
from pagedattn.backends.triton.metadata import TritonMetadataBuilder
from pagedattn.errors import InvalidInputError
from pagedattn.kernels.decode import cascade
from pagedattn.kernels.decode.cascade import CascadeMetadata
from pagedattn.kernels.decode.plan import decode_config
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.shape import bounds_of, shape_of
from pagedattn.ops.attention_plan import decode_config_of
from pagedattn.ops.launch_plan import LaunchPlan
from pagedattn.runtime.target import Target, target_of
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE: dict[str, Any] = {"query_lens": (1, 1, 1, 1), "seq_lens": (41, 33, 100, 65), "shared_prefix": 32, "head_dim": 16}
MORE: dict[str, Any] = {"query_lens": (3, 16, 1), "seq_lens": (51, 64, 90), "shared_prefix": 48, "head_dim": 16}
CASES: dict[str, Case] = {
    **{f"one token, {h}/{k}": Case(**ONE, heads=(h, k)) for h, k in ((4, 2), (8, 1), (5, 5), (10, 2))},
    **{f"more tokens, {h}/{k}": Case(**MORE, heads=(h, k)) for h, k in ((4, 2), (8, 1))},
    **{name: Case(**ONE, **options) for name, options in {
        "sinks": {"sinks": 0.5},
        "strong sinks": {"sinks": 10.0},
        "no sink": {"sinks": -torch.inf},
        "cap": {"softcap": 5.0, "magnitude": 3.0},
        "not causal": {"causal": False},
        "no LSE": {"lse": False},
        "half": {"dtype": torch.float16},
        "fp8, a float": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "float"},
        "fp8, heads": {"kv_cache_dtype": "fp8_e5m2", "kv_scale": "head", "sinks": 0.5},
        "values of another width": {"head_dim_v": 48},
        "other strides": {"layout": "HND"},
        "rows of nobody": {"padding_rows": 3, "fused_qkv": True},
        "infinite poison": {"poison": torch.inf},
        "huge logits": {"magnitude": 30.0},
    }.items()},
    "more tokens at the edge": Case(
        query_lens=(16, 3), seq_lens=(48, 60), shared_prefix=48, head_dim=16, write=False
    ),
    "small blocks": Case(**{**ONE, "shared_prefix": 30}, block_size=3),
    "sinks and tokens": Case(**MORE, sinks=0.5, softcap=5.0, heads=(7, 1)),
    "padding": Case(query_lens=(1, 1, 0, 0), seq_lens=(40, 33, 0, 0), shared_prefix=32, head_dim=16),
    "decodes of a mixed step": Case(query_lens=(1, 1, 40), seq_lens=(40, 33, 80), shared_prefix=32, head_dim=16),
    "nothing else": Case(query_lens=(1, 1), seq_lens=(32, 32), shared_prefix=32, head_dim=16, write=False),
    "nothing else for some": Case(
        query_lens=(17 - 15, 4, 1), seq_lens=(34, 33, 32), shared_prefix=32, head_dim=16, block_size=4, write=False
    ),
    "many sequences": Case(
        query_lens=(1,) * 300, seq_lens=(17, 23, 16) * 100, shared_prefix=16, heads=(1, 1), head_dim=16, write=False
    ),
    "one sequence": Case(query_lens=(1,), seq_lens=(40,), shared_prefix=32, head_dim=16),
}  # fmt: skip


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "SAVED_BYTES", -(1 << 62))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Sequences, most keys, and whether it adds to what is there, of each decode launch."""
    module, seen = import_module("pagedattn.kernels.decode.kernel"), []
    launch = module.launch

    def seeing(config: Any, inputs: Any, room: Any) -> Any:
        seen.append((len(inputs.seq_lens), inputs.max_seq_len, int(inputs.accumulate)))
        made = launch(config, inputs, room)
        assert (inputs.prior is not None) == (inputs.accumulate and inputs.out.dtype != torch.float32)
        assert not room[: 3 * COUNTERS].any(), "a counter was not left zero"
        return made

    monkeypatch.setattr(module, "launch", seeing)
    return seen


@pytest.mark.parametrize("name", sorted(CASES))
def test_against_the_oracle(name: str, always: None, calls: list[tuple[int, int, int]]) -> None:
    case = CASES[name]
    problem = make_problem(case, DEVICE)
    length = cascade.whole_blocks(case.shared_prefix, problem.common.max_query_len, case.block_size)
    decodes = problem.common.num_decodes if max(case.query_lens) > 16 else len(case.query_lens)
    length = case.shared_prefix if max(case.query_lens) > 16 else length
    assert length > 0
    check(get_backend("TRITON"), problem, name)
    assert calls == [(1, length, 0), (decodes, problem.common.max_seq_len, 1)]


OPEN: dict[str, Any] = {"head_dim": 16, "block_size": 32, "shared_prefix": 96}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "options", "length"),
    [
        # The shortest sequence that there may be has its last key in the third block, which is open.
        ("int4", {"query_lens": (1, 1, 1), "seq_lens": (97, 130, 200)}, 64),
        ("int4", {"query_lens": (1, 1, 1), "seq_lens": (97, 130, 200), "sinks": 0.5, "dtype": torch.float16}, 64),
        ("int4", {"query_lens": (3, 16, 1), "seq_lens": (100, 130, 98), "lse": False}, 64),
        ("int4", {"query_lens": (1, 1, 40), "seq_lens": (97, 100, 140)}, 64),
        ("turboquant4:window=32", {"query_lens": (1, 1, 0), "seq_lens": (97, 130, 0)}, 32),
        ("turboquant4:window=64", {"query_lens": (1, 1), "seq_lens": (97, 130)}, 0),
        ("int4:first=32", {"query_lens": (1, 1), "seq_lens": (97, 130)}, 0),
    ],
)
def test_a_prefix_of_a_cache_with_open_blocks(
    kv_cache_dtype: str, options: dict[str, Any], length: int, always: None, calls: list[tuple[int, int, int]]
) -> None:
    """What is before the open blocks of all sequences is attended to once, and each adds what else it has."""
    problem = make_problem(Case(**OPEN | options, kv_cache_dtype=kv_cache_dtype), DEVICE)
    check(get_backend("TRITON"), problem, kv_cache_dtype)
    count = problem.common.num_decodes if max(options["query_lens"]) > 16 else problem.common.num_seqs
    assert ((1, length, 0) in calls) == (length > 0)
    assert not length or calls.index((1, length, 0)) < calls.index((count, problem.common.max_seq_len, 1))


def test_a_captured_step_over_open_blocks_shares_what_each_step_says(always: None) -> None:
    common = step(3, 64, 20)
    common = common.replace(recent_table=common.block_table.clone())
    builder = RecentBuilder(
        lambda spec: TritonMetadataBuilder(spec, torch.device("cpu")), OPEN_SPEC, torch.device("cpu")
    )
    metadata = builder.build(common.replace(shared_prefix_len=16), capture=True)
    assert metadata.shares_prefix and isinstance(metadata, RecentMetadata) and metadata.calls is not None
    sealed, recent = metadata.calls
    assert read(sealed)[0] == [0, 3, 0] and not recent.shares_prefix, "nothing before a first block that may be open"
    builder.build(common.replace(shared_prefix_len=64), metadata)
    assert read(sealed) == ([0, 3, 32], [52, 52, 52], [[2, 3, 4, 5], [2, 3, 10, 11], [2, 3, 16, 17]])
    assert not builder.build(common.replace(shared_prefix_len=0)).shares_prefix


@pytest.mark.parametrize("window", [None, 20])
def test_a_prefix_that_is_not_shared_so(window: int | None, always: None, calls: list[tuple[int, int, int]]) -> None:
    check(get_backend("TRITON"), make_problem(Case(**ONE, sliding_window=window, alibi=window is None), DEVICE))
    assert calls == [(4, 100, 0)]


SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float16, block_size=16)
OPEN_SPEC = SPEC.replace(kv_cache_dtype="turboquant4:window=16")


def step(sequences: int, shared: int, own: int, tokens: int = 1) -> CommonAttentionMetadata:
    blocks = -(-(shared + own) // 16)
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    table[:, : shared // 16] = table[0, : shared // 16].clone()
    common = CommonAttentionMetadata.from_lengths([tokens] * sequences, [shared + own] * sequences, table)
    return common.replace(shared_prefix_len=shared)


def length_of(common: CommonAttentionMetadata, spec: AttentionSpec = SPEC, **options: Any) -> int:
    metadata = TritonMetadataBuilder(spec, torch.device("cpu")).build(common, **options)
    assert metadata.plan is not None
    shared = metadata.plan.cascade
    assert ("attended once" in metadata.describe()) == metadata.shares_prefix == (shared is not None)
    return 0 if shared is None else shared.length


def test_it_is_said() -> None:
    metadata = TritonMetadataBuilder(SPEC, torch.device("cpu")).build(step(64, 8192, 1024))
    assert metadata.describe() == (
        "decode kernel: 64 sequences (256 programs, tiles of 32 keys), "
        "shared prefix of 8192 keys attended once (128 programs, tiles of 64 keys)"
    )


def test_where_it_pays() -> None:
    """32 MB of keys and values, 4 KB a key, that are not loaded again."""
    assert length_of(step(64, 8192, 1024)) == 8192
    assert length_of(step(16, 1024, 512)) == 1024
    assert length_of(step(16, 512, 512)) == 0
    assert length_of(step(8, 1024, 64)) == 0 and length_of(step(16, 2048, 64)) == 2048
    assert length_of(step(1, 32768, 64)) == 0
    fp8 = SPEC.replace(kv_cache_dtype="fp8_e4m3")
    assert length_of(step(16, 1024, 512), fp8) == 0 and length_of(step(16, 2048, 512), fp8) == 2048
    few = SPEC.replace(num_heads=8, num_kv_heads=1)
    assert length_of(step(16, 1024, 512), few) == 0 and length_of(step(64, 2048, 512), few) == 2048
    # Rows of 16 tokens fill query blocks without being put together: nothing is loaded less often.
    assert length_of(step(64, 8192, 1024, tokens=16)) == 0 and length_of(step(64, 8192, 1024, tokens=2)) > 0


def test_where_it_cannot_be() -> None:
    common = step(64, 8192, 1024)
    assert length_of(common.replace(shared_prefix_len=0)) == 0
    for changes in ({"sliding_window": 4096}, {"has_alibi": True}, {"deterministic": True}, {"block_size": None}):
        assert length_of(common, SPEC.replace(**changes)) == 0, changes
    assert length_of(step(64, 8192, 1024, tokens=17)) == 0


def test_whole_blocks_that_every_token_sees() -> None:
    assert [cascade.whole_blocks(n, 1, 16) for n in (0, 15, 16, 31, 32)] == [0, 0, 16, 16, 32]
    assert [cascade.whole_blocks(n, 16, 16) for n in (0, 16, 30, 31, 47)] == [0, 0, 0, 16, 32]
    assert cascade.whole_blocks(16, 0, 16) == 16


def test_the_price_is_in_bytes() -> None:
    """The loads of 63 sequences less, 3 query blocks of 64 rows more."""
    shape: dict[str, Any] = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "head_dim_v": 128, "itemsize": 2}
    shape |= {"stored_itemsize": 2, "target": Target(132, 232448)}
    counts = {"alone": (64, 1, 9216), "prefix": (1, 64, 8192), "rest": (64, 1, 1024)}
    configs = {
        name: decode_config(num_seqs=seqs, max_query_len=tokens, max_seq_len=keys, **shape)
        for name, (seqs, tokens, keys) in counts.items()
    }
    assert {name: config.keys for name, config in configs.items()} == {
        "alone": 8 * 64 * 9216,
        "prefix": 8 * 4 * 8192,
        "rest": 8 * 64 * 1024,
    }
    saved = 8 * 60 * 8192
    assert cascade.pays(**configs, key_bytes=cascade.SAVED_BYTES // saved + 1)
    assert not cascade.pays(**configs, key_bytes=cascade.SAVED_BYTES // saved - 1)


def plan_of(metadata: AttentionMetadata) -> tuple[LaunchPlan, CascadeMetadata]:
    assert metadata.plan is not None and metadata.plan.cascade is not None
    return metadata.plan, metadata.plan.cascade


def test_what_the_calls_read_follows_the_step(always: None) -> None:
    common = step(3, 32, 20)  # tables of 4 blocks
    builder = TritonMetadataBuilder(SPEC, torch.device("cpu"))
    metadata = builder.build(common)
    assert read(metadata) == ([0, 3, 32], [20, 20, 20], [[2, 3], [6, 7], [10, 11]])
    common.seq_lens.copy_(torch.tensor([40, 33, 0]))
    common.query_start_loc.copy_(torch.tensor([0, 1, 2, 2]))
    common.block_table[1, 2:] = torch.tensor([20, 21])
    builder.device_update(metadata)
    assert read(metadata) == ([0, 2, 32], [8, 1, 0], [[2, 3], [20, 21], [10, 11]])


def read(metadata: AttentionMetadata) -> tuple[list[int], list[int], list[list[int]]]:
    """Head, lengths and what is true of the table."""
    _, shared = plan_of(metadata)
    (lens, table), first = shared.rest, shared.length // 16
    return shared.tensor[:3].tolist(), lens.tolist(), table[:, : table.shape[1] - first].tolist()


def test_the_workspace_is_large_enough_for_both(always: None) -> None:
    for common in (step(2, 8192, 16), step(64, 64, 8192), step(3, 64, 16, tokens=16)):
        spec = SPEC.replace(head_dim=64)
        plan, shared = plan_of(TritonMetadataBuilder(spec, torch.device("cpu")).build(common))
        cache = torch.zeros(1, 16, 8, 64, dtype=torch.float16)
        query = torch.zeros(common.num_tokens, 32, 64, dtype=torch.float16)
        tables = (common.block_table, common.query_start_loc, common.seq_lens)
        bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
        options = (None, None, None, None, query, None, 1.0, 1.0, (1, 0), 0.0)
        inputs = AttentionInputs(query, cache, cache, *tables, *options, *bounds)
        target = target_of(torch.device("cpu"))
        configs = [
            decode_config_of(shape_of(one), bounds_of(one), target, short=index > 0)
            for index, one in enumerate(shared.divide(inputs))
        ]
        (launch,) = plan.launches
        assert plan.prefix is not None
        planned = (plan.prefix.launches[0].config, launch.config)
        assert planned == tuple(configs), "planned otherwise than what is launched"
        assert plan.workspace is not None
        assert max(config.workspace for config in configs) == plan.workspace.numel()


def op_call(**options: Any) -> torch.Tensor:
    problem = make_problem(Case(**ONE, write=False), DEVICE)
    common, cache = problem.common, problem.cache
    assert cache is not None
    return ops.paged_attention(
        *(problem.query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens),
        **{"max_query_len": 1, "max_seq_len": 100, "scale": problem.spec.softmax_scale, "path": "triton", **options},
    )


def test_the_op_makes_a_plan_where_it_is_given_none(calls: list[tuple[int, int, int]]) -> None:
    plain = op_call()
    torch.testing.assert_close(op_call(shared_prefix_len=32), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(op_call(shared_prefix_len=16), plain, rtol=1e-5, atol=1e-6)
    assert calls == [(4, 100, 0), (1, 32, 0), (4, 100, 1), (1, 16, 0), (4, 100, 1)]
    assert torch.equal(op_call(shared_prefix_len=32, path="torch"), op_call(path="torch"))


def test_an_op_call_that_does_not_fit() -> None:
    for length in (17, -16):
        with pytest.raises(InvalidInputError, match="shared_prefix_len must be whole blocks of 16 keys"):
            op_call(shared_prefix_len=length)
