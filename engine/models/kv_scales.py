"""Scales of an fp8 cache: from a calibration, else from the checkpoint; without either each is 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedattn import Attention, KVCacheDtype, KVScales

from ..config import EngineConfig
from .config import ModelConfig
from .folder import ModelFolder
from .loader import read_kv_scales, refused_scale

Scale = float | torch.Tensor | None


def load_kv_scales(config: EngineConfig, folder: ModelFolder, shape: ModelConfig | None = None) -> KVScales | None:
    """The calibration that a config names, checked against the model before memory is taken; None where it names none.

    Args:
        shape: of the whole model, None where that is not known yet.

    Raises:
        InvalidInputError: it cannot be read, or is of another model or checkpoint.
    """
    if config.kv_scales is None:
        return None
    scales = KVScales.load(config.kv_scales)
    if shape is not None:
        scales.check_shapes([(shape.num_kv_heads, shape.head_dim, shape.head_dim)] * shape.num_layers)
    if config.load_format != "dummy":
        scales.check_checkpoint(folder.find)
    return scales


def set_kv_scales(
    config: EngineConfig,
    folder: ModelFolder,
    layers: Sequence[Attention],
    scales: KVScales | None,
    heads: slice | None = None,
) -> None:
    """Give each layer its scales, of a rank's share those of the KV heads `heads`.

    Raises:
        WeightsError: a scale of the checkpoint is no positive finite number, or there are not as many as KV heads.
        UnsupportedError: the backend asked for does not serve such scales.
    """
    if scales is not None:
        scales.give(layers, KVCacheDtype.of(config.kv_cache_dtype).name, heads)
    elif config.load_format != "dummy" and any(layer.spec.format.takes_scales for layer in layers):
        for index, pair in read_kv_scales(folder).items():
            if index < len(layers) and layers[index].spec.format.takes_scales:
                local = layers[index].spec.kv_heads
                key, value = (_of_rank(index, scale, heads or slice(None), local) for scale in pair)
                layers[index].set_kv_scales(*_of_one_kind(key, value), "the checkpoint")


def _of_rank(index: int, scale: torch.Tensor | None, heads: slice, count: int) -> torch.Tensor | None:
    """A scale of one element, or those of a rank's `count` heads.

    Raises:
        WeightsError: of another number of heads.
    """
    if scale is None or len(scale) == 1:
        return scale
    if len(scale[heads]) != count:
        raise refused_scale(f"k_scale or v_scale of layer {index}", scale, f"of {count} KV heads here")
    return scale[heads].contiguous()


def _of_one_kind(key: torch.Tensor | None, value: torch.Tensor | None) -> tuple[Scale, Scale]:
    """Both as host floats, which every backend serves, or where one is of each head, both so."""
    pair = key, value
    most = max(len(scale) for scale in pair if scale is not None)
    if most == 1:
        return tuple(None if scale is None else scale.item() for scale in pair)  # type: ignore[return-value]
    return tuple(None if scale is None else scale.expand(most).contiguous() for scale in pair)  # type: ignore[return-value]
