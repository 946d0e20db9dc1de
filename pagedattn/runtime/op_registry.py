"""How ops are registered with torch, and how the path (csrc, Triton or torch) of a call is chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from ..errors import InvalidInputError, UnsupportedError
from .eager import is_plain_call

PATHS = ("auto", "csrc", "triton", "torch")
# The paths of each op in order of preference; an op that is not named has the others. What `python -m bench.op_paths`
# measured of them is in docs/performance.md, "Which path runs".
_PATHS_OF = {
    "reshape_and_cache": PATHS[1:],
    "reshape_and_cache_classic": ("csrc", "torch"),
    "copy_blocks": PATHS[1:],
    "swap_blocks": PATHS[1:],
    "gather_kv": PATHS[1:],
    "concat_and_cache_mla": ("triton", "csrc", "torch"),  # the extension was not measured yet
    "decode_attention": ("csrc", "torch"),
}
_log = logging.getLogger("pagedattn")
_WITHOUT_CSRC = ("triton", "torch")
_REVISION = 2  # as in csrc/registration.cpp
_EXTENSION = Path(__file__).parent.parent / "_csrc.so"
_BUILD = (
    "python setup.py build_ext --inplace (or pip install --no-build-isolation), with torch and a C++ compiler there"
)

# Library.define + impl costs a fifth of what custom_op costs per call. The object must outlive the process's ops.
_library = torch.library.Library("pagedattn", "FRAGMENT")


def register(schema: str, implementation: Callable[..., object], fake: Callable[..., object]) -> Callable[..., Any]:
    """Register `schema` (which names what it mutates) for every device, with its fake for tracing.

    It runs without gradients: a cache must not keep the graph of what was written to it.

    Returns:
        The op; where torch would only call the implementation, it is called directly (the dispatcher takes 5 us to
        carry 22 arguments); it then gets keyword arguments that the schema has not, and returns what it has not.
    """
    name = schema.partition("(")[0]
    run = _without_gradients(implementation)
    _library.define(schema)
    _library.impl(name, _silent(run) if schema.endswith("-> ()") else run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagedattn::{name}", fake, lib=_library)
    op = getattr(torch.ops.pagedattn, name).default

    def call(*args: object, **beyond: object) -> Any:
        return run(*args, **beyond) if is_plain_call(args) else op(*args)

    return call


def _without_gradients(implementation: Callable[..., object]) -> Callable[..., object]:
    @wraps(implementation)
    def run(*args: object, **beyond: object) -> object:
        if not torch.is_grad_enabled():  # as a rule; no_grad costs a microsecond
            return implementation(*args, **beyond)
        with torch.no_grad():
            return implementation(*args, **beyond)

    return run


def _silent(run: Callable[..., object]) -> Callable[..., None]:
    def silent(*args: object) -> None:
        run(*args)

    return silent


@cache
def has_triton() -> bool:
    """Whether Triton is installed (not whether this device can run it)."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, which serves any device but is wrong for bfloat16."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose(path: str, device: torch.device, op: str = "", needs: str = "") -> str:
    """The path that a call of `op` on `device` takes: `path`, or where that is auto, the op's first that can serve.

    A GPU whose calls could have the extension and have it not is worth a warning, once.

    Args:
        needs: what the compiled paths want of this call's tensors, where these are otherwise; torch serves any.

    Raises:
        InvalidInputError: an unknown path.
        UnsupportedError: the path asked for cannot serve; says why and what to do.
    """
    if path not in PATHS:
        raise InvalidInputError("path", f"one of {', '.join(PATHS)}", repr(path))
    paths = _PATHS_OF.get(op, _WITHOUT_CSRC)
    if path != "auto":
        reason = _refusal(path, device, paths, needs)
        if reason:
            raise UnsupportedError(f"path={path!r}{f' of {op}' if op else ''}: {reason}")
        return path
    able = _first_able(device, paths, needs)
    if device.type == "cuda" and "csrc" in paths[: paths.index(able)]:
        _warn_without_csrc(device)
    return able


