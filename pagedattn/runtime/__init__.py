"""How ops are registered and kernels launched; nothing here knows what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launcher import Launcher

__all__ = ["Launcher"]


def __getattr__(name: str) -> object:
    if name != "Launcher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .launcher import Launcher  # which imports triton

    return Launcher
