"""How ops are registered with torch, and how the path (Triton or torch) of a call is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from ..errors import InvalidInputError, UnsupportedError

PATHS = ("auto", "triton", "torch")

# Library.define + impl costs a fifth of what custom_op costs per call. The object must outlive the process's ops.
_library = torch.library.Library("pagedattn", "FRAGMENT")


def register(schema: str, implementation: Callable[..., object], fake: Callable[..., object]) -> Callable[..., Any]:
    """Register `schema` (which names what it mutates) for every device, with its fake for tracing; returns the op."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagedattn::{name}", fake, lib=_library)
    return getattr(torch.ops.pagedattn, name).default


@cache
def has_triton() -> bool:
    """Whether Triton is installed (not whether this device can run it)."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, which serves any device but is wrong for bfloat16."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose(path: str, device: torch.device) -> str:
    """The path that a call on `device` takes: `triton` on a GPU that has it, else `torch`, unless `path` names one."""
    if path == "auto":
        return "triton" if device.type == "cuda" and has_triton() else "torch"
    if path not in PATHS:
        raise InvalidInputError("path", f"one of {', '.join(PATHS)}", repr(path))
    if path == "triton" and not has_triton():
        raise UnsupportedError("path='triton' needs the package triton: pip install triton")
    if path == "triton" and device.type != "cuda" and not interpreted():
        raise UnsupportedError(
            f"path='triton' cannot run on {device}; use path='torch', or set TRITON_INTERPRET=1 first"
        )
    return path


@cache
def kernels(name: str) -> ModuleType:
    """The module of Triton kernels `name`, imported on first use: `import pagedattn` must not import triton."""
    return import_module(f".kernels.{name}", __package__)


def expect(condition: bool, param: str, expected: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor argument that is not as expected, saying what came."""
    if not condition:
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        raise InvalidInputError(param, expected, f"{got}, strides {tensor.stride()}")
