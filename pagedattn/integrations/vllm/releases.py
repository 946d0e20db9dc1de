"""Which releases of vLLM the backend was tested with, and what else decides whether vLLM finds it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from ... import env
from ...backends.releases import Releases

SERVED = Releases("vllm", "0.24", "0.33")  # make vllm-test
GROUP, NAME = "vllm.general_plugins", "pagedattn"
_PREFIX = "PAGEDATTN_"
# Variables of vLLM: which of the variables of the process that starts it Ray's workers get besides vLLM's own.
RAY_PREFIXES, RAY_NAMES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_TRITON_CACHE = "TRITON_CACHE_DIR"  # matters to our kernels too, and has no prefix that is copied


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
    return lines + _ray()


def _ray() -> list[str]:
    """Which variables that are set here decide about our kernels, and how Ray's workers get them."""
    own = [name for name in env.VARIABLES if name in os.environ]
    lines = []
    if own:
        how = f"the plugin adds {_PREFIX} to {RAY_PREFIXES} in the process that starts vLLM; set them there"
        lines.append(f"Ray's workers get {', '.join(own)}: {how}")
    if _TRITON_CACHE in os.environ and _TRITON_CACHE not in os.environ.get(RAY_NAMES, "").split(","):
        lines.append(f"Ray's workers do not get {_TRITON_CACHE}: add it to {RAY_NAMES} (names, separated by commas)")
    return lines


def copy_variables_to_ray() -> None:
    """Have vLLM hand PAGEDATTN_* variables to Ray's workers, which get none but its own."""
    prefixes = [name for name in os.environ.get(RAY_PREFIXES, "").split(",") if name]
    if _PREFIX not in prefixes and any(name in os.environ for name in env.VARIABLES):
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, _PREFIX])
