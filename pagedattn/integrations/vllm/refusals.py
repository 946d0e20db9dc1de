"""Why vLLM's own questions refuse a layer, in the form of the library's rejections: asked, served, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Refusal(NamedTuple):
    """asked: the argument of vLLM's question that holds what was asked for."""

    feature: str
    asked: str
    served: str
    hint: str


_OTHER = "start vLLM with another attention backend"
# By vLLM's text. That on block sizes stays vLLM's: its platform compares it, to warn of a block size that excludes a
# faster backend. What is not here, or is said in other words by a later release, stays as vLLM says it too.
_REFUSALS = {
    "kv_cache_dtype not supported": _Refusal(
        "kv_cache_dtype",
        "kv_cache_dtype",
        "auto, the model's dtype, fp8, fp8_e5m2, and int8_per_token_head with vLLM 0.33",
        "pass --kv-cache-dtype auto or fp8",
    ),
    "dtype not supported": _Refusal("dtype", "dtype", "float16, bfloat16, float32", "pass --dtype auto"),
    "DCP not supported": _Refusal(
        "decode context parallelism", "use_dcp", "one rank for all keys", "pass --decode-context-parallel-size 1"
    ),
    "PCP not supported": _Refusal(
        "prefill context parallelism", "use_pcp", "one rank for all keys", "pass --prefill-context-parallel-size 1"
    ),
    "MLA not supported": _Refusal("MLA", "use_mla", "keys and values of heads", _OTHER),
    "sparse not supported": _Refusal("sparse attention", "use_sparse", "all keys that a mask leaves", _OTHER),
    "per-head quant scales not supported": _Refusal(
        "scales per head", "use_per_head_quant_scales", "a scale of a layer's keys and one of its values", _OTHER
    ),
}

_LATENT = {
    "kv_cache_dtype not supported": _Refusal(
        "kv_cache_dtype",
        "kv_cache_dtype",
        "rows of latent attention in the model's dtype",
        "pass --kv-cache-dtype auto",
    )
}


def explained(reason: str, asked: Mapping[str, Any]) -> str:
    """A reason of vLLM's with what was asked for, what is served, and what to do; as it is where that is not known.

    Args:
        asked: the arguments of `validate_configuration`.
    """
    refusal = (_LATENT.get(reason) if asked.get("use_mla") else None) or _REFUSALS.get(reason)
    if refusal is None:
        return reason
    value = str(asked.get(refusal.asked)).removeprefix("torch.")
    return f"{refusal.feature}={value} (serves {refusal.served}): {refusal.hint}"
