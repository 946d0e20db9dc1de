"""The scales of an enabled model's fp8 cache, from a calibration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ... import Attention, KVScales


def load_kv_scales(given: str | os.PathLike[str] | KVScales | None, kv_cache_dtype: str, model: Any) -> KVScales | None:
    """The calibration, read where it is a path; None where none is given.

    Raises:
        InvalidInputError: it cannot be read, the format takes no scales, or the folder that the model was loaded from
            holds another checkpoint. Of a model from elsewhere only shapes are compared.
    """
    if given is None:
        return None
    KVScales.check_format(kv_cache_dtype, given)
    scales = given if isinstance(given, KVScales) else KVScales.load(given)
    loaded_from = getattr(model.config, "_name_or_path", None)
    folder = Path(loaded_from or ".")
    if loaded_from and folder.is_dir():
        scales.check_checkpoint(lambda name: folder / name if (folder / name).is_file() else None)
    return scales


def set_kv_scales(scales: KVScales, kv_cache_dtype: str, layers: dict[int, Attention]) -> None:
    """Give the layers, by index, their scales; InvalidInputError where the calibration is of other shapes."""
    ordered = [layers[index] for index in sorted(layers)]
    scales.check_layers(ordered)
    scales.give(ordered, kv_cache_dtype)
