"""Paged attention as a library: one layer, one paged KV cache, one metadata format, pluggable backends."""

import logging
from importlib.metadata import PackageNotFoundError, version

from . import env, errors, ops
from .backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from .backends.registry import register_backend
from .block_pool import BlockPool
from .block_table import BlockTable
from .cache_spec import FullAttentionSpec, SlidingWindowSpec
from .functional import paged_attention
from .kv_cache import LayerCache, PagedKVCache
from .layer import Attention
from .metadata import CommonAttentionMetadata
from .selector import list_backends, select_backend, use_backend
from .spec import AttentionSpec, AttentionType
from .step import StepMetadata, plan_step

try:
    __version__ = version("pagedattn")
except PackageNotFoundError:
    __version__ = "0.0.0+source"

_logger = logging.getLogger("pagedattn")
_logger.addHandler(logging.NullHandler())
_logger.setLevel(env.log_level())

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "BlockPool",
    "BlockTable",
    "CommonAttentionMetadata",
    "FullAttentionSpec",
    "LayerCache",
    "PagedKVCache",
    "SlidingWindowSpec",
    "StepMetadata",
    "__version__",
    "errors",
    "list_backends",
    "ops",
    "paged_attention",
    "plan_step",
    "register_backend",
    "select_backend",
    "use_backend",
]
