"""What a terminal gets: tables and a bar by rich; what a file gets, or a machine without rich: plain text."""

from __future__ import annotations

import io
import sys

import pytest

from pagedattn.backends.torch_native import TorchBackend
from pagedattn.cli import command, display, terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, *streams: str) -> Screen:
    """Standard streams become a terminal: within a test, since pytest has put its own in their place by then."""
    screen = Screen()
    for name in streams or ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_a_terminal_gets_tables_of_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    screen = on_terminal(monkeypatch)
    terminal.show_rows([("name", "[bold]not markup[/bold] " + "x" * 200)])
    terminal.show_matrix({"TORCH": TorchBackend.capabilities()})
    out = screen.getvalue()
    assert "\x1b[1mname" in out and "[bold]not markup[/bold]" in out and "sliding_window" in out
    assert out.replace("\n", "").count("x") >= 200


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal.show_rows([("name", "value")])
    terminal.show_matrix({"TORCH": TorchBackend.capabilities()})
    assert screen.getvalue() == f"name  value\n{display.matrix({'TORCH': TorchBackend.capabilities()})}\n"
    with terminal.progress() as tell:
        assert tell is None


def test_a_bar_is_drawn_on_standard_error_and_leaves_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    screen = on_terminal(monkeypatch, "stderr")
    monkeypatch.setattr(sys, "stdout", plain := io.StringIO())
    with terminal.progress() as tell:
        assert tell is not None
        tell("[case]", 3, 4)
        print("asked for")
    assert plain.getvalue() == "asked for\n"
    assert "[case]" in screen.getvalue() and "75%" in screen.getvalue() and "asked for" not in screen.getvalue()


def test_json_is_json_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch)
    assert command.main(["backends", "--json"]) == 0
    assert screen.getvalue().startswith("{\n") and "\x1b" not in screen.getvalue()
