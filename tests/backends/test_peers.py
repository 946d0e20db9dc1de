"""FlashAttention 2 and 3 themselves against the oracle, on a GPU; FlashInfer's twin is in test_flashinfer.py."""

from __future__ import annotations

import pytest
import torch
from backends.peers import DTYPES, FA2, FA3, Peer

from pagedattn import CommonAttentionMetadata, paged_attention
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
MUST_SERVE = {FA2: 126, FA3: 230}  # of each dtype, on a Hopper GPU


def cases(peer: Peer) -> list[Case]:
    """The suite's cases as `peer` can be asked them, each once."""
    return list(dict.fromkeys(peer.case(case).but(dtype=dtype) for case in CASES for dtype in DTYPES)) if GPU else []


ALL = [(peer, case) for peer in MUST_SERVE for case in cases(peer)]


@pytest.mark.parametrize(("peer", "case"), ALL, ids=[f"{p.name}-{c.id}-{c.dtype}" for p, c in ALL])
def test_conforms(peer: Peer, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    backend, device = peer.load(), torch.device("cuda")
    reasons = backend.rejections(case.spec(device))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    check(backend, make_problem(case, device), case.id)


@pytest.mark.parametrize("peer", MUST_SERVE, ids=lambda peer: peer.name)
def test_serves_all_it_must(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    if not peer.load().availability().ok:
        pytest.skip("FlashAttention is not installed")
    device = torch.device("cuda")
    served = [case for case in cases(peer) if not peer.load().rejections(case.spec(device))]
    assert len(served) >= MUST_SERVE[peer]


def test_a_neighbour_keeps_its_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed keys end inside a tile that also holds the next sequence's values; FA3 is refused without clean ones."""
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", FA2.version)
    if not FA2.load().availability().ok:
        pytest.skip("FlashAttention is not installed")
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = torch.randn(3, 140, 4, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
    common = CommonAttentionMetadata.from_lengths([70, 70], [70, 70], device="cuda")
    clean, _ = paged_attention(query, key, value, None, common, backend="FLASH_ATTN")
    value[70:] = torch.nan
    got, _ = paged_attention(query, key, value, None, common, backend="FLASH_ATTN")
    assert torch.equal(got[:70], clean[:70])