def _first_able(device: torch.device, paths: tuple[str, ...], needs: str = "") -> str:
    for one in paths:
        # The interpreter is for tests: slow, and wrong for some dtypes.
        if not (one == "triton" and device.type != "cuda") and not _refusal(one, device, paths, needs):
            return one
    return "torch"


def path_of(op: str, device: torch.device | str) -> str:
    """The path that `op` (`reshape_and_cache`) takes on `device` when a call names none.

    A call whose tensors the compiled paths do not take goes to torch; each op says which these are.

    Raises:
        InvalidInputError: an unknown op.
    """
    if not hasattr(torch.ops.pagedattn, op):
        raise InvalidInputError("op", "the name of an op", repr(op))
    return _first_able(torch.device(device), _PATHS_OF.get(op, _WITHOUT_CSRC))


def _refusal(path: str, device: torch.device, paths: tuple[str, ...], needs: str) -> str:
    """Why `path` cannot serve; empty where it can."""
    if path == "torch":
        return ""
    if path not in paths:
        return f"this op has none; use one of auto, {', '.join(paths)}"
    if needs:
        return f"needs {needs}; use path='torch'"
    if path == "triton":
        if not has_triton():
            return "needs the package triton: pip install triton"
        runs = device.type == "cuda" or interpreted()
        return "" if runs else f"cannot run on {device}; use path='torch', or set TRITON_INTERPRET=1 first"
    loaded, text = _load_csrc()
    if not loaded:
        return f"the extension is not loaded: {text}"
    if device.type == "cpu" or (device.type == "cuda" and _cuda_ready(device)):
        return ""
    return f"the extension ({text}) has no kernels for {device}; build it there: {_BUILD}, and nvcc"


@cache
def _warn_without_csrc(device: torch.device) -> None:
    if reason := _refusal("csrc", device, PATHS, ""):
        _log.warning(
            "cache writes and copies on %s run by Triton or torch: %s; `pagedattn env` says more", device.type, reason
        )


def csrc_status() -> str:
    """Where the extension was loaded from and what it was built with, or why there is none."""
    return _load_csrc()[1]


@cache
def csrc_op(name: str) -> Callable[..., Any]:
    """An op of the extension, once `choose` has named it."""
    return getattr(torch.ops.pagedattn_csrc, name).default


@cache
def _load_csrc() -> tuple[bool, str]:
    note = _EXTENSION.with_suffix(".txt")
    built = note.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if note.exists() else ""
    if not _EXTENSION.exists():
        return False, built if built.startswith("not built") else f"not built: {_BUILD}"
    try:
        torch.ops.load_library(str(_EXTENSION))
        revision = torch.ops.pagedattn_csrc.revision()
    except (OSError, RuntimeError, AttributeError) as error:
        return False, f"{_EXTENSION} ({built}) cannot be loaded: {error}; build it again: {_BUILD}"
    if revision != _REVISION:
        return False, f"{_EXTENSION} has the ops of revision {revision}, not {_REVISION}; build it again: {_BUILD}"
    return True, f"{_EXTENSION}, {built}"


@cache
def _cuda_ready(device: torch.device) -> bool:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.ops.pagedattn_csrc.cuda_ready(index)


@cache
def load(name: str) -> ModuleType:
    """The module `pagedattn.<name>`, imported on first use: `import pagedattn` must not import triton."""
    return import_module(f"pagedattn.{name}")


def expect(condition: bool, param: str, expected: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor argument that is not as expected, saying what came."""
    if not condition:
        refuse(param, expected, tensor)


def refuse(param: str, expected: str, tensor: torch.Tensor) -> NoReturn:
    """Raise InvalidInputError for a tensor argument, saying what came."""
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    raise InvalidInputError(param, expected, f"{got}, strides {tensor.stride()}")
