"""Every op passes torch's own checks: schema (what it mutates), fake tensors, dynamic shapes."""

from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.runtime import op_registry


def _i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _planes() -> tuple[torch.Tensor, ...]:
    """Of int4."""
    codes = (torch.zeros(4, 32, 1, 8, dtype=torch.uint8) for _ in range(2))
    scales = (torch.zeros(4, 1, 1, 32, dtype=torch.float16), torch.zeros(4, 32, 1, 1))
    return tuple(plane[None] for plane in (*codes, *scales))


CACHE = torch.randn(6, 4, 2, 16)
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
CALLS = {
    "reshape_and_cache": (torch.randn(3, 2, 16), torch.randn(3, 2, 16), CACHE.clone(), CACHE.clone(),
                          torch.tensor([1, -1, 9]), None, None, 1.0, 1.0, None, None, "auto", "torch"),
    "reshape_and_cache_classic": (torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.randn(6, 2, 4, 4, 4),
                                  torch.randn(6, 2, 16, 4), torch.tensor([1, -1, 9]), "torch"),
    "compute_slot_mapping": (TABLE[None], [4], _i32(0, 3, 4), _i32(3, 5), torch.zeros(1, 6, dtype=torch.int64), None,
                             1, 0, 1, "torch"),
    "concat_and_cache_mla": (torch.randn(3, 12), torch.randn(3, 4), CACHE[:, :, :1].clone(), torch.tensor([1, -1, 9]),
                             None, 1.0, "torch"),
    "copy_blocks": ([CACHE.clone(), CACHE.clone()], torch.tensor([[0, 3]]), "torch"),
    "seal_blocks": (torch.randn(1, 3, 32, 1, 16), torch.randn(1, 3, 32, 1, 16), _i32(1, 2)[None], *_planes(),
                    _i32(3, 1)[None], _i32(0, 33), _i32(64), 33, "int4", "torch"),
    "swap_blocks": (CACHE.clone(), CACHE.clone(), torch.tensor([[0, 3]]), "torch"),
    "gather_kv": (CACHE, TABLE, _i32(0, 3, 8), None, 8, "torch"),
    "merge_attn_states": (torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4), torch.empty(3, 4, 16), torch.empty(3, 4),
                          "torch"),
    "mla_decode": (torch.randn(4, 4, 16), CACHE[:, :, :1].clone(), TABLE, _i32(0, 3, 4), _i32(3, 5), None,
                   torch.empty(4, 4, 12), torch.empty(4, 4), 0.25, 1.0, [1, 0], 0.0, 3, 5, None, "torch"),
    "paged_attention": (torch.randn(4, 4, 16), CACHE, CACHE, TABLE, _i32(0, 3, 4), _i32(3, 5), None, None, None, None,
                        torch.empty(4, 4, 16), torch.empty(4, 4), 0.25, 1.0, [1, 0], 0.0, 3, 5, 0, False,
                        None, None, "auto", False, None, None, None, None, 0, "torch"),
}  # fmt: skip


CSRC = ("reshape_and_cache", "reshape_and_cache_classic", "copy_blocks", "swap_blocks", "gather_kv")


@pytest.mark.parametrize("name", sorted(CALLS))
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.pagedattn, name).default, CALLS[name])


@pytest.mark.parametrize("name", CSRC)
def test_opcheck_of_the_extension(name: str) -> None:
    if op_registry.path_of(name, "cpu") != "csrc":
        pytest.skip(op_registry.csrc_status())
    torch.library.opcheck(getattr(torch.ops.pagedattn, name).default, (*CALLS[name][:-1], "csrc"))


@pytest.mark.parametrize("path", ["csrc", "torch"])
def test_opcheck_of_fp8_writes(path: str) -> None:
    if path == "csrc" and op_registry.path_of("reshape_and_cache", "cpu") != "csrc":
        pytest.skip(op_registry.csrc_status())
    rows, slots, scale = torch.randn(3, 2, 16), torch.tensor([1, -1, 9]), torch.ones(2)
    caches = [CACHE.to(torch.float8_e4m3fn) for _ in range(2)]
    call = (rows, rows.clone(), *caches, slots, scale, None, 1.0, 0.5, None, None, "auto", path)
    # Without test_schema, which multiplies what was mutated: torch has no multiplication of fp8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.pagedattn.reshape_and_cache.default, call, test_utils=checks)


def test_every_op_is_checked() -> None:
    assert sorted(CALLS) == sorted({*ops.__all__} - {"path_of", "from_classic_layout"})
