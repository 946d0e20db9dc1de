"""TRITON's decode kernel for Hopper, over codes of 8 and 4 bits and 16-bit elements, against the oracle."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends.test_hopper import HERE

from pagedattn.backends.registry import get_backend
from pagedattn.kernels.decode_sm90 import plan
from pagedattn.ops import attention_plan
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.spec import AttentionType
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "heads": (8, 2), "head_dim": 128, "query_lens": (1,), "seq_lens": (1,)}
E4M3, E5M2, INT8, K8V4 = ({"kv_cache_dtype": name} for name in ("fp8_e4m3", "fp8_e5m2", "int8", "k8v4"))
INT4, TURBO, TURBO3, TURBO2, K4V3, K3V4 = (
    {"kv_cache_dtype": name, "block_size": 32}
    for name in ("int4", "turboquant4", "turboquant3", "turboquant2", "turboquant_k4v3", "turboquant_k3v4")
)
NATIVE = {
    "bf16": Case(**BF16),
    "bf16, eight heads a group, HND": Case(**BF16 | {"heads": (8, 1)}, layout="HND"),
    "bf16, three heads a group, blocks of 48, soft cap, ALiBi": Case(
        **BF16 | {"heads": (9, 3)}, block_size=48, softcap=9.0, alibi=True
    ),
    "fp16, 64, window, sinks": Case(
        **BF16 | {"dtype": torch.float16, "head_dim": 64}, sliding_window=70, sinks=0.5, block_size=32
    ),
    "bf16, 64, values of 128": Case(**BF16 | {"head_dim": 64}, head_dim_v=128),
    "bf16, queries beyond float16": Case(**BF16, magnitude=3e5, scale=1e-12),
}
KINDS = {
    **NATIVE,
    "e4m3": Case(**BF16 | E4M3),
    "e4m3, scales of heads, HND": Case(**BF16 | E4M3, kv_scale="head", layout="HND"),
    "e4m3, 256, eight heads a group": Case(**BF16 | E4M3 | {"heads": (8, 1), "head_dim": 256}, kv_scale="tensor"),
    "e4m3, three heads a group, blocks of 48": Case(**BF16 | E4M3 | {"heads": (9, 3)}, block_size=48, kv_scale="float"),
    "e5m2, window, soft cap, ALiBi": Case(**BF16 | E5M2, softcap=9.0, alibi=True, sliding_window=70),
    "e5m2, 64, soft cap, ALiBi": Case(**BF16 | E5M2 | {"head_dim": 64}, softcap=9.0, alibi=True),
    "int8": Case(**BF16 | INT8),
    "int8, fp16, window, sinks": Case(**BF16 | INT8 | {"dtype": torch.float16}, sliding_window=70, sinks=0.5),
    "int8, 64, values of 128, 16 heads a group, HND": Case(
        **BF16 | INT8 | {"heads": (16, 1), "head_dim": 64}, head_dim_v=128, layout="HND", block_size=32
    ),
    "e4m3, 96": Case(**BF16 | E4M3 | {"head_dim": 96}),
    "e5m2, 80, scales of heads, HND": Case(**BF16 | E5M2 | {"head_dim": 80}, kv_scale="head", layout="HND"),
    "int8, 72, values of 104": Case(**BF16 | INT8 | {"head_dim": 72}, head_dim_v=104, sliding_window=70),
    "int8, 192, eight heads a group": Case(**BF16 | INT8 | {"heads": (8, 1), "head_dim": 192}, sinks=0.5),
    "int8, 24 heads a group": Case(**BF16 | INT8 | {"heads": (24, 1)}),
    "int8, queries beyond float16": Case(**BF16 | INT8, magnitude=3e5, scale=1e-12),
    "int8, small values": Case(**BF16 | INT8, magnitude=1e-6, scale=1e11),
    "k8v4": Case(**BF16 | K8V4),
    "k8v4, fp16, 64, window, sinks, HND": Case(
        **BF16 | K8V4 | {"dtype": torch.float16, "head_dim": 64}, sliding_window=70, sinks=0.5, layout="HND"
    ),
    "k8v4, 256, eight heads a group, soft cap": Case(**BF16 | K8V4 | {"heads": (8, 1), "head_dim": 256}, softcap=9.0),
    "k8v4, 128, values of 64, 16 heads a group, ALiBi": Case(
        **BF16 | K8V4 | {"heads": (16, 1)}, head_dim_v=64, block_size=32, alibi=True
    ),
    "k8v4, 80, three heads a group": Case(**BF16 | K8V4 | {"heads": (9, 3), "head_dim": 80}, layout="HND"),
    "k8v4, 120, soft cap": Case(**BF16 | K8V4 | {"head_dim": 120}, softcap=9.0, sinks=0.5),
    "int4": Case(**BF16 | INT4),
    "int4, fp16, 64, HND": Case(**BF16 | INT4 | {"dtype": torch.float16, "head_dim": 64}, layout="HND"),
    "int4, 256, eight heads a group, blocks of 64": Case(
        **BF16 | INT4 | {"heads": (8, 1), "head_dim": 256, "block_size": 64}
    ),
    "int4, fp16, 96": Case(**BF16 | INT4 | {"dtype": torch.float16, "head_dim": 96}),
    "int4, 72, HND": Case(**BF16 | INT4 | {"head_dim": 72}, layout="HND"),
    "int4, soft cap, sinks": Case(**BF16 | INT4, softcap=9.0, sinks=0.5),
    "int4, queries beyond float16": Case(**BF16 | INT4, magnitude=3e3, scale=1e-8),
    "int4, the last 40 tokens in 16 bit": Case(**BF16 | INT4 | {"kv_cache_dtype": "int4:window=40:first=40"}),
    "turboquant4": Case(**BF16 | TURBO),
    "turboquant4, fp16, blocks of 16, HND": Case(
        **BF16 | TURBO | {"dtype": torch.float16, "block_size": 16}, layout="HND"
    ),
    "turboquant4, three heads a group": Case(**BF16 | TURBO | {"heads": (9, 3)}),
    "turboquant4, 80": Case(**BF16 | TURBO | {"head_dim": 80}),
    "turboquant4, fp16, 112, three heads a group, HND": Case(
        **BF16 | TURBO | {"dtype": torch.float16, "heads": (9, 3), "head_dim": 112}, layout="HND"
    ),
    "turboquant4, 192, values of 72": Case(**BF16 | TURBO | {"heads": (8, 1), "head_dim": 192}, head_dim_v=72),
    "turboquant4, 96, the last 64 tokens in 16 bit": Case(
        **BF16 | TURBO | {"kv_cache_dtype": "turboquant4:window=64", "head_dim": 96}
    ),
    "turboquant4, 64, window, sinks": Case(**BF16 | TURBO | {"head_dim": 64}, sliding_window=70, sinks=0.5),
    "turboquant4, 256, eight heads a group, ALiBi": Case(
        **BF16 | TURBO | {"heads": (8, 1), "head_dim": 256}, alibi=True
    ),
    "turboquant4, the last 64 tokens in 16 bit": Case(**BF16 | TURBO | {"kv_cache_dtype": "turboquant4:window=64"}),
    "turboquant3": Case(**BF16 | TURBO3),
    "turboquant3, 64, blocks of 16, HND, soft cap": Case(
        **BF16 | TURBO3 | {"head_dim": 64, "block_size": 16}, layout="HND", softcap=9.0
    ),
    "turboquant3, 256, eight heads a group": Case(**BF16 | TURBO3 | {"heads": (8, 1), "head_dim": 256}),
    "turboquant3, 64, values of 128, window": Case(
        **BF16 | TURBO3 | {"head_dim": 64}, head_dim_v=128, sliding_window=70
    ),
    "turboquant3, 96, blocks of 16": Case(**BF16 | TURBO3 | {"head_dim": 96, "block_size": 16}),
    "turboquant2, 80, HND": Case(**BF16 | TURBO2 | {"head_dim": 80}, layout="HND"),
    "turboquant_k4v3, fp16, sinks": Case(**BF16 | K4V3 | {"dtype": torch.float16}, sinks=0.5),
    "turboquant_k3v4, three heads a group, ALiBi, HND": Case(
        **BF16 | K3V4 | {"heads": (9, 3)}, alibi=True, layout="HND"
    ),
    "turboquant2, blocks of 16": Case(**BF16 | TURBO2 | {"block_size": 16}),
    "turboquant2, 64, three heads a group": Case(**BF16 | TURBO2 | {"heads": (9, 3), "head_dim": 64}),
    "turboquant2, 256, values of 64": Case(**BF16 | TURBO2 | {"heads": (8, 1), "head_dim": 256}, head_dim_v=64),
    "turboquant3, the last 64 tokens in 16 bit": Case(**BF16 | TURBO3 | {"kv_cache_dtype": "turboquant3:window=64"}),
}
OUTSIDE = (
    "e4m3",
    "e4m3, scales of heads, HND",
    "e4m3, 96",
    "int8",
    "int4, 72, HND",
    "int4",
    "turboquant4",
    "turboquant3",
)
LENS = [
    (1, 15, 16, 17, 63, 64, 65, 127, 500, 3000, 5),
    (20_000,),
    (0, 3, 0, 900, 130),
    tuple(37 * i % 700 + 1 for i in range(300)),
    tuple(53 * i % 1000 for i in range(130)),
]


def _block_rows(rows: int, case: Case) -> int:
    """Of a query block for so many rows of a sequence."""
    sizes = (8, 16, 32) if case.head_dim > 64 else (8, 16)
    return next((size for size in sizes if rows <= size), 64)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations it was launched with; 16-bit elements are served where another kernel would be faster too."""
    monkeypatch.setattr(plan, "is_faster", lambda *_, **__: True)
    family, made = import_module("pagedattn.kernels.decode_sm90.kernel"), []
    launch = family.launch

    def seen(config: Any, inputs: Any, workspace: torch.Tensor) -> None:
        launch(config, inputs, workspace)
        assert not workspace[: 3 * COUNTERS].any(), "a counter was not left as it was found"
        made.append(config)

    monkeypatch.setattr(family, "launch", seen)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind: str, launches: list[Any]) -> None:
    for lens in LENS:
        case = KINDS[kind].but(query_lens=(1,) * len(lens), seq_lens=lens)
        launches.clear()
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
        assert launches, f"{kind}, {lens}: another kernel served"


