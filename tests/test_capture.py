"""Captured metadata rewritten for other steps, as a replay would read them; the kernels run eagerly here."""

from __future__ import annotations

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, plan_step
from pagedattn.backends.op_backend import OpMetadataBuilder
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError
from pagedattn.spec import GraphLevel
from pagedattn.testing import interpreted
from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_close
from pagedattn.testing.problem import make_problem

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
SIZE = {"heads": (4, 2), "block_size": 16}


def replayed(layer: Attention, captured: Case, case: Case) -> None:
    """Capture one step, rewrite it for another, and compare that one's attention with the oracle."""
    wide = torch.zeros(len(captured.seq_lens), 40, dtype=torch.int32)
    decodes = sum(1 for n in captured.query_lens if n == 1)
    bounds = {"num_decodes": decodes, "max_query_len": max(captured.query_lens), "max_seq_len": 600}
    first = CommonAttentionMetadata.from_lengths(captured.query_lens, captured.seq_lens, wide).replace(**bounds)
    static = plan_step([layer], first, capture=True)
    problem = make_problem(case)
    plan_step([layer], problem.common, into=static)
    rows = first.num_tokens
    query = torch.cat((problem.query, torch.zeros(rows - len(problem.query), *problem.query.shape[1:])))
    out = layer(query, None, None, problem.cache, static)
    assert_close("replayed", out[: len(problem.query)], problem.expected, problem.naive)


def mixed(*query_lens: int) -> Case:
    return Case(query_lens=query_lens, seq_lens=tuple(17 * i + 20 for i in range(len(query_lens))), write=False, **SIZE)


@pytest.mark.parametrize("queries", [(1, 12, 12, 9), (1, 1, 12, 9), (1, 1, 1, 12, 12, 12), (12, 9)])
def test_fewer_decodes_than_were_captured(queries: tuple[int, ...]) -> None:
    layer = Attention(4, 32, 2, backend="TRITON")
    replayed(layer, mixed(1, 1, 1, 12, 12, 12), mixed(*queries))


def test_two_backends_replay_what_they_captured() -> None:
    layer = Attention(4, 32, 2, backend="prefill=TRITON,decode=TRITON")
    assert layer.selection.name == "TRITON"
    first = CommonAttentionMetadata.from_lengths([1, 5], [20, 9], torch.zeros(2, 40, dtype=torch.int32))
    both = Attention(4, 32, 2, backend="prefill=TRITON,decode=TORCH")
    with pytest.raises(UnsupportedError, match="the backend states NEVER"):
        plan_step([both], first, capture=True)


def test_a_composite_replays_the_same_split_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpMetadataBuilder, "graph_level", GraphLevel.ALWAYS)
    layer = Attention(4, 32, 2, backend="prefill=TRITON,decode=TORCH")
    captured = mixed(1, 1, 12, 12)
    replayed(layer, captured, mixed(1, 1, 9, 12))
    replayed(layer, captured, mixed(1, 1, 9))
    with pytest.raises(CapacityError, match="a step of 2 decodes was captured, this one has 1"):
        replayed(layer, captured, mixed(1, 9, 9))
    replayed(layer, mixed(1, 1, 1, 1), Case(query_lens=(1, 1, 0, 0), seq_lens=(9, 40, 0, 0), write=False, **SIZE))
    static = plan_step([layer], CommonAttentionMetadata.from_lengths([1, 3], [1, 3]), capture=True)
    rows = torch.randn(4, 4, 32)
    with pytest.raises(UnsupportedError, match="capture without a KV cache takes a single backend"):
        layer(rows, rows[:, :2], rows[:, :2], None, static)


@pytest.mark.parametrize("backend", ["TRITON", "TORCH", "prefill=TRITON,decode=TORCH"])
def test_bounds_are_looked_at_in_every_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay makes no checks of its own."""
    monkeypatch.delenv("PAGEDATTN_CHECK", raising=False)
    monkeypatch.setattr(OpMetadataBuilder, "graph_level", GraphLevel.ALWAYS)
    layer, table = Attention(4, 32, 2, backend=backend), torch.zeros(2, 40, dtype=torch.int32)
    static = plan_step([layer], CommonAttentionMetadata.from_lengths([3, 3], [600, 600], table), capture=True)
    (built,) = static.by_key.values()
    step = CommonAttentionMetadata.from_lengths([3, 2], [20, 9], table)
    wrong: dict[str, dict[str, int]] = {"max_seq_len": {"max_seq_len": 19}, "max_query_len": {"max_query_len": 2}}
    wrong |= {"num_tokens": {"num_tokens": 4}, "num_decodes": {"num_decodes": 1}}
    if "," in backend:  # another split is refused for another reason
        del wrong["num_decodes"]
    for name, change in wrong.items():
        with pytest.raises(InvalidInputError, match=f"^{name} must be "):
            plan_step([layer], step.replace(**change), into=static)
    assert built.common.seq_lens.tolist() == [600, 600]
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    plan_step([layer], step.replace(max_seq_len=19), into=static)
    assert built.common.seq_lens.tolist() == [20, 9]
