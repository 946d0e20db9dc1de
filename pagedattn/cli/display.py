"""Specs, capabilities and tables as text that a person reads, or as plain values that JSON has."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum

import torch

from ..spec import GraphLevel
from ..spec.capabilities import Capabilities

WIDTH = 120
MIN_COLUMN = 17  # five backends side by side


def text(name: str, value: object) -> str:
    """The value of the field or fact `name`, for a person."""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, GraphLevel):
        return value.name.lower().replace("_", " ")
    if isinstance(value, tuple | list):
        return ("." if name.endswith("capability") else ", ").join(text("", one) for one in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    if isinstance(value, float):
        return f"{value:.4g}"
    return "any" if value is None else str(value.value if isinstance(value, Enum) else value)


def plain(value: object) -> object:
    """The value as JSON has it: dataclasses as objects, dtypes and enums by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, GraphLevel):
        return value.name.lower()
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")


def print_json(value: dict[str, object]) -> None:
    """Print one object, as `plain` has it."""
    print(json.dumps(plain(value), indent=1))


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Two columns: what, and its value."""
    lines = list(pairs)
    left = max((len(name) for name, _ in lines), default=0) + 2
    return "\n".join(wrapped(f"{name:{left}}{value}", left) for name, value in lines)


def wrapped(line: str, indent: int) -> str:
    """One line or several of at most WIDTH columns, the later ones indented; no word is cut, for commands and paths."""
    rest = " " * indent
    return textwrap.fill(line, WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def matrix(known: dict[str, Capabilities]) -> str:
    """Features down, backends across; as many tables as it takes to stay within WIDTH columns."""
    left = max(len(one.name) for one in fields(Capabilities)) + 2
    per_table = (WIDTH - left) // (MIN_COLUMN + 2)
    names = list(known)
    groups = [names[start : start + per_table] for start in range(0, len(names), per_table)]
    return "\n\n".join(_table({name: known[name] for name in group}, left) for group in groups)


def _table(known: dict[str, Capabilities], left: int) -> str:
    column = (WIDTH - left) // len(known) - 2
    lines = [_line("", list(known), left, column)]
    for one in fields(Capabilities):
        cells = [textwrap.wrap(text(one.name, getattr(serves, one.name)), column) for serves in known.values()]
        for row in range(max(map(len, cells))):
            texts = [cell[row] if row < len(cell) else "" for cell in cells]
            lines.append(_line("" if row else one.name, texts, left, column))
    return "\n".join(lines)


def _line(title: str, texts: list[str], left: int, column: int) -> str:
    return (f"{title:{left}}" + "  ".join(f"{one:{column}}" for one in texts)).rstrip()


def markdown_matrix(known: dict[str, Capabilities]) -> str:
    """Features down, backends across, as a table in Markdown."""
    lines = [["", *(f"`{name}`" for name in known)], ["---"] * (len(known) + 1)]
    for one in fields(Capabilities):
        lines.append([f"`{one.name}`", *(text(one.name, getattr(serves, one.name)) for serves in known.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
