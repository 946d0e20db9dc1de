"""concat_and_cache_mla: write new latent rows (MLA) into their slots of a paged cache."""

from __future__ import annotations

import torch

from ..formats.fp8.format import E4M3
from ..formats.mla_rows import deepseek
from ..formats.mla_rows.format import join
from ..runtime.op_registry import choose, csrc_op, load, refuse, register
from .reshape_and_cache import WIDE, put_encoded, put_rows, split_scale

_CODES = (torch.float8_e4m3fn, torch.uint8)  # of rows that are not of the parts' dtype


def concat_and_cache_mla(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    path: str = "auto",
) -> None:
    """Write [latent | k_pe] of token t to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Only the first len(slot_mapping) tokens are read: those past that are padding. Two tokens with one slot are
    undefined. Rows of e4m3 are stored as keys are by `reshape_and_cache`: element / k_scale, rounded to nearest even
    and saturated at +-448; NaN stays NaN. Rows of bytes are those of `fp8_ds_mla` (`formats/mla_rows/deepseek.py`).

    Args:
        latent: [T', L], normalised. k_pe: [T', R], rotated; R may be 0. Last dimensions contiguous.
        rows: the cache [P, S, 1, L + R] of the same dtype or of e4m3, or uint8 [P, S, 1, 656] of 512 + 64; any strides
            but a contiguous last dimension.
        slot_mapping: [n] int64, n <= T'.
        k_scale: of e4m3 rows, of both parts: None for 1, a positive float, or float32 [1] on the cache's device.

    Raises:
        InvalidInputError: shapes, dtypes, strides, devices or a scale that do not fit each other.
    """
    # No `expect` here: its texts would be made at every call, of every layer.
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        refuse("slot_mapping", "int64 [n]", slot_mapping)
    if rows.dim() != 4 or rows.shape[2] != 1 or rows.stride(3) != 1:
        refuse("rows", "[P, S, 1, L + R], last stride 1", rows)
    coded = rows.dtype in _CODES
    if coded and latent.dtype == k_pe.dtype == torch.float64:  # codes keep no such digits
        latent, k_pe = latent.float(), k_pe.float()
    dtype = latent.dtype if coded and latent.dtype in WIDE else rows.dtype
    for name, part in (("latent", latent), ("k_pe", k_pe)):
        if part.dim() != 2 or part.dtype != dtype or (part.stride(1) != 1 and part.shape[1] > 1):
            refuse(name, f"{dtype} [T, *], last stride 1", part)
        if part.shape[0] < slot_mapping.shape[0]:
            refuse(name, f"at least {len(slot_mapping)} rows, one per slot", part)
        if not part.device == rows.device == slot_mapping.device:
            refuse(name, f"on {rows.device} as the cache", part)
    if rows.dtype == torch.uint8:
        _check_deepseek(latent, k_pe, rows)
    elif latent.shape[1] + k_pe.shape[1] != rows.shape[3]:
        refuse("rows", f"[P, S, 1, {latent.shape[1]} + {k_pe.shape[1]}]", rows)
    _op(latent, k_pe, rows, slot_mapping, *split_scale(k_scale, latent, rows, "k_scale"), path)


def _check_deepseek(latent: torch.Tensor, k_pe: torch.Tensor, rows: torch.Tensor) -> None:
    for name, part, width in (("latent", latent, deepseek.LATENT), ("k_pe", k_pe, deepseek.ROPE)):
        if part.shape[1] != width:
            refuse(name, f"[T, {width}] for rows of {deepseek.NAME}", part)
    if rows.shape[3] != deepseek.ROW_BYTES or not deepseek.is_aligned(rows):
        refuse("rows", f"[P, S, 1, {deepseek.ROW_BYTES}], each row at 4 bytes, for rows of bytes", rows)


def _run(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_scale_value: float,
    path: str,
) -> None:
    if slot_mapping.numel() == 0 or rows.numel() == 0:
        return
    slots, count = slot_mapping.contiguous(), len(slot_mapping)
    # Rows of bytes have scales in them, which the extension does not compute.
    chosen = choose(path, rows.device, "" if rows.dtype == torch.uint8 else "concat_and_cache_mla")
    if chosen == "triton":
        load("kernels.cache_write.latent_kernel").launch(latent, k_pe, rows, slots, k_scale, k_scale_value)
    elif chosen == "csrc":
        # What writes keys and values writes two parts of a row: both caches are views of the rows.
        parts, width = (latent[:, None], k_pe[:, None] if k_pe.shape[1] else None), latent.shape[1]
        caches = rows[..., :width], rows[..., width:] if k_pe.shape[1] else None
        csrc_op("reshape_and_cache")(*parts, *caches, slots, k_scale, k_scale, k_scale_value, k_scale_value)
    elif rows.dtype == torch.uint8:
        put_rows(deepseek.encode(join(latent[:count], k_pe[:count])), rows, slots, rows.shape[1])
    else:
        put_encoded(join(latent[:count], k_pe[:count]), rows, None, slots, k_scale, k_scale_value, E4M3.key)


def _fake(*args: object) -> None:
    return None


_op = register(
    "concat_and_cache_mla(Tensor latent, Tensor k_pe, Tensor(a!) rows, Tensor slot_mapping, Tensor? k_scale, "
    "float k_scale_value, str path) -> ()",
    _run,
    _fake,
)
