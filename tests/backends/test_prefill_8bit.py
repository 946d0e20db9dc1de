"""TRITON's prefill kernel for Hopper over 8-bit caches against the oracle, on one."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from backends.test_hopper import FEW_BLOCKS, HERE, LENS
from backends.triton_kinds import KINDS, case_of_kind

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache
from pagedattn.backends.registry import get_backend
from pagedattn.kernels.prefill_sm90.plan import FOUR_BIT_DIM, WHOLE_HEAD_DIMS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)


def is_whole(case: Case) -> bool:
    """Whether heads are read in one part."""
    return case.head_dim in WHOLE_HEAD_DIMS and case.head_dim_v in (None, case.head_dim)


CASES = {
    f"{name}, {kind}": case_of_kind(kind).but(kv_cache_dtype=name, kv_scale=scale)
    for index, kind in enumerate(KINDS)
    for name, scale in (("fp8_e4m3", ("head", "float", "tensor")[index % 3]), ("fp8_e5m2", "tensor"))
    if is_whole(case_of_kind(kind)) and (name == "fp8_e4m3" or index % 3 == 0)
}
CASES |= {
    f"{name}, {kind}": case_of_kind(kind).but(kv_cache_dtype=name)
    for name in ("int8", "k8v4")
    for kind in KINDS
    if is_whole(case := case_of_kind(kind)) and case.block_size * 8 % case.head_dim == 0  # whose blocks are in slots
    if name == "int8" or case.head_dim == FOUR_BIT_DIM
}
CASES["int8, large rows"] = case_of_kind("plain").but(kv_cache_dtype="int8", magnitude=300.0, scale=1e-5)
CASES["int8, scales by slot"] = case_of_kind("plain").but(kv_cache_dtype="int8", scales_by_slot=True)
CASES["int8, a window in 16 bits"] = case_of_kind("plain").but(kv_cache_dtype="int8:window=64")
CASES["int4"] = case_of_kind("plain").but(kv_cache_dtype="int4", block_size=32)
CASES["int4, blocks of 128, soft cap"] = case_of_kind("plain").but(kv_cache_dtype="int4", block_size=128, softcap=9.0)
CASES["int4, fp16, first tokens, sinks"] = case_of_kind("plain").but(
    kv_cache_dtype="int4:first=160", block_size=32, dtype=torch.float16, sinks=0.5
)
CASES["e4m3, large rows"] = case_of_kind("plain").but(kv_cache_dtype="fp8_e4m3", magnitude=300.0, scale=1e-5)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that it served; none is over a copy, as `test_dequantised_prompts.py` has them."""
    monkeypatch.setattr("pagedattn.kernels.dequantise.plan.pays", lambda *_, **__: False)
    made: list[Any] = []
    family = import_module("pagedattn.kernels.prefill_sm90.codes_kernel")
    launch = family.launch

    def seen(inputs: Any, entries: torch.Tensor, pack: int, workspace: torch.Tensor | None) -> None:
        launch(inputs, entries, pack, workspace)
        assert not entries[0, :2].any(), "a counter was not left as it was found"
        made.append(inputs)

    monkeypatch.setattr(family, "launch", seen)
    return made


def agrees(case: Case, about: str, launches: list[Any]) -> None:
    launches.clear()
    check(get_backend("TRITON"), make_problem(case, DEVICE), f"{about}, {case.id}")
    assert launches or max(case.query_lens) <= 16, f"{about}: another kernel served"


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, launches: list[Any]) -> None:
    for queries, keys in LENS:
        agrees(CASES[name].but(query_lens=queries, seq_lens=keys), name, launches)
    case = CASES[name].but(query_lens=LENS[2][0], seq_lens=LENS[2][1], fused_qkv=True, padding_rows=5)
    agrees(case.but(share_blocks=not case.poison_behind), f"{name}, fused and padded", launches)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_few_query_blocks(name: str, launches: list[Any]) -> None:
    for queries, keys in FEW_BLOCKS:
        case = CASES[name].but(query_lens=queries, seq_lens=keys)
        if case.sliding_window:  # of so many keys that parts pay
            case = case.but(sliding_window=2030 + case.sliding_window)
        agrees(case, name, launches)


