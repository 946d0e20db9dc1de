"""What a fault is, and where it goes: its text is looked for in what holds it by name, in whatever file that lies.

A fault outlives a move of code to other files and another indentation of it: no file is named, and white space, line
breaks among it, does not count. Where several functions of one name hold the text, `word:name` takes those with that
word, a folder's or a file's, in their path.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("pagedattn", "engine", "tests")


class Fault(NamedTuple):
    """A fault.

    Args:
        name: what is wrong with it in place.
        holder: qualified name of the function, method, class or constant that holds the text: `BlockPool.free`,
            `decode:_attend`.
        old: text that occurs there once.
        new: what it becomes; its lines after the first are indented like the line where the text begins.
        tests: file name of a test module, and words that an id there must hold: `test_decode.py ragged [fp8`.
    """

    name: str
    holder: str
    old: str
    new: str
    tests: str


class Definition(NamedTuple):
    """What a qualified name names: the file, and where in its text it begins and ends."""

    file: Path
    name: str
    begin: int
    end: int

    def matches(self, old: str) -> list[re.Match[str]]:
        return list(_pattern(old).finditer(_text(self.file), self.begin, self.end))


class AnchorError(ValueError):
    """No place, or several, for a fault."""


def mutated(root: Path, fault: Fault) -> tuple[Path, str]:
    """The file that a fault changes, relative to the root, and what it becomes.

    Raises:
        AnchorError: nothing of that name holds the text, or more than one does, or one does more than once.
    """
    named = [one for one in definitions(root).get(fault.holder.split(":")[-1], ()) if _has_word(one, root, fault)]
    found = [(one, match) for one in named for match in one.matches(fault.old)]
    if len(found) != 1:
        raise AnchorError(_wrong(root, fault, named, found))
    (place, match), text = found[0], _text(found[0][0].file)
    line = text[text.rfind("\n", 0, match.start()) + 1 :]
    new = fault.new.replace("\n", "\n" + line[: len(line) - len(line.lstrip(" "))])
    return place.file.relative_to(root), text[: match.start()] + new + text[match.end() :]


def module_of(root: Path, fault: Fault) -> Path:
    """The test module that a fault names.

    Raises:
        AnchorError: there is none of that name below the tests, or more than one.
    """
    name = fault.tests.split()[0]
    found = sorted((root / "tests").rglob(name))
    if len(found) != 1:
        where = ", ".join(str(one.relative_to(root)) for one in found) or "no file"
        raise AnchorError(f"{fault.name!r}: tests must begin with a test module's file name, got {name!r}: {where}")
    return found[0].relative_to(root)


@cache
def definitions(root: Path) -> dict[str, list[Definition]]:
    """What the root's folders define, by qualified name: a function in a function is `outer.inner`."""
    out: dict[str, list[Definition]] = {}
    for file in (file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))):
        if file.name.startswith("mutant_list"):  # which hold the text of each fault
            continue
        at = [0, *accumulate(map(len, _text(file).splitlines(keepends=True)))]
        for name, first, last in _named(ast.parse(_text(file)), "", constants=True):
            out.setdefault(name, []).append(Definition(file, name, at[first - 1], at[last]))
    return out


def _named(parent: ast.AST, prefix: str, constants: bool) -> Iterator[tuple[str, int, int]]:
    """Qualified names, with their first and last line; of what is assigned, only what is not in a function."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield prefix + node.name, first, node.end_lineno or first
            yield from _named(node, f"{prefix}{node.name}.", isinstance(node, ast.ClassDef))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and constants:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            yield from ((prefix + one.id, node.lineno, node.end_lineno or node.lineno) for one in names)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _named(node, prefix, constants)


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """The text with any white space between its words; around it, where the text has some there."""
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise AnchorError("a fault's text must not be empty: nothing is everywhere")
    gaps = (r"\s+" if re.fullmatch(r"\w\w", a[-1] + b[0]) else r"\s*" for a, b in pairwise(words))
    inner = re.escape(words[0]) + "".join(gap + re.escape(word) for gap, word in zip(gaps, words[1:], strict=True))
    return re.compile(r"\s*" * text[0].isspace() + inner + r"\s*" * text[-1].isspace())


def _has_word(place: Definition, root: Path, fault: Fault) -> bool:
    word, colon, _ = fault.holder.rpartition(":")
    return not colon or word in place.file.relative_to(root).with_suffix("").parts


def _wrong(root: Path, fault: Fault, named: list[Definition], found: list[tuple[Definition, re.Match[str]]]) -> str:
    def listed(places: list[tuple[Definition, re.Match[str]]]) -> str:
        return "".join(
            f"\n  {one.file.relative_to(root)}:{_text(one.file).count(chr(10), 0, match.start()) + 1} {one.name}"
            for one, match in places
        )

    about = f"{fault.name!r}: {fault.holder} must hold {fault.old!r} once"
    if found:
        return f"{about}, got {len(found)} places; name the folder or file (word:name) or more text:{listed(found)}"
    every = (one for group in definitions(root).values() for one in group)  # what holds another one is before it
    others = {(one.file, match.start()): (one, match) for one in every for match in one.matches(fault.old)}
    missing = "no such text there" if named else "nothing of that name"
    return f"{about}, got {missing}; the text is in:{listed(list(others.values())) or ' nothing'}"
