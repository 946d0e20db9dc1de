"""KVCacheDtype: the format of each layer's keys and values, where some layers are kept in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError
from .registry import format_of

_SKIP = "skip="
_TEXT = "the name of a format, or NAME:skip=LAYERS such as int8:skip=0,-1"


@dataclass(frozen=True, slots=True)
class KVCacheDtype:
    """What `kv_cache_dtype` says, of a layer, a cache, a model or an engine: a format, and layers that stay in the
    model's dtype. Whoever takes one takes its text too.

    Args:
        name: of a format, as "int8", which says how K and V are stored.
        skip_layers: indices of layers whose format is "auto"; negative ones count from the last layer.

    Raises:
        InvalidInputError: an unknown format, an index that is no integer or stands there twice, or layers of "auto".
    """

    name: str = "auto"
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(self.name))
        native = format_of(self.name).name == "auto"
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))
        if any(type(index) is not int for index in self.skip_layers) or len({*self.skip_layers}) < len(
            self.skip_layers
        ):
            raise InvalidInputError("skip_layers", "integers, each once", repr(self.skip_layers))
        if native and self.skip_layers:
            remedy = "name a format such as int8, or skip none"
            raise InvalidInputError("skip_layers", "() for kv_cache_dtype='auto'", repr(self.skip_layers), remedy)

    def __str__(self) -> str:
        return self.name + (f":{_SKIP}{','.join(map(str, self.skip_layers))}" if self.skip_layers else "")

    @classmethod
    def of(cls, given: str | KVCacheDtype) -> KVCacheDtype:
        """What is given, or what a text says: the name of a format, or as `int8:skip=0,-1`.

        Raises:
            InvalidInputError: as of the class, or another text.
        """
        if isinstance(given, KVCacheDtype):
            return given
        if not isinstance(given, str):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(given))
        name, colon, rest = given.partition(":")
        if not colon:
            return cls(name)
        try:
            indices = tuple(int(one) for one in rest.removeprefix(_SKIP).split(","))
        except ValueError:
            indices = None
        if indices is None or not rest.startswith(_SKIP):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(given))
        return cls(name, indices)

    def of_one_layer(self) -> str:
        """The format of a layer that does not know which one of a model it is, by name.

        Raises:
            InvalidInputError: some layers are kept in the model's dtype, which this one may be.
        """
        if self.skip_layers:
            remedy = "give each layer its own: KVCacheDtype.of(...).of_layers(num_layers)[index]"
            raise InvalidInputError("kv_cache_dtype", "the format of one layer, without skip=", repr(str(self)), remedy)
        return self.name

    def of_layers(self, num_layers: int) -> Sequence[str]:
        """The format of each of a model's layers, by name.

        Raises:
            InvalidInputError: an index that no layer has, or two of one layer.
        """
        names = [self.name] * num_layers
        for index in self.skip_layers:
            if not -num_layers <= index < num_layers:
                raise InvalidInputError("skip_layers", f"layers in [{-num_layers}, {num_layers})", index)
            if names[index] == "auto":
                raise InvalidInputError("skip_layers", "each layer once", repr(self.skip_layers))
            names[index] = "auto"
        return names
