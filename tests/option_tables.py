"""The tables of docs/configuration.md, from what the code says: `python tests/option_tables.py` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import getdoc
from pathlib import Path

from pagedattn import env
from pagedattn.engine import EngineConfig, SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def variables() -> str:
    """Of the environment; the texts name the defaults themselves."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in env.VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def meanings(kind: type) -> dict[str, str]:
    """What the section `Attributes` of a docstring says of each name."""
    section = re.split(r"^\w+:$", (getdoc(kind) or "").partition("\nAttributes:\n")[2], flags=re.MULTILINE)[0]
    items = re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in (item.split(": ", 1) for item in items)}


def options(kind: type) -> str:
    """The fields of a dataclass: name, default, meaning."""
    rows, said = [], meanings(kind)
    for field in fields(kind):
        default = "required" if field.default is MISSING else f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | {default} | {said.pop(field.name)} |")
    assert not said, f"{kind.__name__} has no field of the name {', '.join(said)}"
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {
    "pagedattn.env": variables,
    "EngineConfig": lambda: options(EngineConfig),
    "SamplingParams": lambda: options(SamplingParams),
}


def written(page: str) -> str:
    """The page with its tables as the code has them."""
    for name, table in TABLES.items():
        before, place, rest = page.partition(f"<!-- {name} -->\n")
        assert place, f"docs/configuration.md needs a place for {name}"
        _, end, rest = rest.partition("\n<!-- end -->")
        page = before + place + table() + end + rest
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
