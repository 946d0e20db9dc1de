"""What is asked for and what can be served, as values: a spec, capabilities, reasons, scales."""

from .attention import (
    CACHE_LAYOUTS,
    KV_CACHE_DTYPES,
    KV_SCALES,
    AttentionSpec,
    AttentionType,
    ContextParallel,
    GraphLevel,
    Scale,
)
from .capabilities import Capabilities, IntRange, Rejection
from .mask import Mask

__all__ = [
    "CACHE_LAYOUTS",
    "KV_CACHE_DTYPES",
    "KV_SCALES",
    "AttentionSpec",
    "AttentionType",
    "Capabilities",
    "ContextParallel",
    "GraphLevel",
    "IntRange",
    "Mask",
    "Rejection",
    "Scale",
]
