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


def _start_log() -> None:
    """Without PAGEDATTN_LOG the logger is the application's, and says what Python lets every logger say: warnings."""
    logger = logging.getLogger("pagedattn")
    try:
        level = env.log_level()
    except errors.InvalidInputError as error:  # no reason for an import to fail
        logger.warning("%s", error)
        return
    if level is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        # Where the application has handlers of its own, they get the records, and nothing is told twice.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(level)


_start_log()

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
