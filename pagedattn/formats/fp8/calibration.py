"""KVScales: the largest keys and values of a model, from which fp8 caches get a scale for each layer and KV head."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import InvalidInputError
from ..registry import format_of
from .calibration_file import CALIBRATE, SCHEMA_VERSION, LayerMaxima, parse
from .fingerprint import fingerprint
from .format import FP8, Fp8Rows

_TINY = torch.finfo(torch.float32).tiny  # a smaller scale would be flushed to zero


class ScaledLayer(Protocol):
    """What a calibration needs of an `Attention`."""

    @property
    def spec(self) -> Any: ...
    def set_kv_scales(self, k_scale: Any, v_scale: Any, source: str) -> None: ...


@dataclass(frozen=True)
class KVScales:
    """A calibration: what `pagedattn calibrate` found of a model's keys and values, and of which checkpoint.

    Attributes:
        layers: the maxima of each layer.
        num_tokens: how many tokens were seen.
        checkpoint: the fingerprint of each safetensors file, by its name in the model folder.
        version: of the pagedattn that made it.
        source: what errors call it; the path of a file that was loaded.
    """

    layers: tuple[LayerMaxima, ...]
    num_tokens: int
    checkpoint: Mapping[str, str]
    version: str
    source: str = "KVScales"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVScales:
        """Read a file of `pagedattn calibrate`.

        Raises:
            InvalidInputError: there is none, it is not of a known schema version, or an entry is missing or not one.
        """
        if not isinstance(path, str | os.PathLike):
            raise InvalidInputError("kv_scales", "the path of a file", type(path).__name__, CALIBRATE)
        source = os.fspath(path)
        return cls(*parse(source), source=source)

    @classmethod
    def measured(
        cls, layers: Iterable[LayerMaxima], num_tokens: int, files: Mapping[str, Path], version: str
    ) -> KVScales:
        """A calibration of the model that is in these safetensors `files`, named as in the model folder.

        Raises:
            OSError: a file cannot be read.
        """
        return cls(tuple(layers), num_tokens, {name: fingerprint(path) for name, path in files.items()}, version)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, in one piece or not at all.

        Raises:
            OSError: it cannot be written there.
        """
        layers = [
            {
                "num_kv_heads": len(one.key),
                "head_dim": one.head_dim,
                "head_dim_v": one.head_dim_v,
                "key_max": one.key,
                "value_max": one.value,
            }
            for one in self.layers
        ]
        content = {
            "schema_version": SCHEMA_VERSION,
            "pagedattn_version": self.version,
            "num_tokens": self.num_tokens,
            "checkpoint": dict(self.checkpoint),
            "num_layers": len(layers),
            "layers": layers,
        }
        part = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def check_format(kv_cache_dtype: str, given: object) -> None:
        """Raise InvalidInputError unless caches of this format take the scales `given`."""
        if not isinstance(format_of(kv_cache_dtype).key, Fp8Rows):
            expected = f"None for kv_cache_dtype={kv_cache_dtype!r}, which takes no scales"
            got = repr(given if isinstance(given, str) else type(given).__name__)
            raise InvalidInputError("kv_scales", expected, got, "give kv_cache_dtype='fp8' or 'fp8_e5m2' with it")

    def check_shapes(self, layers: Iterable[tuple[int, int, int]]) -> None:
        """Raise InvalidInputError unless it is of a model whose layers have these KV heads, head_dim and head_dim_v."""
        expected, found = list(layers), [(len(one.key), one.head_dim, one.head_dim_v) for one in self.layers]
        if found == expected:
            return
        if len(found) != len(expected):
            wanted, got = f"{len(expected)} layers", f"{len(found)}"
        else:
            index = next(index for index, one in enumerate(found) if one != expected[index])
            names = "(KV heads, head_dim, head_dim_v)"
            wanted, got = f"{expected[index]} {names} in layer {index}", f"{found[index]}"
        raise InvalidInputError(
            "kv_scales", f"of a model with {wanted}", f"{got} in {self.source}", f"{CALIBRATE} with this model"
        )

    def check_checkpoint(self, find: Callable[[str], Path | None]) -> None:
        """Raise InvalidInputError unless the model's weights are those that were calibrated.

        Args:
            find: the path of a file of the model folder by its name there, None where there is none.
        """
        for name, known in self.checkpoint.items():
            path = find(name)
            if path is None or fingerprint(path) != known:
                what = f"which has {'another' if path else 'a'} {name}"
                remedy = f"{CALIBRATE} with this model"
                raise InvalidInputError(
                    "kv_scales", "of the checkpoint that is loaded", f"{self.source}, {what}", remedy
                )

    def check_layers(self, layers: Iterable[ScaledLayer]) -> None:
        """As `check_shapes`, of these layers."""
        self.check_shapes([(one.spec.kv_heads, one.spec.head_dim, one.spec.value_dim) for one in layers])

    def give(self, layers: Sequence[ScaledLayer], kv_cache_dtype: str, heads: slice | None = None) -> None:
        """Give each layer whose cache takes scales its own, those of the KV heads `heads` of the model, None for all.

        Raises:
            InvalidInputError: a format that takes no scales.
            UnsupportedError: the backend asked for does not serve such scales.
        """
        some = heads or slice(None)
        for layer, (key, value) in zip(layers, self.scales(kv_cache_dtype), strict=True):
            if layer.spec.format.takes_scales:
                layer.set_kv_scales(key[some], value[some], self.source)

    def scales(self, kv_cache_dtype: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer, k_scale and v_scale, float32 [Hkv] on the CPU: maximum / largest finite value of the format,
        1 for a head that was only zeros.

        Raises:
            InvalidInputError: a format that takes no scales.
        """
        self.check_format(kv_cache_dtype, self.source)
        rows = format_of(kv_cache_dtype).key
        limit = FP8[rows.stored] if isinstance(rows, Fp8Rows) else 1.0
        return [(_scales(one.key, limit), _scales(one.value, limit)) for one in self.layers]


def _scales(maxima: tuple[float, ...], limit: float) -> torch.Tensor:
    numbers = [max(one / limit, _TINY) if one else 1.0 for one in maxima]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")
