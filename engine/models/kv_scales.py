"""Scales of an fp8 cache: from a calibration, else from the checkpoint; without either each is 1."""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn import Attention, KVCacheDtype, KVScales

from ..config import EngineConfig
from .config import ModelConfig
from .folder import ModelFolder
from .loader import read_kv_scales


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
        WeightsError: a scale of the checkpoint is no positive finite number.
        UnsupportedError: the backend asked for does not serve such scales.
    """
    if scales is not None:
        scales.give(layers, KVCacheDtype.of(config.kv_cache_dtype).name, heads)
    elif config.load_format != "dummy" and any(layer.spec.format.takes_scales for layer in layers):
        for index, pair in read_kv_scales(folder).items():
            if index < len(layers) and layers[index].spec.format.takes_scales:
                layers[index].set_kv_scales(*pair, "the checkpoint")
