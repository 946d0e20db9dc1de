"""TRITON's prompts over a copy of a quantised cache against the oracle, on a Hopper GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends.test_hopper import HERE

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache
from pagedattn.backends.registry import get_backend
from pagedattn.kernels.dequantise import kernel
from pagedattn.kernels.dequantise.plan import width
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "heads": (8, 2), "head_dim": 128, "query_lens": (1,), "seq_lens": (1,)}
FP16 = BF16 | {"dtype": torch.float16}
KINDS = {
    "int8": Case(**BF16, kv_cache_dtype="int8"),
    "int8, fp16, 256, soft cap": Case(**FP16 | {"head_dim": 256}, kv_cache_dtype="int8", softcap=9.0),
    "int8, 64, window, sinks, HND": Case(
        **BF16 | {"head_dim": 64}, kv_cache_dtype="int8", sliding_window=900, sinks=0.5, layout="HND"
    ),
    "int8, blocks of 24": Case(**BF16, kv_cache_dtype="int8", block_size=24),
    "k8v4": Case(**BF16, kv_cache_dtype="k8v4"),
    "k8v4, fp16, 64, three heads a group": Case(**FP16 | {"heads": (9, 3), "head_dim": 64}, kv_cache_dtype="k8v4"),
    "k8v4, 256, blocks of 64": Case(**BF16 | {"head_dim": 256}, kv_cache_dtype="k8v4", block_size=64),
    "int4": Case(**BF16, kv_cache_dtype="int4", block_size=32),
    "int4, fp16, 64, soft cap, HND": Case(
        **FP16 | {"head_dim": 64}, kv_cache_dtype="int4", block_size=64, softcap=9.0, layout="HND"
    ),
    "int4, 256, sinks, a window": Case(
        **BF16 | {"head_dim": 256}, kv_cache_dtype="int4:window=40", block_size=32, sinks=0.5
    ),
    "int4, logits below float32's numbers": Case(
        **BF16, kv_cache_dtype="int4", block_size=32, magnitude=1e-4, scale=1e-33
    ),
    "int4, first tokens": Case(**BF16, kv_cache_dtype="int4:first=160", block_size=32),
    "e4m3, scales of heads": Case(**BF16, kv_cache_dtype="fp8_e4m3", kv_scale="head"),
    "e4m3, fp16, a number as scale": Case(**FP16, kv_cache_dtype="fp8_e4m3", kv_scale="float"),
    "e5m2, fp16": Case(**FP16, kv_cache_dtype="fp8_e5m2", kv_scale="tensor"),
    "turboquant4": Case(**BF16, kv_cache_dtype="turboquant4"),
    "turboquant4, blocks of 8": Case(**BF16, kv_cache_dtype="turboquant4", block_size=8),
    "turboquant4, a window": Case(**BF16, kv_cache_dtype="turboquant4:window=64", block_size=32),
    "k4v3, fp16, 64, sinks, HND": Case(
        **FP16 | {"head_dim": 64}, kv_cache_dtype="turboquant_k4v3", sinks=0.5, layout="HND"
    ),
    "k3v4, not causal, seven heads a group": Case(
        **BF16 | {"heads": (14, 2)}, kv_cache_dtype="turboquant_k3v4", causal=False, block_size=64
    ),
    "turboquant2, 256, soft cap": Case(**BF16 | {"head_dim": 256}, kv_cache_dtype="turboquant2", softcap=9.0),
    "int8, 80": Case(**BF16 | {"head_dim": 80}, kv_cache_dtype="int8"),
    "e4m3, 96, sinks": Case(**BF16 | {"head_dim": 96}, kv_cache_dtype="fp8_e4m3", kv_scale="head", sinks=0.5),
    "k8v4, 192 and 128": Case(**BF16 | {"head_dim": 192, "head_dim_v": 128}, kv_cache_dtype="k8v4"),
    "int4, fp16, 80, HND": Case(**FP16 | {"head_dim": 80}, kv_cache_dtype="int4", block_size=32, layout="HND"),
    "turboquant4, 80": Case(**BF16 | {"head_dim": 80}, kv_cache_dtype="turboquant4"),
    "turboquant3, fp16, 160": Case(**FP16 | {"head_dim": 160}, kv_cache_dtype="turboquant3"),
    "turboquant4, large rows": Case(**BF16, kv_cache_dtype="turboquant4", magnitude=300.0, scale=1e-6),
}
LENS = [((400, 350, 500), (400, 1000, 513)), ((1, 1, 700, 30), (300, 2000, 700, 1500)), ((3000,), (3000,))]


def copies(monkeypatch: pytest.MonkeyPatch) -> list[AttentionInputs]:
    """The calls whose caches are copied from now on, over what was NaN before."""
    made, launch = list[AttentionInputs](), kernel.launch

    def seen(inputs: AttentionInputs, tile: int, before: AttentionInputs | None = None) -> AttentionInputs:
        made.append(inputs)
        if before is None:
            before = launch(inputs, tile)
            for plane in (before.key, before.value, before.k_scale_cache):
                if plane is not None:
                    plane.fill_(torch.nan)
        return launch(inputs, tile, before)

    monkeypatch.setattr(kernel, "launch", seen)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    for queries, keys in LENS:
        case = KINDS[kind].but(query_lens=queries, seq_lens=keys)
        made.clear()
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
        assert made, f"{kind}, {queries}: read as stored"


@pytest.mark.parametrize(
    "kind",
    [
        *("int8, 64, window, sinks, HND", "k8v4, fp16, 64, three heads a group", "e4m3, scales of heads"),
        "k4v3, fp16, 64, sinks, HND",
    ],
)
@pytest.mark.parametrize("lens", [((400, 350, 500), (400, 1000, 513)), ((1, 1, 700, 30), (300, 2000, 700, 1500))])
def test_in_turns_of_one_kv_head(kind: str, lens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = KINDS[kind].but(query_lens=lens[0], seq_lens=lens[1])
    problem = make_problem(case, DEVICE)
    plan = import_module("pagedattn.kernels.dequantise.plan")
    rows = sum(length > 1 for length in case.query_lens) * -(-max(case.seq_lens) // 16) * 16
    monkeypatch.setattr(plan, "MOST_BYTES", rows * 6 * case.head_dim)  # of one and a half
    made = copies(monkeypatch)
    check(get_backend("TRITON"), problem, f"{kind}, {case.id}")
    assert made and {one.key.shape[2] for one in made} == {1}


@pytest.mark.parametrize(
    "kind",
    [
        "k8v4",
        "k8v4, fp16, 64, three heads a group",
        "int4",
        "int4, 256, sinks, a window",
        "turboquant4, large rows",
        "turboquant4, 80",
    ],
)
@pytest.mark.parametrize("lens", LENS)
def test_in_passes_over_keys(kind: str, lens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a copy has no room for one head: a third of the longest prompt's keys at a time, in whole tiles."""
    case = KINDS[kind].but(query_lens=lens[0], seq_lens=lens[1])
    problem = make_problem(case, DEVICE)
    plan = import_module("pagedattn.kernels.dequantise.plan")
    prompts = [seq for new, seq in zip(case.query_lens, case.seq_lens, strict=True) if new > 1]
    keys = -(-max(prompts) // (3 * 128)) * 128
    monkeypatch.setattr(plan, "MOST_BYTES", len(prompts) * keys * 4 * width(case.head_dim, case.head_dim))
    starts = copies(monkeypatch)
    check(get_backend("TRITON"), problem, f"{kind}, {case.id}")
    found = [one.block_table for one in starts if one.block_table is not None]
    tables = {table.storage_offset() % table.stride(0) for table in found}
    assert len(tables) == -(-max(prompts) // keys) > 1


@pytest.mark.parametrize("first", [-90, -10])
@pytest.mark.parametrize(
    ("stored", "dim", "largest"), [("int8", 128, 2.0**18), ("turboquant4", 64, 1.0), ("k8v4", 256, 2.0**18)]
)
def test_queries_of_many_sizes(
    stored: str, dim: int, largest: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 2**first to 2**(first + 100), some with an element 2**18 times the others, which float16 must have
    nonetheless: keys are 0 there. And two rows that are not finite, whose neighbours have their outputs."""
    made, tokens = copies(monkeypatch), 600
    torch.manual_seed(0)
    sizes = torch.linspace(first, first + 100, tokens, device=DEVICE).round().exp2()[:, None, None]
    query, key, value = (torch.randn(tokens, heads, dim, device=DEVICE) for heads in (8, 2, 2))
    query[..., 0] *= largest
    key[..., 0] *= largest == 1
    rows = [(query * sizes).bfloat16(), key.bfloat16(), value.bfloat16()]
    rows[0][40, 3, 17], rows[0][70, 5, 1] = torch.nan, torch.inf
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": stored, "device": DEVICE}
    blocks = -(-tokens // 32)
    cache = PagedKVCache(1, blocks, 32, 2, dim, **kinds).layer(0)
    table = torch.randperm(blocks, dtype=torch.int32, device=DEVICE)[None]
    common, outputs = CommonAttentionMetadata.from_lengths([tokens], [tokens], table, block_size=32), []
    for backend in ("TRITON", "TORCH"):
        kinds["scale"] = dim**-0.5 * 2.0 ** (-96 - first)  # logits of the largest rows are some 60
        layer = Attention(8, dim, 2, block_size=32, backend=backend, **kinds)
        outputs.append(layer(*rows, cache, common).double())
    lost = torch.zeros(tokens, 8, dtype=torch.bool, device=DEVICE)
    lost[40, 3] = lost[70, 5] = True
    assert made and torch.equal(outputs[0].isnan().all(-1), lost) and torch.equal(outputs[0].isnan().any(-1), lost)
    got, want = (out[~lost] for out in outputs)
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert float(error.max()) < 2**-6, float(error.max())
