"""Which of the library's backends serves inside vLLM, and why it refuses a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import AttentionSpec, AttentionType, env, select_backend
from ...errors import InvalidInputError, NoBackendError

TYPES = {
    "decoder": AttentionType.DECODER,
    "encoder_only": AttentionType.ENCODER_ONLY,
    "encoder_decoder": AttentionType.CROSS,
}
# Names of vLLM for caches of eight bits, and how it keeps them: as bytes.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# And for one of int8 with a scale of each token and head, which releases offer that let a backend lay out rows.
INT8 = "int8_per_token_head"
_ALIGNED = 16  # bytes that a row begins at, so that kernels read it in vectors
_SAME_DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_SERVING = ("TRITON", "TORCH")


def serving_backend() -> str:
    """TRITON, or TORCH where there is no GPU or PAGEDATTN_BACKEND asks for it.

    Raises:
        InvalidInputError: PAGEDATTN_BACKEND names another one. Those plan on the host, with lengths that vLLM does not
            tell, or cannot be captured over its tensors.
    """
    asked = env.backend()
    if asked is None:
        return "TRITON" if torch.cuda.is_available() else "TORCH"
    if asked.upper() not in _SERVING:
        remedy = "unset it, or let vLLM run its own backend of that name"
        raise InvalidInputError("PAGEDATTN_BACKEND", "TRITON or TORCH inside vLLM", asked, remedy)
    return asked.upper()


def stored_as(kv_cache_dtype: str) -> dict[str, Any]:
    """Of a spec or layer whose cache vLLM calls so; scales of fp8 come with each call."""
    if kv_cache_dtype == INT8:
        return {"kv_cache_dtype": "int8"}
    return {"kv_cache_dtype": kv_cache_dtype, "kv_scale": "tensor"} if kv_cache_dtype in FP8 else {}


_ROPE_DIM = 64  # of every model with latent attention so far; vLLM asks about whole rows


def capability_of(device_capability: Any) -> tuple[int, int] | None:
    """What vLLM says of the GPU, as a pair; None without one."""
    if device_capability is None or not torch.cuda.is_available():
        return None
    return device_capability.major, device_capability.minor


def latent_spec(num_heads: int, row: int, latent_dim: int, scale: float, dtype: torch.dtype) -> AttentionSpec:
    """Of absorbed latent attention over rows of `row` elements, on the current GPU where there is one."""
    place = _place(torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    return AttentionSpec(num_heads=num_heads, head_dim=row, latent_dim=latent_dim, scale=scale, dtype=dtype, **place)


def _place(capability: tuple[int, int] | None) -> dict[str, Any]:
    return {"device_type": "cuda", "capability": capability} if capability else {"device_type": "cpu"}


def int8_scales_at(head_size: int) -> int:
    """Where in the bytes of an int8 row [K | V] the float32 scales of K and of V are."""
    return -(-2 * head_size // _ALIGNED) * _ALIGNED


def int8_row_bytes(head_size: int) -> int:
    """Of a token and head: codes of K and of V, then both scales."""
    return int8_scales_at(head_size) + _ALIGNED


def why_not(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    has_sink: bool,
    capability: tuple[int, int] | None,
) -> str | None:
    """Every reason why a model of such layers is refused; None where it is not."""
    asked = {"head_dim": head_size, "has_sinks": has_sink, **stored_as(kv_cache_dtype or "auto")}
    return _why_not(dtype, kv_cache_dtype, capability, asked)


def why_not_latent(
    row: int, dtype: torch.dtype, kv_cache_dtype: str | None, capability: tuple[int, int] | None
) -> str | None:
    """As `why_not`, of latent attention over rows of `row` elements in the model's dtype."""
    asked = {"head_dim": row, "latent_dim": row - _ROPE_DIM, "scale": 1.0}
    return _why_not(dtype, kv_cache_dtype, capability, asked)


def _why_not(
    dtype: torch.dtype, kv_cache_dtype: str | None, capability: tuple[int, int] | None, asked: Mapping[str, Any]
) -> str | None:
    stored = kv_cache_dtype or "auto"
    if _SAME_DTYPE.get(stored, dtype) != dtype:
        return f"a {stored} cache needs queries of {stored}, not {str(dtype).removeprefix('torch.')}"
    try:
        select_backend(AttentionSpec(num_heads=1, dtype=dtype, **asked, **_place(capability)), serving_backend())
    except (InvalidInputError, NoBackendError) as error:
        return str(error)
    return None
