"""Tables and progress bars on a terminal, by rich where it is installed; plain text everywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from ..spec.capabilities import Capabilities
from . import display

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, int, int], None]  # what is done now, how many are done, how many there are


class UsageError(Exception):
    """What was typed cannot be meant; the message is one line."""


def make_printable() -> None:
    """Let printing succeed whatever standard output is: closed, or of an encoding that lacks what a model says."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    elif isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def show_rows(pairs: Iterable[tuple[str, str]]) -> None:
    """Print two columns: what, and its value."""
    console, lines = _console(sys.stdout), list(pairs)
    if console is None:
        print(display.rows(lines))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(Text(name), Text(value))
    console.print(table)


def show_matrix(known: dict[str, Capabilities]) -> None:
    """Print features down and backends across."""
    console = _console(sys.stdout)
    if console is None:
        print(display.matrix(known))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    table.add_column(no_wrap=True)
    for name in known:
        table.add_column(Text(name), overflow="fold")
    for one in fields(Capabilities):
        values = (display.text(one.name, getattr(serves, one.name)) for serves in known.values())
        table.add_row(Text(one.name, style="bold"), *map(Text, values))
    console.print(table)


@contextmanager
def progress() -> Iterator[Tell | None]:
    """A progress bar on standard error; None where that is no terminal."""
    console = _console(sys.stderr)
    if console is None:
        yield None
        return
    from rich.markup import escape
    from rich.progress import Progress

    # Standard output is for what was asked for, maybe into a file: rich must not take it over.
    with Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(task, description=escape(what[:40]), completed=done, total=total)


def _console(stream: TextIO) -> Console | None:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
