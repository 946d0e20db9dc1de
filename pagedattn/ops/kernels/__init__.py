"""Triton kernels and their launchers, imported on first use."""

from ..library import interpreted

if interpreted():
    from . import interpreter as _interpreter  # noqa: F401 - it mends on import
