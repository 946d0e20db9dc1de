"""Weights: safetensors only, checked by name, shape and type before any memory is taken, then streamed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from pagedattn.errors import CapacityError, WeightsError

from .decoder import Decoder
from .folder import ModelFolder
from .tensor_slice import TensorSlice
from .text_part import is_multimodal, text_name

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F16", "BF16", "F32", "F64")
_MAX_HEADER_BYTES = 100_000_000
_FOREIGN = {b"PK\x03\x04": "a zip archive (torch.save)", b"GGUF": "a GGUF file"}
_DUMMY_STD = 0.02
# `model.layers.3.self_attn.k_scale`; older writers say kv_scale of both, or name them under `attn` or a projection, or
# as what k_proj and v_proj give out.
_KV_SCALE = re.compile(
    r"(?:^|\.)(\d+)\.(?:self_)?attn\.(?:(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)$"
)
# Of queries and probabilities in fp8, which no kernel here needs: they are quantised by their own size, if at all.
_UNUSED_SCALE = re.compile(r"(?:^|\.)\d+\.(?:self_)?attn\.(?:attn\.|q_proj\.)?(?:q|prob)_scale$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a checkpoint keeps one tensor, by its header."""

    file: Path
    name: str  # there
    dtype: str
    shape: tuple[int, ...]


def load_weights(
    model: Decoder, folder: ModelFolder, device: torch.device, load_format: str = "auto", seed: int = 0
) -> None:
    """Fill a model whose weights are on the meta device. On any error the model stays as it was.

    Args:
        load_format: "auto" and "safetensors" read the folder; "dummy" draws small random weights from `seed`.

    Raises:
        WeightsError: a missing, unexpected, duplicate tensor, or one of the wrong shape or type, named in the message.
        CapacityError: the device cannot hold the weights.
    """
    parameters, cuts = dict(model.named_parameters()), model.checkpoint_cuts()
    stored = {} if load_format == "dummy" else _inventory(folder)
    if load_format != "dummy":
        shapes = {key: tuple(view.shape) for key, view in model.checkpoint_views(parameters).items()}
        shapes.update({key: cut.full for key, cut in cuts.items() if key in shapes})
        _check(stored, shapes, model.config.tie_word_embeddings)
    try:
        tensors = {name: torch.empty_like(parameter, device=device) for name, parameter in parameters.items()}
    except torch.OutOfMemoryError as error:
        total = sum(parameter.nbytes for parameter in parameters.values())
        raise CapacityError(f"the weights need {total / 2**30:.1f} GiB on {device}: {error}") from None
    if load_format == "dummy":
        _randomise(model.checkpoint_views(tensors), cuts, device, seed)
    else:
        _stream(stored, model.checkpoint_views(tensors), cuts, model.config.tie_word_embeddings)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))


def read_tensors(folder: ModelFolder) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors by name, in the types they are stored in.

    Raises:
        WeightsError: there are none, or a file is broken, missing or no safetensors.
    """
    stored, tensors = _inventory(folder), {}
    for path in dict.fromkeys(tensor.file for tensor in stored.values()):
        with safe_open(path, framework="pt") as file:
            tensors.update({key: file.get_tensor(tensor.name) for key, tensor in stored.items() if tensor.file == path})
    return tensors


def read_kv_scales(folder: ModelFolder) -> dict[int, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The k_scale and v_scale of each layer that has one in the checkpoint, by its index: float32, of one element or of
    one for each KV head of the model.

    Raises:
        WeightsError: an element is no positive finite number, or a layer has several such tensors.
    """
    found: dict[int, list[torch.Tensor | None]] = {}
    for name, tensor in _text_inventory(folder).items():
        match = _KV_SCALE.search(name)
        if match is None:
            continue
        with safe_open(tensor.file, framework="pt") as file:
            scale = file.get_tensor(tensor.name).float().flatten()
        pair = found.setdefault(int(match[1]), [None, None])
        sides = {"k": (0,), "v": (1,), "kv": (0, 1)}[match[2] or match[3]]
        known = bool(((scale > 0) & (scale < math.inf)).all()) and scale.numel() > 0
        if not known or any(pair[side] is not None for side in sides):
            raise refused_scale(name, scale, "of the layer's keys or values alone")
        for side in sides:
            pair[side] = scale
    return {index: (pair[0], pair[1]) for index, pair in found.items()}


def refused_scale(name: str, scale: torch.Tensor, expected: str) -> WeightsError:
    """Of a tensor of scales that the engine cannot use."""
    return WeightsError(
        f"tensor {name!r} must be positive finite numbers, one or one per KV head, {expected}, got "
        f"{scale[:8].tolist()} of {len(scale)} elements; give kv_scales=, a file of `pagedattn calibrate`, in its place"
    )


def _inventory(folder: ModelFolder) -> dict[str, StoredTensor]:
    """The weights of `_text_inventory`, without scales of a cache, of queries and of probabilities."""
    every = _text_inventory(folder).items()
    return {name: one for name, one in every if not (_KV_SCALE.search(name) or _UNUSED_SCALE.search(name))}


