"""KVCacheDtype: how keys and values of each layer are stored, where some layers are kept in the model's dtype."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from ..errors import InvalidInputError
from .registry import format_of, format_of_pair, split_name

_SKIP, _NO_WINDOW = ":skip=", ":window=0"
_TEXT = (
    "the name of a format, or NAME:window=TOKENS:first=TOKENS:skip=LAYERS, or with some of the three, such as "
    "int8:skip=0,-1"
)
_PAIR = re.compile("key=([^=,]+),value=([^=,]+)")
_INDEX = re.compile(r" *-?[0-9]{1,9} *")


@dataclass(frozen=True, slots=True, init=False)
class KVCacheDtype:
    """What `kv_cache_dtype` says, of a layer, a cache, a model or an engine: a format, and layers that stay in the
    model's dtype. Whoever takes one takes its text too.

    Args:
        name: of a format, as "k8v4", which says how K and V are stored; "auto" where nothing is said.
        skip_layers: indices of layers whose format is "auto"; negative ones count from the last layer.
        key, value: what K and V are stored as, in place of `name`: "int8" and "rotated_int4" are "k8v4".
        window: of how many tokens before its own block a query reads keys and values as the model computed them. The
            attribute `name` has it, as "turboquant4:window=64", and 0 where models have one else. None: none, but for a
            model (`of_model`).
        first: of how many tokens at a sequence's beginning a query reads them so; the name has it behind the window, as
            "turboquant4:window=64:first=4".

    Raises:
        InvalidInputError: an unknown format, a pair of K and V that no format has, one of them only, an index that is
            no integer or stands there twice, layers of "auto", or tokens that the format cannot leave as they are.
    """

    name: str
    skip_layers: tuple[int, ...]

    def __init__(
        self,
        name: str | None = None,
        skip_layers: Sequence[int] = (),
        *,
        key: str | None = None,
        value: str | None = None,
        window: int | None = None,
        first: int = 0,
    ) -> None:
        if key is not None or value is not None:
            if name is not None or key is None or value is None:
                given = ", ".join(f"{k}={v!r}" for k, v in (("name", name), ("key", key), ("value", value)) if v)
                raise InvalidInputError("kv_cache_dtype", "a name, or both a key and a value", given)
            name = format_of_pair(key, value).name
        name = "auto" if name is None else name
        if not isinstance(name, str):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(name))
        for kind, count in (("window", 0 if window is None else window), ("first", first)):
            if type(count) is not int:
                raise InvalidInputError(kind, "a number of tokens", repr(count))
        form = format_of(name)
        if window is None and (split_name(name) or (name, None))[1] == 0:
            window = 0  # of a name that says so
        if window or first:
            form = form.with_native(window or 0, first)
        name = form.name  # of an alias too: what is stored alike is equal
        if window == 0 and form.usual_window:
            name = name.replace(form.encoded_as, f"{form.encoded_as}{_NO_WINDOW}", 1)
        native = name == "auto"
        if not isinstance(skip_layers, Sequence):
            raise InvalidInputError("skip_layers", "integers, each once", repr(skip_layers), "(0,) skips layer 0")
        skip_layers = tuple(skip_layers)
        if any(type(index) is not int for index in skip_layers) or len({*skip_layers}) < len(skip_layers):
            raise InvalidInputError("skip_layers", "integers, each once", repr(skip_layers))
        if native and skip_layers:
            remedy = "name a format such as int8, or skip none"
            raise InvalidInputError("skip_layers", "() for kv_cache_dtype='auto'", repr(skip_layers), remedy)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "skip_layers", skip_layers)

    @property
    def key(self) -> str:
        """What K is stored as, of layers that are not skipped."""
        return format_of(self.name).key.name

    @property
    def value(self) -> str:
        """What V is stored as, of layers that are not skipped."""
        return format_of(self.name).value.name

    @property
    def window(self) -> int:
        """Of how many tokens before its own block a query reads what was not encoded."""
        return format_of(self.name).window

    @property
    def first(self) -> int:
        """Of how many tokens at a sequence's beginning a query reads what was not encoded."""
        return format_of(self.name).first

    def __str__(self) -> str:
        return self.name + (f"{_SKIP}{','.join(map(str, self.skip_layers))}" if self.skip_layers else "")

    @classmethod
    def of(cls, given: str | KVCacheDtype) -> KVCacheDtype:
        """What is given, or what a text says: the name of a format, or as `int8:skip=0,-1` or
        `turboquant4:window=64:first=4:skip=0`, where `key=int8,value=rotated_int4` may stand for a name.

        Raises:
            InvalidInputError: as of the class, or another text.
        """
        if isinstance(given, KVCacheDtype):
            return given
        if not isinstance(given, str):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(given))
        text, skip, layers = given.partition(_SKIP)
        parts, listed = split_name(text), layers.split(",") if skip else []
        if parts is None or not all(map(_INDEX.fullmatch, listed)):
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(given))
        indices = tuple(map(int, listed))
        name, window, first = parts
        pair = _PAIR.fullmatch(name)
        if pair is not None:
            name = format_of_pair(pair[1], pair[2]).name
        elif "=" in name:
            raise InvalidInputError("kv_cache_dtype", _TEXT, repr(given), "for NAME key=NAME,value=NAME may stand")
        return cls(name, indices, window=window, first=first)

    @classmethod
    def of_model(cls, given: str | KVCacheDtype) -> KVCacheDtype:
        """The same as a model takes it, whose second caches are made for it: where nothing is said of a window,
        TurboQuant leaves the last 64 tokens as they came ("turboquant4:window=0": none). Layers and caches take a name
        as it is.
        """
        stored = cls.of(given)
        form = format_of(stored.name)
        if form.window or _NO_WINDOW in stored.name or not form.usual_window:
            return stored
        return cls(form.encoded_as, stored.skip_layers, window=form.usual_window, first=form.first)

    def block_size(self, given: int | None) -> int:
        """Tokens per block: as given, or where None, 16 or what the format's block sizes are multiples of.

        Raises:
            InvalidInputError: blocks of a size that the format has not.
        """
        form = format_of(self.name)
        if given is None:
            return form.default_block_size
        if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
            raise InvalidInputError("block_size", "a number of tokens, at least 1", repr(given))
        form.check_block_size(given)
        return given

    def of_one_layer(self) -> str:
        """The format of a layer that does not know which one of a model it is, by name.

        Raises:
            InvalidInputError: some layers are kept in the model's dtype, which this one may be.
        """
        if self.skip_layers:
            remedy = "give each layer its own: KVCacheDtype.of(...).of_layers(num_layers)[index]"
            raise InvalidInputError("kv_cache_dtype", "the format of one layer, without skip=", repr(str(self)), remedy)
        return format_of(self.name).name

    def of_layers(self, num_layers: int) -> Sequence[str]:
        """The format of each of a model's layers, by name.

        Raises:
            InvalidInputError: an index that no layer has, or two of one layer.
        """
        names = [format_of(self.name).name] * num_layers
        for index in self.skip_layers:
            if not -num_layers <= index < num_layers:
                raise InvalidInputError("skip_layers", f"layers in [{-num_layers}, {num_layers})", index)
            if names[index] == "auto":
                raise InvalidInputError("skip_layers", "each layer once", repr(self.skip_layers))
            names[index] = "auto"
        return names