@pytest.mark.parametrize(
    "kind",
    [name for name, case in KINDS.items() if case.heads[0] // case.heads[1] <= 4 and name not in NATIVE],
)
def test_several_tokens(kind: str, launches: list[Any]) -> None:
    for queries, keys in (((3, 2, 4, 1), (3, 40, 1000, 64)), ((4,), (7000,)), ((2, 0, 1), (2, 9, 31))):
        case = KINDS[kind].but(query_lens=queries, seq_lens=keys)
        launches.clear()
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
        assert launches, f"{kind}, {queries}: another kernel served"


@pytest.mark.parametrize(
    "kind",
    [
        name
        for name, case in KINDS.items()
        if case.head_dim <= 128 and not case.head_dim_v and case.heads[0] < 16 and name not in NATIVE
    ],
)
def test_many_rows(kind: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 17 rows of tokens and heads of a group on."""
    monkeypatch.setattr(attention_plan, "handles_short_queries", lambda *_: False)
    case = KINDS[kind]
    group = case.heads[0] // case.heads[1]
    for queries, keys in (((8, 2, 0, 1, 5), (63, 40, 0, 64, 1000)), ((16, 9), (7000, 16)), ((7, 16, 3), (65, 130, 3))):
        launches.clear()
        several = case.but(query_lens=queries, seq_lens=keys)
        check(get_backend("TRITON"), make_problem(several, DEVICE), f"{kind}, {several.id}")
        assert launches, f"{kind}, {queries}: another kernel served"
        rows = max(queries) * group
        assert rows > 16 and launches[-1].rows == _block_rows(rows, case)


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("kind", ["e4m3", "int8", "k8v4", "int4", "turboquant4"])
def test_logits_that_outgrow_what_states_are_multiples_of(
    kind: str, tokens: int, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several tiles of most sequences, some of whose programs have one warp."""
    monkeypatch.setattr(attention_plan, "handles_short_queries", lambda *_: False)
    for count in (2, 200):
        lens = tuple(40 + 3 * i for i in range(count))
        case = KINDS[kind].but(query_lens=(tokens,) * count, seq_lens=lens, magnitude=4.0)
        launches.clear()
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {tokens} tokens, {count} sequences")
        assert launches


@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
@pytest.mark.parametrize(
    ("kind", "queries"),
    [("bf16", 1), ("bf16, eight heads a group, HND", 1)]
    + [(kind, queries) for queries in (1, 8, 9) for kind in OUTSIDE],
)
def test_blocks_outside_the_cache(
    kind: str, queries: int, bad: int, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys have no weight, whatever block 0 has, which is read in their place and is poisoned."""
    monkeypatch.setattr(attention_plan, "handles_short_queries", lambda *_: False)
    case = KINDS[kind].but(query_lens=(queries, queries, queries), seq_lens=(40, 700, 129), write=False)
    problem = make_problem(case, DEVICE)
    table = problem.common.block_table
    assert table is not None
    table[0, 0] = table[1, 3] = table[1, 20] = table[2, 1] = bad
    want, _ = problem.run(get_backend("TORCH"))
    assert want.isfinite().all() and (want.double().cpu() - problem.expected.cpu()).abs().max() > 1e-2
    got, _ = problem.run(get_backend("TRITON"))
    assert launches and launches[-1].rows == _block_rows(queries * case.heads[0] // case.heads[1], case)
    assert (got - want).abs().max() <= 1e-2 * want.abs().max()


def test_cross_attention(launches: list[Any]) -> None:
    lens = {"query_lens": (1, 2, 1), "seq_lens": (30, 170, 3)}
    case = Case(**BF16 | E4M3 | lens, attn_type=AttentionType.CROSS, write=False)
    check(get_backend("TRITON"), make_problem(case, DEVICE), "cross attention")
    assert launches


def test_more_sequences_than_programs_and_partial_states_in_two_levels(launches: list[Any]) -> None:
    for lens in ((100,) * 1500, (120_000, 40)):
        case = KINDS["e4m3"].but(query_lens=(1,) * len(lens), seq_lens=lens, heads=(2, 1), write=False)
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{len(lens)} sequences")
    assert len(launches) >= 2
