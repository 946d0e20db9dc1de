"""The JSON file of a calibration, read strictly: it may be of another version, cut short, or edited."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ...errors import InvalidInputError

CALIBRATE = "run `pagedattn calibrate MODEL TEXT_FILE`"
SCHEMA_VERSION = 1
_MAX_BYTES = 64 << 20
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class LayerMaxima:
    """Of each KV head of a layer, the largest |K| as the cache stores it (rotated), and the largest |V|."""

    key: tuple[float, ...]
    value: tuple[float, ...]
    head_dim: int
    head_dim_v: int


def parse(source: str) -> tuple[tuple[LayerMaxima, ...], int, dict[str, str], str]:
    """Layers, tokens, fingerprints and version of the file `source`.

    Raises:
        InvalidInputError: as `KVScales.load`.
    """
    raw = _read(source)
    if raw.get("schema_version") != SCHEMA_VERSION:
        found = f"{raw.get('schema_version')!r} in {source}"
        raise InvalidInputError("kv_scales", f"of schema_version {SCHEMA_VERSION}", found, f"{CALIBRATE} again")
    layers = _entry(source, raw, "layers", "a list, not empty", lambda one: isinstance(one, list) and one)
    _entry(source, raw, "num_layers", f"{len(layers)}, as many as there are layers", lambda one: one == len(layers))
    checkpoint = _entry(source, raw, "checkpoint", "fingerprints by file name", _are_fingerprints)
    tokens = _entry(source, raw, "num_tokens", "a positive integer", _is_count)
    version = _entry(source, raw, "pagedattn_version", "a string", lambda one: isinstance(one, str))
    return tuple(_layer(source, f"layers[{n}]", one) for n, one in enumerate(layers)), tokens, checkpoint, version


def _read(source: str) -> dict[str, Any]:
    problem: object = "no file"
    try:
        if Path(source).is_file():
            with open(source, "rb") as file:
                raw = json.loads(file.read(_MAX_BYTES))
            if isinstance(raw, dict):
                return raw
            problem = type(raw).__name__
    except (OSError, ValueError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"no JSON: {error}"
    raise InvalidInputError("kv_scales", "a file of `pagedattn calibrate`", f"{source} ({problem})", CALIBRATE)


def _layer(source: str, where: str, raw: Any) -> LayerMaxima:
    if not isinstance(raw, dict):
        raise _wrong(source, where, "an object", raw)
    heads, dim, dim_v = (
        _entry(source, raw, name, "a positive integer", _is_count, where)
        for name in ("num_kv_heads", "head_dim", "head_dim_v")
    )
    key, value = (_maxima(source, f"{where}.{name}", raw.get(name), heads) for name in ("key_max", "value_max"))
    return LayerMaxima(key, value, dim, dim_v)


def _maxima(source: str, where: str, found: Any, heads: int) -> tuple[float, ...]:
    if not isinstance(found, list) or len(found) != heads:
        raise _wrong(source, where, f"{heads} numbers, one per KV head", found)
    for head, one in enumerate(found):
        if type(one) not in (int, float) or not 0 <= one <= _LARGEST or math.isnan(one):
            raise _wrong(source, f"{where}[{head}]", "a finite number of at least 0", one)
    return tuple(map(float, found))


def _entry(
    source: str, raw: dict[str, Any], name: str, expected: str, fits: Callable[[Any], Any], where: str = ""
) -> Any:
    if not fits(raw.get(name)):
        raise _wrong(source, f"{where}.{name}" if where else name, expected, raw.get(name))
    return raw[name]


def _wrong(source: str, where: str, expected: str, got: object) -> InvalidInputError:
    return InvalidInputError(f"{where} of kv_scales {source}", expected, repr(got)[:80], f"{CALIBRATE} again")


def _is_count(one: object) -> bool:
    return type(one) is int and one > 0


def _are_fingerprints(found: object) -> bool:
    if not isinstance(found, dict) or not found:
        return False
    paths = map(PurePosixPath, found)
    inside = all(str(path) and not path.is_absolute() and ".." not in path.parts for path in paths)
    return inside and all(isinstance(one, str) for one in found.values())
