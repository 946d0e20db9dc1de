"""Signatures of the kernel libraries themselves, read from their sources; see tests/peer_sources.py."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import peer_sources
import pytest

ROOT = Path(__file__).parents[2]
_KINDS = inspect.Parameter


def source_of(distribution: str, release: str, file: str) -> Path:
    """A file of a library. Where it was not fetched the test is skipped, and fails if EXPECT_PEERS is set."""
    root = Path(os.environ.get("PEERS") or ROOT / ".venv" / "peers")
    path = peer_sources.folder_of(root, distribution, release) / file
    if not path.exists():
        text = f"{path} is not there; fetch it: python tests/peer_sources.py {root}"
        (pytest.fail if os.environ.get("EXPECT_PEERS") else pytest.skip)(text)
    return path


def signature_of(path: Path, name: str) -> inspect.Signature:
    """Of `function` or `Class.method` in a file. Defaults are what `repr` gives: `None`, `0.0`, `torch.bfloat16`."""
    found: Any = _parsed(path)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        # Overloads come before the function itself.
        found = next((one for one in reversed(found.body) if isinstance(one, kinds) and one.name == part), None)
        assert found is not None, f"{path} has no {name}"
    return inspect.Signature(list(_parameters(found.args)))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for one, default in zip(plain, defaults, strict=True):
        yield _parameter(one, default, _KINDS.POSITIONAL_OR_KEYWORD)
    if arguments.vararg:
        yield _parameter(arguments.vararg, None, _KINDS.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(one, default, _KINDS.KEYWORD_ONLY)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, None, _KINDS.VAR_KEYWORD)


def _parameter(one: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    return _KINDS(one.arg, kind, default=_KINDS.empty if default is None else ast.unparse(default))


def defaults_of(signature: inspect.Signature) -> dict[str, str | None]:
    """Each parameter with its default as text; None where it has none. `*args` and `**kwargs` are left out."""
    variadic = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
    found = [one for one in signature.parameters.values() if one.kind not in variadic]
    texts = {one.name: one.default if isinstance(one.default, str) else repr(one.default) for one in found}
    return {one.name: None if one.default is _KINDS.empty else texts[one.name] for one in found}


def stand_ins(function: Callable[..., Any]) -> dict[str, str | None]:
    """`defaults_of` a function that can be imported, whose defaults are values."""
    parameters = inspect.signature(function).parameters.values()
    text = [one if one.default is _KINDS.empty else one.replace(default=repr(one.default)) for one in parameters]
    return defaults_of(inspect.Signature(text))


def held_to(signature: inspect.Signature, function: Callable[..., Any], seen: Callable[[set[str]], object]) -> Any:
    """`function`, whose arguments must also fit `signature`; `seen` is told the names of what each call passes."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        seen(set(signature.bind(*args, **kwargs).arguments))
        return function(*args, **kwargs)

    return checked
