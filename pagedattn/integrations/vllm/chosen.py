"""What vLLM's `CUSTOM` names: one of two classes, since vLLM has a class serve either latent attention or any other."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`Backend`: `PagedMLABackend` while vLLM builds a model with latent attention, else `PagedAttentionBackend`."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    model = getattr(get_current_vllm_config_or_none(), "model_config", None)
    if getattr(model, "use_mla", False):
        from .mla import PagedMLABackend

        return PagedMLABackend
    from .backend import PagedAttentionBackend

    return PagedAttentionBackend
