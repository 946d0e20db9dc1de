"""Every PAGEDATTN_* variable: its name, its meaning, and a strict parser. A bad value raises; nothing is guessed."""

from __future__ import annotations

import os

from .errors import InvalidInputError

VARIABLES = {
    "PAGEDATTN_BACKEND": "a backend (`TRITON`), or one per phase (`prefill=TRITON,decode=TORCH`); not set: the fastest",
    "PAGEDATTN_CHECK": "0 no checks, 1 (default) all that the host sees without a sync, 2 contents of tensors too",
    "PAGEDATTN_FLASH_ATTN": "2 or 3: the only FlashAttention version to use; not set: 3 where it serves, else 2",
    "PAGEDATTN_LOG": "debug, info, warning, error: the log to standard error from this level on (not set: warnings)",
    "PAGEDATTN_REPLAY": "1 (default) launches Triton kernels past its dispatcher (triton 3.6 to 3.9), 0 through it",
    "PAGEDATTN_TRACEBACK": "1: the command line shows tracebacks, as with `--traceback`; 0 (default) does not",
    "PAGEDATTN_PLUGINS": "1 (default) lists backends of installed packages (entry points), 0 ignores them",
    "PAGEDATTN_VLLM_DEFAULT": "1: inside vLLM, in the place of FLASH_ATTN; 0 (default): where `CUSTOM` is asked for",
}


def backend() -> str | None:
    """The backend asked for by the environment, or None."""
    return os.environ.get("PAGEDATTN_BACKEND", "").strip() or None


def check_level() -> int:
    """How much `PAGEDATTN_CHECK` asks to validate: 0, 1 or 2. Layers ask at a step's first call of each layout."""
    return int(_one_of("PAGEDATTN_CHECK", ("0", "1", "2"), "1"))


def flash_attn_version() -> int | None:
    """The FlashAttention version that `PAGEDATTN_FLASH_ATTN` insists on, or None."""
    return int(_one_of("PAGEDATTN_FLASH_ATTN", ("", "2", "3"), "") or 0) or None


def log_level() -> str | None:
    """The level name for the `pagedattn` logger, in upper case as `logging` wants it; None leaves the logger alone."""
    if "PAGEDATTN_LOG" not in os.environ:
        return None
    return _one_of("PAGEDATTN_LOG", ("debug", "info", "warning", "error"), "warning").upper()


def plugins_enabled() -> bool:
    """Whether backends registered by other packages are looked up."""
    return _one_of("PAGEDATTN_PLUGINS", ("0", "1"), "1") == "1"


def replay() -> bool:
    """Whether launches may go past Triton's dispatcher."""
    return _one_of("PAGEDATTN_REPLAY", ("0", "1"), "1") == "1"


def traceback() -> bool:
    """Whether the command line shows tracebacks."""
    return _one_of("PAGEDATTN_TRACEBACK", ("0", "1"), "0") == "1"


def vllm_default() -> bool:
    """Whether vLLM's usual backend is to be this library's."""
    return _one_of("PAGEDATTN_VLLM_DEFAULT", ("0", "1"), "0") == "1"


def _one_of(name: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name, default)
    if value not in allowed:
        raise InvalidInputError(name, f"one of {', '.join(allowed)}", repr(value), "correct or unset the variable")
    return value
