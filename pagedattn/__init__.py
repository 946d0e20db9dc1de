"""Paged attention as a library: one layer, one paged KV cache, one metadata format, pluggable backends."""

import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import env, errors, ops
from .backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from .backends.registry import register_backend
from .backends.selector import list_backends, select_backend, use_backend
from .cache.block_pool import BlockPool
from .cache.block_table import BlockTable
from .cache.kv_cache import PagedKVCache
from .cache.specs import FullAttentionSpec, MLASpec, SlidingWindowSpec
from .call import AttentionCall
from .formats.base import CacheFormat, LayerCache
from .formats.fp8.calibration import KVScales
from .formats.fp8.calibration_file import LayerMaxima
from .formats.per_layer import KVCacheDtype
from .layers.attention import Attention
from .layers.functional import paged_attention
from .layers.mla import MLAAttention
from .layers.plan_step import StepMetadata, plan_step
from .layers.seal_layers import seal_layers
from .spec import AttentionSpec, AttentionType, Mask
from .step.metadata import CommonAttentionMetadata

try:
    __version__ = version("pagedattn")
except PackageNotFoundError:
    __version__ = "0.0.0+source"

_HERE = Path(__file__).parent
if not (_HERE / "engine").exists() and (_HERE.parent / "setup.py").exists():
    # A checkout, where pagedattn.engine and pagedattn.bench are the folders beside this one.
    __path__.append(str(_HERE.parent))


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
    "AttentionCall",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "BlockPool",
    "BlockTable",
    "CacheFormat",
    "CommonAttentionMetadata",
    "FullAttentionSpec",
    "KVCacheDtype",
    "KVScales",
    "LayerCache",
    "LayerMaxima",
    "MLAAttention",
    "MLASpec",
    "Mask",
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
    "seal_layers",
    "select_backend",
    "use_backend",
]
