"""Backends by name: strings until they are asked for, ours and other packages'."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from .. import env
from ..errors import InvalidInputError, UnsupportedError
from .base import AttentionBackend

_backends = {
    "FLASH_ATTN": "pagedattn.backends.flash_attn:FlashAttnBackend",
    "FLASHINFER": "pagedattn.backends.flashinfer:FlashInferBackend",
    "FLASH_MLA": "pagedattn.backends.flash_mla:FlashMLABackend",
    "TRITON": "pagedattn.backends.triton:TritonBackend",
    "TORCH": "pagedattn.backends.torch_native:TorchBackend",
}


def register_backend(name: str, target: str) -> None:
    """Make `target` ("module:Class", an AttentionBackend) known as `name`.

    Raises:
        InvalidInputError: the name is taken by another class, or the target is no "module:Class".
    """
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise InvalidInputError("target", '"module:Class"', repr(target))
    if _backends.get(name, target) != target:
        raise InvalidInputError("name", "a name not yet taken", f"{name}, which is {_backends[name]}")
    _backends[name] = target


def backend_names() -> list[str]:
    """Every known name, ours first."""
    return [*_backends, *(name for name in _plugins() if name not in _backends)]


def get_backend(name: str, asked_by: str = "backend") -> type[AttentionBackend]:
    """The backend class called `name`; `asked_by` says in an error where the name came from.

    Raises:
        InvalidInputError: no backend has this name; says which is nearest.
        UnsupportedError: its module cannot be imported.
    """
    target = _backends.get(name) or _plugins().get(name)
    if target is None:
        near = get_close_matches(name.upper(), backend_names(), n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
        raise InvalidInputError(asked_by, f"one of {', '.join(backend_names())}", repr(name), remedy)
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever another package's module raises must not take selection down
        raise UnsupportedError(f"backend {name} ({target}) cannot be loaded: {error}") from error


@cache
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="pagedattn.backends")}


def _plugins() -> dict[str, str]:
    return _installed() if env.plugins_enabled() else {}
