"""Every text file is read and written as UTF-8, whatever the locale is: the encoding is named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("pagedattn", "engine", "bench", "examples", "tests")
SOURCES = sorted({ROOT / "setup.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))})


def without_encoding(source: str) -> Iterator[int]:
    """Lines of `read_text`, `write_text` and `open` of a text file that leave the encoding to the locale."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not any(keyword.arg in ("encoding", None) for keyword in node.keywords):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            built_in = isinstance(node.func, ast.Name)
            if name in ("read_text", "write_text"):
                missing = len(node.args) <= (name == "write_text")
            else:
                missing = name == "open" and _is_text(node, 1 if built_in else 0)
            if missing:
                yield node.lineno


def _is_text(call: ast.Call, position: int) -> bool:
    """Of an `open` whose mode is its argument of that position: `tarfile.open(path)` has none there."""
    modes = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    if not modes:
        return True
    return isinstance(modes[0], ast.Constant) and isinstance(modes[0].value, str) and "b" not in modes[0].value


def test_an_encoding_is_named() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert len(SOURCES) > 300 and not found, "name the encoding: " + ", ".join(found)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("path.read_text()", True),
        ("path.read_text(errors='replace')", True),
        ("path.read_text(encoding='utf-8')", False),
        ("folder.read_text('config.json', 100)", False),
        ("path.write_text(x)", True),
        ("path.write_text(x, encoding='utf-8')", False),
        ("open(x)", True),
        ("open(x, 'w')", True),
        ("open(x, mode='a')", True),
        ("open(x, 'rb')", False),
        ("path.open()", True),
        ("path.open('wb')", False),
        ("os.open(x, os.O_RDONLY)", False),
        ("tarfile.open(x)", False),
    ],
)
def test_what_leaves_the_encoding_to_the_locale(source: str, missing: bool) -> None:
    assert bool(list(without_encoding(source))) == missing
