"""A tiny model whose keys and values are far beyond fp8 in one KV head, and its calibration."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import torch
from test_detokenizer import byte_level
from tiny_models import hf_model, save

from pagedattn import KVScales
from pagedattn.engine import calibrate

TEXT = "".join(random.Random(0).choices(string.ascii_letters + string.digits + " \n", k=3000))
KEY_LAYER, VALUE_LAYER, VALUE_HEAD = 2, 1, 1
FACTOR = 2.0**18  # beyond e5m2 too


def enlarged() -> Any:
    """A model that says what it says without the factors: queries and outputs are smaller by as much."""
    model = hf_model("qwen3", torch.float32)
    layers = model.model.layers
    layers[KEY_LAYER].self_attn.k_norm.weight.data *= FACTOR
    layers[KEY_LAYER].self_attn.q_norm.weight.data /= FACTOR
    attention, dim = layers[VALUE_LAYER].self_attn, 32
    attention.v_proj.weight.data[VALUE_HEAD * dim :] *= FACTOR
    attention.o_proj.weight.data[:, 2 * VALUE_HEAD * dim :] /= FACTOR  # two query heads for each KV head
    return model


def make(folder: Path) -> tuple[Path, KVScales]:
    """The model's folder with a tokenizer, and its calibration, which is in the folder too."""
    save(enlarged(), folder)
    byte_level().save(str(folder / "tokenizer.json"))
    scales = calibrate(folder, TEXT, max_tokens=1200, device="cpu")
    scales.save(folder / "kv_scales.json")
    return folder, scales
