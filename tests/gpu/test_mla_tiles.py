"""Latent attention on a GPU over any number of tiles, split and whole, with queries at strides of any alignment."""

from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.testing import attention_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
S, SCALE = 64, 192**-0.5
LENGTHS = {
    "one": (1,),
    "whole tiles": (64, 128, 192, 256, 320),
    "a key more": (65, 129, 193, 257, 321),
    "none between": (0, 63, 0, 129, 0),
    "one by all programs": (8192,),
    "more programs than tiles end": tuple(range(60, 100)),
    "equal, a range each": (300,) * 64,
    "equal, ranges of two": (190,) * 264,
    "equal, two ranges each": (4000,) * 33,
    "equal but for empty ones": (700,) * 65 + (0,),
    "ragged": (200, 3000, 70, 5000, 64, 1),
}


def step(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose slots that no sequence has are NaN, and the table, blocks in random order."""
    counts = [-(-max(length, 1) // S) for length in lengths]
    rows = torch.full((sum(counts) + 1, S, 1, 576), torch.nan)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    ids = iter((torch.randperm(sum(counts)) + 1).tolist())
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for at in range(count):
            table[seq, at] = block = next(ids)
            here = min(max(length - at * S, 0), S)
            rows[block, :here] = torch.randn(here, 1, 576)
    return rows.cuda().bfloat16(), table.cuda()


@pytest.mark.parametrize("more", [0, 8, 3])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("name", LENGTHS)
def test_any_number_of_tiles(name: str, heads: int, more: int) -> None:
    lengths = LENGTHS[name]
    rows, table = step(lengths)
    query = torch.randn(len(lengths), heads, 576 + more, device="cuda", dtype=torch.bfloat16)[..., :576]
    starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    seq_lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    lse = torch.empty(len(lengths), heads, device="cuda")
    bounds = {"latent_dim": 512, "max_query_len": 1, "max_seq_len": max(lengths), "scale": SCALE}
    for _ in range(2):
        out = ops.mla_decode(query, rows, table, starts, seq_lens, **bounds, lse=lse, path="triton")
        for seq, length in enumerate(lengths):
            if not length:
                assert not out[seq].any() and bool((lse[seq] == -torch.inf).all())
                continue
            seen = rows[table[seq].long()].flatten(0, 1)[:length]
            want, want_lse = attention_oracle(query[seq][None], seen, seen[..., :512], scale=SCALE)
            error = (out[seq].cpu().double() - want[0].cpu()).norm() / want[0].cpu().norm()
            assert error < 4e-3
            torch.testing.assert_close(lse[seq].cpu().double(), want_lse[0].cpu(), rtol=0, atol=1e-3)
