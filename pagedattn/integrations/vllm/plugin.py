"""What vLLM calls in each of its processes (front end, engine core, workers), as often as it likes."""

from __future__ import annotations

import logging

from ... import env
from ...errors import UnsupportedError
from . import releases

_BACKEND = "pagedattn.integrations.vllm.chosen.Backend"
_IN_PLACE_OF_FLASH_ATTN = "pagedattn.integrations.vllm.backend.PagedAttentionBackend"
_log = logging.getLogger("pagedattn")


def register() -> None:
    """Make vLLM's `attention_backend="CUSTOM"` mean this library, and FLASH_ATTN too where PAGEDATTN_VLLM_DEFAULT=1.

    Nothing of the backend is imported before vLLM selects it.

    Raises:
        UnsupportedError: vLLM is not installed.
    """
    release = releases.installed()
    if release is None:
        raise UnsupportedError(f"vLLM is not installed here; pip install vllm ({releases.SERVED})")
    untested = releases.why_untested(release)
    if untested:
        _log.warning("%s", untested)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    if env.vllm_default():
        register_backend(AttentionBackendEnum.FLASH_ATTN, _IN_PLACE_OF_FLASH_ATTN)
    releases.copy_variables_to_ray()
