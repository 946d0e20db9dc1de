"""`pagedattn chat`: a conversation on a terminal, or with a script that writes a message per line."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import RequestError
from . import display
from .generate import add_model_options, as_object, load

_HELP = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D or /exit ends."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn chat`."""
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")


def run(args: argparse.Namespace) -> int:
    """Answer message after message until they end; status 1 where one could not be answered."""
    llm, params = load(args)
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages, status = list(first), 0
    if sys.stdin.isatty():
        print(_HELP)
    for text in _lines():
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": text})
        try:
            with _uninterrupted():
                prompt = llm.encode_chat(messages)
            answer, completion = _answer(llm.stream(prompt, params), quiet=args.json)
        except RequestError as error:  # too long for the model, say: what was said before still stands
            messages.pop()
            print(
                f"pagedattn: {error}" + ("; /reset begins again" if len(messages) > len(first) else ""), file=sys.stderr
            )
            status = 1
            continue
        if args.json:
            told = {"text": answer, "finish_reason": "abort"} if completion is None else as_object(completion)
            print(json.dumps(display.plain({"message": text} | told)), flush=True)
        if completion is not None and completion.finish_reason == "error":
            print(f"pagedattn: {completion.explanation}", file=sys.stderr)
            status = 1
        messages.append({"role": "assistant", "content": answer})
    return status


def _answer(deltas: Any, quiet: bool) -> tuple[str, Any]:
    """Print an answer as it comes; its text, and the completion, None where it was stopped."""
    text, completion = "", None
    with _noted_interrupts() as pressed, suppress(KeyboardInterrupt):
        for delta in deltas:
            text += delta.text
            if not quiet:
                print(delta.text, end="", flush=True)
            if pressed:
                break
            completion = delta.completion
        deltas.close()
    if not quiet:
        print(" [stopped]" if completion is None else "", flush=True)
    return text, completion


def _lines() -> Iterator[str]:
    """What is typed, line by line; on a terminal with a prompt, history, and a Ctrl-C that only drops the line."""
    terminal = sys.stdin.isatty()
    if terminal:
        try:
            import readline  # noqa: F401  importing it gives input() a history
        except ImportError:
            pass
    while True:
        try:
            line = input("> ") if terminal else input()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print(f"\n{_HELP}")
            continue
        if line.strip():
            yield line.strip()


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """The first Ctrl-C is only noted, for the next token: as an exception it is lost where it meets a finalizer."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C goes to every process of the terminal: what renders the chat template, started here, must outlive it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
