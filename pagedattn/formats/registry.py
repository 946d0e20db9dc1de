"""The cache formats by the names that `kv_cache_dtype` takes."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache

import torch

from ..errors import InvalidInputError
from .base import CacheFormat
from .fp8.format import E4M3, E5M2
from .int4.format import INT4
from .int8.format import INT8
from .k8v4.format import K8V4
from .mla_rows.deepseek import DS_MLA
from .native.format import NATIVE
from .turboquant.format import TURBOQUANT

FORMATS = {one.name: one for one in (NATIVE, E4M3, E5M2, INT8, K8V4, INT4, *TURBOQUANT)}
ALIASES = {"fp8": "fp8_e4m3", "k4v3": "turboquant_k4v3", "k3v4": "turboquant_k3v4"}
NAMES = (*FORMATS, *ALIASES)
_BY_NAME = {**FORMATS, DS_MLA.name: DS_MLA}
_NAME = re.compile(r"([^:]*)(?::window=(\d{1,18}))?(?::first=(\d{1,18}))?", re.ASCII)
# What elements say of themselves; other formats are to be named.
_BY_DTYPE = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def format_of(name: str) -> CacheFormat:
    """The format of a `kv_cache_dtype`: a name, or NAME:window=N:first=N, or with one of the two, for one whose last N
    tokens, or first ones, are not encoded.

    Raises:
        InvalidInputError: there is none of this name, or it has no such window.
    """
    found = _BY_NAME.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None and isinstance(name, str) and (parts := split_name(name)) is not None and parts[0] != name:
        name, window, first = parts
        return _with_native(name, window or 0, first)
    if found is None:
        near = get_close_matches(name.lower(), (*NAMES, DS_MLA.name), 1) if isinstance(name, str) else []
        remedy = f"did you mean {near[0]}?" if near else "name one of these; docs/formats.md says which to take"
        raise InvalidInputError("kv_cache_dtype", f"one of {', '.join(NAMES)}", repr(name), remedy)
    return found


def split_name(text: str) -> tuple[str, int | None, int] | None:
    """NAME:window=N:first=N as a name and the two numbers, None and 0 where one is not given; None of another text."""
    found = _NAME.fullmatch(text)
    return None if found is None else (found[1], None if found[2] is None else int(found[2]), int(found[3] or 0))


@lru_cache(maxsize=64)
def _with_native(name: str, window: int, first: int) -> CacheFormat:
    """One object however often it is asked for."""
    return format_of(name).with_native(window, first)


def format_of_pair(key: str, value: str) -> CacheFormat:
    """The format whose keys are stored as `key`, and its values as `value`: names of row formats, as "rotated_int4".

    Raises:
        InvalidInputError: there is none.
    """
    wanted = tuple(ALIASES.get(one, one) if isinstance(one, str) else None for one in (key, value))
    pairs: dict[tuple[object, ...], CacheFormat] = {(x.key.name, x.value.name): x for x in FORMATS.values()}
    if wanted not in pairs:
        known = "; ".join(f"{k!r} and {v!r}" for k, v in pairs)
        remedy = "docs/formats.md says what each is"
        raise InvalidInputError("key and value", f"a pair that a format has: {known}", f"{key!r} and {value!r}", remedy)
    return pairs[wanted]


def stored_as(name: str | None, stored: torch.dtype) -> CacheFormat:
    """The format of a cache: the one named, or where that is None or "auto", what elements of this dtype say."""
    return _BY_DTYPE.get(stored, NATIVE) if name is None or name == "auto" else format_of(name)
