"""Which implementation runs a model folder: the engine's own decoder, or transformers' modules over the paged cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Protocol

import torch

from pagedattn import (
    Attention,
    FullAttentionSpec,
    LayerCache,
    MLAAttention,
    MLASpec,
    SlidingWindowSpec,
    StepMetadata,
)
from pagedattn.errors import NoBackendError, UnsupportedError

from ..config import EngineConfig
from .config import load_model_config
from .decoder import Decoder
from .folder import ModelFolder
from .kv_scales import load_kv_scales, set_kv_scales
from .latent_sharding import is_latent
from .loader import load_weights
from .sharding import ShardedDecoder
from .tp_group import TPGroup
from .transformers import load_transformers_model

logger = logging.getLogger("pagedattn.engine")


class ModelShape(Protocol):
    """What the engine reads of a model's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class CausalModel(Protocol):
    """What the engine needs of a model.

    `capturable`: a CUDA graph may record it. `may_wait`: but not before a run has shown that it waits for no device.
    """

    may_wait: ClassVar[bool]

    @property
    def capturable(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def logits_dtype(self) -> torch.dtype: ...

    @property
    def config(self) -> ModelShape: ...

    @property
    def num_parameters(self) -> int: ...

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache] | None,
        metadata: StepMetadata,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def attention_layers(self) -> Sequence[Attention | MLAAttention]: ...

    def kv_cache_specs(self, block_size: int) -> Sequence[FullAttentionSpec | SlidingWindowSpec | MLASpec]: ...


def make_model(
    config: EngineConfig, folder: ModelFolder, device: torch.device, ranks: TPGroup | None = None
) -> CausalModel:
    """Load a folder's model by `config.model_impl`, or one rank's share of it, which only the native one has, and
    transformers of latent models.

    Raises:
        UnsupportedError: no implementation that may be used can run it; says why for each.
        WeightsError, SecurityError, InvalidInputError, CapacityError: it cannot be loaded.
    """
    if ranks is not None and is_latent(config, folder):
        return load_transformers_model(config, folder, device, ranks)
    if ranks is not None:
        return _native(config, folder, device, partial(ShardedDecoder, ranks))
    if config.model_impl == "transformers":
        return load_transformers_model(config, folder, device)
    try:
        return _native(config, folder, device)
    except NoBackendError:
        raise  # transformers' modules attend by the same backends
    except UnsupportedError as native:
        if config.model_impl == "native":
            raise
        reason = str(native)
    try:
        model = load_transformers_model(config, folder, device)
    except UnsupportedError as error:
        if str(error) == reason:
            raise
        raise UnsupportedError(f"the engine's own decoder: {reason}; transformers: {error}") from error
    logger.info("%s runs through transformers, which is slower (%s)", model.name, reason)
    return model


def _native(
    config: EngineConfig, folder: ModelFolder, device: torch.device, make: Callable[..., Decoder] = Decoder
) -> Decoder:
    if config.latent:
        raise UnsupportedError(
            "latent=True, but the engine's own decoder cannot keep latent rows: it has no latent attention; leave "
            "latent out, which keeps keys and values of every head instead"
        )
    shape = load_model_config(folder)
    scales = load_kv_scales(config, folder, shape)
    model = make(
        shape,
        dtype=shape.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        device=device,
        max_positions=config.longest_sequence(shape.max_position_embeddings),
        block_size=config.tokens_per_block,
        backend=config.backend,
        clean_cache=config.clean_cache,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    set_kv_scales(config, folder, model.attention_layers(), scales, model.kv_heads)
    load_weights(model, folder, device, config.load_format, config.seed)
    return model
