"""Which releases of vLLM the backend was tested with, and what else decides whether vLLM finds it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from ... import env
from ...backends.releases import Releases

SERVED = Releases("vllm", "0.24", "0.33")  # make vllm-test
GROUP, NAME = "vllm.general_plugins", "pagedattn"
_PREFIX = "PAGEDATTN_"
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def installed() -> str | None:
    """The version of vLLM that can be imported here, None where there is none."""
    return SERVED.installed


def why_untested(release: str) -> str:
    """Why a release of vLLM may not work, and what to do; "" for one of the tested series."""
    if not SERVED.refusal(release):
        return ""
    remedy = f"install one of these (pip install '{SERVED.requirement}')"
    return f"vLLM {release} was not tested with pagedattn's backend (tested: {SERVED}); if it fails, {remedy}"


def describe() -> list[str]:
    """What vLLM would find here, a line each: for people who ask why CUSTOM is not registered."""
    release = installed()
    if release is None:
        return [f"not installed (pagedattn's backend for it was tested with {SERVED})"]
    lines = [why_untested(release) or release]
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        lines.append(f"finds no plugin {NAME!r}: pagedattn is imported from a folder; pip install it")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        lines.append(f"loads no plugin {NAME!r}: VLLM_PLUGINS={allowed!r}; add {NAME} to it, or unset it")
    return lines


def copy_variables_to_ray() -> None:
    """Have vLLM hand PAGEDATTN_* variables to Ray's workers, which get none but its own."""
    prefixes = [name for name in os.environ.get(_RAY_PREFIXES, "").split(",") if name]
    if _PREFIX not in prefixes and any(name in os.environ for name in env.VARIABLES):
        os.environ[_RAY_PREFIXES] = ",".join([*prefixes, _PREFIX])
