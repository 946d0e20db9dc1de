"""TORCH on the CPU: decodes by the extension and without it, prompts by torch's own kernel, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import random_work
import torch
from case_facets import facets
from covers import cover

from pagedattn.backends.registry import get_backend
from pagedattn.kernels.reference import cpu
from pagedattn.ops import paged_attention
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CALLS: list[str] = []


@pytest.fixture(params=["extension", "gathered"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gathered":
        monkeypatch.setattr(cpu, "_has_kernel", lambda inputs: False)
    elif cpu.choose("auto", torch.device("cpu"), "decode_attention") != "csrc":
        pytest.skip("the extension is not built")
    CALLS.clear()
    for name in ("_extension", "_gathered", "_prompt"):
        called: Callable[..., bool | None] = getattr(cpu, name)

        def counted(*args: Any, called: Callable[..., bool | None] = called, name: str = name) -> bool | None:
            CALLS.append(name)
            return called(*args)

        monkeypatch.setattr(cpu, name, counted)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kit_passes(dtype: torch.dtype, path: str) -> None:
    """With NaN wherever nothing is written, tables that point outside behind a sequence, and rows without keys."""
    served = dtype != torch.bfloat16  # by the extension: without it all is done as where there is none
    few = [CASES[index] for index in cover([*map(facets, CASES)])]
    for case in CASES if random_work.everything else few:
        check(get_backend("TORCH"), make_problem(case.but(dtype=dtype, lse=False)), case.id)
    decodes = "_extension" if path == "extension" and served else "_gathered"
    assert {"_prompt", decodes} == {*CALLS}


def call(lens: list[int], **changes: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    draw = torch.Generator().manual_seed(len(lens))
    count, longest = len(lens), max(lens)
    arguments: dict[str, Any] = {
        "query": torch.randn(count, 6, 20, generator=draw),
        "key": torch.randn(90, 8, 2, 20, generator=draw),
        "value": torch.randn(90, 8, 2, 12, generator=draw),
        "block_table": torch.randint(0, 90, (count, -(-longest // 8)), generator=draw, dtype=torch.int32),
        "query_start_loc": torch.arange(count + 1, dtype=torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "max_query_len": 1,
        "max_seq_len": longest,
        "scale": 0.3,
        "num_decodes": count,
        **changes,
    }
    return paged_attention(**arguments, path="torch"), arguments


@pytest.mark.parametrize("lens", [[1, 700, 3, 8, 9, 350, 351], [0, 5, 0], [64] * 3], ids=str)
def test_lengths_of_any_kind(lens: list[int], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, arguments = call(lens)
    strided = arguments["key"].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(call(lens, key=strided)[0], got)
    monkeypatch.setattr(cpu, "serves", lambda inputs: False)
    wanted, _ = call(lens)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert {*CALLS} <= {f"_{path}"}


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_a_whole_prompt_whatever_the_scale(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own causal mask is multiplied with the scale."""
    prompt = {"query_start_loc": torch.tensor([0, 5], dtype=torch.int32), "query": torch.randn(5, 6, 20)}
    prompt["value"] = torch.randn(90, 8, 2, 20)  # as wide as keys: else torch takes a slower kernel, which is right
    bounds = {"max_query_len": 5, "num_decodes": 0, "scale": scale}
    got, _ = call([5], **prompt, **bounds)
    monkeypatch.setattr(cpu, "serves", lambda inputs: False)
    torch.testing.assert_close(got, call([5], **prompt, **bounds)[0])


@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 1, 2]], ids=["decodes", "prompts"])
def test_a_number_scales_the_values_of_a_plain_cache(queries: list[int], path: str) -> None:
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    step: dict[str, Any] = {"query": torch.randn(sum(queries), 6, 20), "query_start_loc": starts}
    step |= {"max_query_len": max(queries), "num_decodes": 0}
    plain, _ = call([40, 5, 9], **step)
    assert torch.equal(call([40, 5, 9], **step, v_scale=2.0)[0], 2 * plain)
    assert {*CALLS} == ({f"_{path}"} if max(queries) == 1 else {f"_{path}", "_prompt"})


def test_a_block_outside_the_cache_is_left_to_the_masks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.tensor([[3, 90], [4, -1]], dtype=torch.int32)
    got, _ = call([13, 14], block_table=table)
    assert CALLS == (["_extension"] if path == "extension" else [])
    monkeypatch.setattr(cpu, "serves", lambda inputs: False)
    assert torch.equal(call([13, 14], block_table=table)[0], got)