@pytest.mark.parametrize("order", [1, -1])
def test_values_of_many_sizes(order: int, launches: list[Any]) -> None:
    """Tokens whose values are 2**-60 to 2**60, growing or falling: a tile has a unit of its own."""
    keys, dim = 1500, 128
    sizes = torch.linspace(-60 * order, 60 * order, keys, device=DEVICE).round().exp2()[:, None, None]
    torch.manual_seed(0)
    query, key, value = (torch.randn(keys, heads, dim, device=DEVICE) for heads in (8, 2, 2))
    query, key, value = query.bfloat16(), key.bfloat16(), (value * sizes).bfloat16()
    cache = PagedKVCache(1, 100, 16, 2, dim, kv_cache_dtype="int8", dtype=torch.bfloat16, device=DEVICE).layer(0)
    table = torch.randperm(100, dtype=torch.int32, device=DEVICE)[None]
    outputs = []
    for backend in ("TRITON", "TORCH"):
        kinds: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": "int8", "device": DEVICE}
        layer = Attention(8, dim, 2, block_size=16, backend=backend, **kinds)
        common = CommonAttentionMetadata.from_lengths([keys], [keys], table)
        outputs.append(layer(query, key, value, cache, common).double())
    error = (outputs[0] - outputs[1]).abs().amax(-1) / outputs[1].abs().amax(-1)
    assert launches and float(error.max()) < 2**-6, float(error.max())


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_a_query_that_is_not_finite_has_no_number_as_output(name: str, launches: list[Any]) -> None:
    """And its neighbours have theirs."""
    tokens, dim = 100, 128
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, heads, dim, device=DEVICE).bfloat16() for heads in (8, 2, 2))
    query[40, 3, 17], query[60, 5, 0] = torch.nan, torch.inf
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": name, "device": DEVICE}
    cache = PagedKVCache(1, 7, 16, 2, dim, **kinds).layer(0)
    layer = Attention(8, dim, 2, block_size=16, backend="TRITON", **kinds)
    table = torch.randperm(7, dtype=torch.int32, device=DEVICE)[None]
    out = layer(query, key, value, cache, CommonAttentionMetadata.from_lengths([tokens], [tokens], table))
    lost = torch.zeros(tokens, 8, dtype=torch.bool, device=DEVICE)
    lost[40, 3] = lost[60, 5] = True
    assert launches and torch.equal(out.isnan().all(-1), lost) and torch.equal(out.isnan().any(-1), lost)


@pytest.mark.parametrize("stored", ["int4", "int4:first=40", "int8:window=64", "k8v4:window=64"])
def test_the_same_bits_in_every_chunking(stored: str, launches: list[Any]) -> None:
    """Where that is asked for, decodes included; of each chunk the last blocks are read as they came."""
    tokens, size = 700, 32
    torch.manual_seed(0)
    rows = [torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2)]
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": stored}
    layer = Attention(8, 128, 2, block_size=size, backend="TRITON", deterministic=True, device=DEVICE, **kinds)
    tables = [torch.randperm(-(-tokens // size), dtype=torch.int32, device=DEVICE)[None] for _ in range(2)]
    found = []
    for cuts in ((0, tokens), (0, 1, 40, 90, 400, tokens - 2, tokens - 1, tokens), (0, 333, 352, tokens)):
        shape = (1, -(-tokens // size), size, 2, 128)
        cache = PagedKVCache(*shape, device=DEVICE, recent_blocks=shape[1], **kinds).layer(0)
        outputs = []
        for first, last in pairwise(cuts):
            lens, second = ([last - first], [last]), {"recent_table": tables[1], "block_size": size}
            common = CommonAttentionMetadata.from_lengths(*lens, tables[0], **second)  # type: ignore[arg-type]
            outputs.append(layer(*(x[first:last] for x in rows), cache, common))
        found.append(torch.cat(outputs))
    assert launches and all(torch.equal(one, found[0]) for one in found)
