"""Every op passes torch's own checks: schema (what it mutates), fake tensors, dynamic shapes."""

from __future__ import annotations

import pytest
import torch

from pagedattn import ops


def _i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CACHE = torch.randn(6, 4, 2, 16)
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
CALLS = {
    "reshape_and_cache": (torch.randn(3, 2, 16), torch.randn(3, 2, 16), CACHE.clone(), CACHE.clone(),
                          torch.tensor([1, -1, 9]), "torch"),
    "compute_slot_mapping": (TABLE[None], [4], _i32(0, 3, 4), _i32(3, 5), torch.zeros(1, 6, dtype=torch.int64), None,
                             1, 0, 1, "torch"),
    "copy_blocks": ([CACHE.clone(), CACHE.clone()], torch.tensor([[0, 3]]), "torch"),
    "swap_blocks": (CACHE.clone(), CACHE.clone(), torch.tensor([[0, 3]]), "torch"),
    "gather_kv": (CACHE, TABLE, _i32(0, 3, 8), None, 8, "torch"),
    "merge_attn_states": (torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4), torch.empty(3, 4, 16), torch.empty(3, 4),
                          "torch"),
    "paged_attention": (torch.randn(4, 4, 16), CACHE, CACHE, TABLE, _i32(0, 3, 4), _i32(3, 5), None, None,
                        torch.empty(4, 4, 16), torch.empty(4, 4), 0.25, True, 0, 0.0, 3, 5, 0, "torch"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CALLS))
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.pagedattn, name).default, CALLS[name])


def test_every_op_is_checked() -> None:
    assert sorted(CALLS) == sorted(ops.__all__)
