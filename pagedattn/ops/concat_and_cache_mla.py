"""concat_and_cache_mla: write new latent rows (MLA) into their slots of a paged cache."""

from __future__ import annotations

import torch

from ..formats.mla_rows.format import join
from ..runtime.op_registry import choose, load, refuse, register
from .reshape_and_cache import put_rows


def concat_and_cache_mla(
    latent: torch.Tensor, k_pe: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor, *, path: str = "auto"
) -> None:
    """Write [latent | k_pe] of token t to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Only the first len(slot_mapping) tokens are read: those past that are padding. Two tokens with one slot are
    undefined.

    Args:
        latent: [T', L], normalised. k_pe: [T', R], rotated; R may be 0. Last dimensions contiguous.
        rows: the cache [P, S, 1, L + R] of the same dtype, any strides but a contiguous last dimension.
        slot_mapping: [n] int64, n <= T'.

    Raises:
        InvalidInputError: shapes, dtypes, strides or devices that do not fit each other.
    """
    # No `expect` here: its texts would be made at every call, of every layer.
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        refuse("slot_mapping", "int64 [n]", slot_mapping)
    if rows.dim() != 4 or rows.shape[2] != 1 or rows.stride(3) != 1:
        refuse("rows", "[P, S, 1, L + R], last stride 1", rows)
    for name, part in (("latent", latent), ("k_pe", k_pe)):
        if part.dim() != 2 or part.dtype != rows.dtype or (part.stride(1) != 1 and part.shape[1] > 1):
            refuse(name, f"{rows.dtype} [T, *], last stride 1", part)
        if part.shape[0] < slot_mapping.shape[0]:
            refuse(name, f"at least {len(slot_mapping)} rows, one per slot", part)
        if not part.device == rows.device == slot_mapping.device:
            refuse(name, f"on {rows.device} as the cache", part)
    if latent.shape[1] + k_pe.shape[1] != rows.shape[3]:
        refuse("rows", f"[P, S, 1, {latent.shape[1]} + {k_pe.shape[1]}]", rows)
    _op(latent, k_pe, rows, slot_mapping, path)


def _run(latent: torch.Tensor, k_pe: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor, path: str) -> None:
    if slot_mapping.numel() == 0 or rows.numel() == 0:
        return
    slots, count = slot_mapping.contiguous(), len(slot_mapping)
    if choose(path, rows.device) == "triton":
        load("kernels.cache_write.latent_kernel").launch(latent, k_pe, rows, slots)
    else:
        put_rows(join(latent[:count], k_pe[:count]), rows, slots, rows.shape[1])


def _fake(*args: object) -> None:
    return None


_op = register(
    "concat_and_cache_mla(Tensor latent, Tensor k_pe, Tensor(a!) rows, Tensor slot_mapping, str path) -> ()",
    _run,
    _fake,
)