def _text_inventory(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, or of its text part where it has others, by name in a model of text."""
    stored = _whole_inventory(folder)
    if not is_multimodal(folder.read_json("config.json") or {}):
        return stored
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        key = text_name(name)
        if key in found:
            raise WeightsError(f"tensor {key!r} is twice in the checkpoint: as {found[key].name!r} and as {name!r}")
        if key is not None:
            found[key] = tensor
    return found


def weight_files(folder: ModelFolder) -> dict[str, Path]:
    """The safetensors of the checkpoint by their names in the folder: `model.safetensors`, or the shards of the index.

    Raises:
        WeightsError: there are none, or the index is broken.
    """
    single = folder.find(_SINGLE)
    if single is not None:
        return {_SINGLE: single}
    return {name: _shard(folder, name) for name in dict.fromkeys(_weight_map(folder).values())}


def _whole_inventory(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint."""
    files = weight_files(folder)
    if list(files) == [_SINGLE]:
        return _read_header(files[_SINGLE], folder.root / _SINGLE)
    weight_map = _weight_map(folder)
    stored: dict[str, StoredTensor] = {}
    for name, path in files.items():
        for key, tensor in _read_header(path, folder.root / name).items():
            if key in stored:
                raise WeightsError(f"tensor {key!r} is twice in the checkpoint: {stored[key].file.name} and {name}")
            stored[key] = tensor
            if weight_map.get(key) != name:
                raise WeightsError(f"tensor {key!r} of {name} is not listed there by {_INDEX}")
    _refuse(f"listed by {_INDEX} but missing in their files", weight_map.keys() - stored.keys())
    return stored


def _weight_map(folder: ModelFolder) -> dict[str, str]:
    index = folder.read_json(_INDEX)
    if index is None:
        others = sorted(name for name in os.listdir(folder.root) if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        found = f"; {others[0]} was found, but it could run code and is never loaded; convert it" if others else ""
        raise WeightsError(f"{folder.root} has neither {_SINGLE} nor {_INDEX}{found}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{_INDEX} must have a weight_map from tensor names to file names")
    return weight_map


def _shard(folder: ModelFolder, name: str) -> Path:
    if not name.endswith(".safetensors"):
        raise WeightsError(f"weights file {name!r} is refused: only .safetensors is loaded, other formats can run code")
    return folder.require(name)


def _read_header(path: Path, named: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file: 8 bytes of length, then JSON. Errors say `named`, not a link's target."""
    with path.open("rb") as file:
        prefix = file.read(9)
        length = int.from_bytes(prefix[:8], "little")
        if prefix[8:] != b"{" or length > min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise WeightsError(f"{named} is not a safetensors file: {_describe(prefix)}")
        try:
            header = json.loads(prefix[8:] + file.read(length - 1), object_pairs_hook=_unique)
            with safe_open(path, framework="pt"):  # proves that offsets are in order, disjoint and inside the file
                pass
        except (ValueError, RecursionError, SafetensorError) as error:
            raise WeightsError(f"{named} has a broken header or is cut short: {error}") from None
    header.pop("__metadata__", None)
    return {key: StoredTensor(path, key, entry["dtype"], tuple(entry["shape"])) for key, entry in header.items()}


def _describe(prefix: bytes) -> str:
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it is a serialised Python object, which can run code"
    kind = _FOREIGN.get(prefix[:4])
    return f"it is {kind}" if kind else "its header is longer than the file, or no JSON"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _check(stored: dict[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    """Compare names, shapes and types with what the model needs. Drops what old checkpoints carry needlessly."""
    for key in [key for key in stored if key.endswith(".rotary_emb.inv_freq")]:
        del stored[key]
    copies = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    _refuse("missing in the checkpoint", expected.keys() - stored.keys())
    _refuse("unexpected in the checkpoint", stored.keys() - expected.keys() - copies.keys())
    for key, tensor in stored.items():
        shape = expected[copies.get(key, key)]
        if tensor.shape != shape:
            raise WeightsError(f"tensor {key!r} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in _DTYPES:
            raise WeightsError(f"tensor {key!r} must be one of {', '.join(_DTYPES)}, got {tensor.dtype}")


def _refuse(what: str, keys: Iterable[str]) -> None:
    names = sorted(keys)
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise WeightsError(f"tensors {what}: {', '.join(names[:8])}{more}")


def _stream(
    stored: Mapping[str, StoredTensor], views: Mapping[str, torch.Tensor], cuts: Mapping[str, TensorSlice], tied: bool
) -> None:
    """Copy tensor by tensor, converting to the model's type on the way; of a cut one only the part is read."""
    with tqdm(total=len(views), desc="loading weights", unit="tensor", disable=None) as bar:
        for path in dict.fromkeys(tensor.file for tensor in stored.values()):
            with safe_open(path, framework="pt") as file:
                for key in (key for key, tensor in stored.items() if tensor.file == path and key in views):
                    name = stored[key].name
                    part = file.get_slice(name)[cuts[key].where] if key in cuts else file.get_tensor(name)
                    views[key].copy_(part)
                    bar.update()
    if tied and "lm_head.weight" in stored:
        _check_tied(stored["lm_head.weight"], views["model.embed_tokens.weight"])


def _check_tied(stored: StoredTensor, embedding: torch.Tensor) -> None:
    with safe_open(stored.file, framework="pt") as file:
        head = file.get_tensor(stored.name).to(embedding)
    if not torch.equal(head, embedding):
        raise WeightsError(
            "tensor 'lm_head.weight' must equal 'model.embed_tokens.weight' in a model with tie_word_embeddings, they "
            "differ; set tie_word_embeddings to false in config.json"
        )


def _randomise(
    views: Mapping[str, torch.Tensor], cuts: Mapping[str, TensorSlice], device: torch.device, seed: int
) -> None:
    """Draw every tensor whole, whatever part of it is wanted, so that a model is the same however it is cut."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in views.items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        elif name.endswith(".bias"):
            view.zero_()
        elif name in cuts:
            whole = view.new_empty(cuts[name].full).normal_(std=_DUMMY_STD, generator=generator)
            view.copy_(whole[cuts[name].where])
        else:
            view.normal_(std=_DUMMY_STD, generator=generator)
