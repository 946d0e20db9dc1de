"""The command `pagedattn`: what each backend serves, why one is chosen, what this machine has, and how fast it is."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import torch

from . import checkout, env
from .backends.base import Availability
from .backends.registry import backend_names, get_backend
from .capabilities import Capabilities, Rejection
from .display import matrix, plain, rows, text, wrapped
from .errors import InvalidInputError, UnsupportedError
from .ops import library
from .selector import Selection, select_backend
from .spec import AttentionSpec
from .spec_options import add_spec_options, spec_of


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and leaves the exit status to `main`."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is `sys.argv[1:]` where not given.

    Returns:
        The exit status: 0, 1 where nobody (or not the backend asked for) can serve the layer, 2 for a bad argument.
    """
    try:
        args = _parser().parse_args(argv)
        status = args.command(args)
        sys.stdout.flush()
        return status
    except (_UsageError, InvalidInputError) as error:
        print(f"pagedattn: {_one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`| head`) has left; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pagedattn", description="Paged attention: backends, how one is chosen, and this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        one.set_defaults(command=run)
        if run is not _bench:
            one.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        return one

    command("backends", _backends, "what every known backend serves, and whether it can run here")
    add_spec_options(command("why", _why, "which backend serves a layer, and why no other; exit status 1: none can"))
    command("env", _env, "versions, kernel libraries and PAGEDATTN_* variables")
    _add_bench_options(command("bench", _bench, "time attention and cache operations beside the other libraries"))
    return parser


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "suite",
        nargs="?",
        default="all",
        help="decode, prefill, mixed, cache, all (default: those four), sweep, shared, engine",
    )
    add("--backends", metavar="NAMES", help="TRITON,auto,FA3 and so on; all whose library is here where not given")
    add(
        "--workload",
        action="append",
        default=[],
        metavar="TEXT",
        help="such as 2q2k_64q1s4k, in place of a suite; of engine, one by name",
    )
    add("--json", type=Path, metavar="FILE", help="write meta and rows to FILE, after every workload")
    add("--plot", action="store_true", help="draw into the folder plots beside FILE; needs matplotlib")


def _bench(args: argparse.Namespace) -> int:
    checkout.load("bench")
    run = import_module("pagedattn.bench.command").run
    return run(args.suite, args.backends, args.workload, args.json, args.plot)


def _why(args: argparse.Namespace) -> int:
    spec = spec_of(args)
    try:
        selection, error = select_backend(spec, args.backend), None
    except UnsupportedError as failure:
        selection, error = None, str(failure).replace(str(spec), "this")
    facts = {} if selection is None else _winners(selection)
    rejections = {name: _rejections(name, spec) for name in backend_names()}
    if args.json:
        _print_json({"spec": spec, **facts, "error": error, "rejections": rejections})
    else:
        print(_told(spec))
        if selection is not None:
            print(rows((name, str(value)) for name, value in facts.items() if value))
            print(_losers(selection.rejections))
        else:
            able = [name for name, reasons in rejections.items() if not reasons]
            print(error, *([f"who can: {', '.join(able)}"] if able else []), sep="\n")
    return int(selection is None)


def _winners(selection: Selection) -> dict[str, object]:
    return {
        "prefill": selection.prefill.name,
        "prefill_variant": selection.prefill.variant(selection.spec),
        "decode": selection.decode.name,
        "decode_variant": selection.decode.variant(selection.spec),
        "block_size": selection.block_size,
        "chosen_by": selection.source,
    }


def _losers(rejections: Mapping[str, Sequence[Rejection]]) -> str:
    lines = []
    for name, reasons in rejections.items():
        lines += [f"not {name}:" if reasons else f"not {name}: lower priority"]
        lines += [wrapped(f"  {reason}", 4) for reason in reasons]
    return "\n".join(lines)


def _told(spec: AttentionSpec) -> str:
    """What the spec asks for: every field but those that are None, False or GraphLevel.NEVER (which is 0)."""
    pairs = ((one.name, getattr(spec, one.name)) for one in fields(spec))
    asked = " ".join(f"{name}={text(name, value)}" for name, value in pairs if value not in (None, False))
    if spec.device_type == "cuda" and spec.capability is None:
        asked += " (compute capability unknown, not checked: name one with --capability)"
    return wrapped(asked, 2)


def _rejections(name: str, spec: AttentionSpec) -> list[Rejection]:
    try:
        return get_backend(name).rejections(spec)
    except UnsupportedError as error:
        return [Rejection("availability", name, str(error))]


def _backends(args: argparse.Namespace) -> int:
    found = {name: _probe(name) for name in backend_names()}
    if args.json:
        _print_json({name: {"here": state, "capabilities": serves} for name, (state, serves) in found.items()})
        return 0
    print(rows((name, _state(state)) for name, (state, _) in found.items()), end="\n\n")
    print(matrix({name: serves for name, (_, serves) in found.items() if serves is not None}), end="\n\n")
    print("A backend may refuse a combination of these: `pagedattn why` says which, with the reason.")
    return 0


def _probe(name: str) -> tuple[Availability, Capabilities | None]:
    try:
        backend = get_backend(name)
        return backend.availability(), backend.capabilities()
    except Exception as error:  # whatever another package's backend raises must not hide the rest
        return Availability(ok=False, reason=_one_line(error)), None


def _state(state: Availability) -> str:
    if state.ok:
        return state.version
    return f"no: {state.reason}" + (f" ({state.hint})" if state.hint else "")


def _env(args: argparse.Namespace) -> int:
    facts = _machine()
    backends = {name: _probe(name)[0] for name in backend_names()}
    values = {name: os.environ.get(name) for name in env.VARIABLES}
    if args.json:
        told = {name: {"value": value, "meaning": env.VARIABLES[name]} for name, value in values.items()}
        _print_json({**facts, "backends": backends, "variables": told})
        return 0
    print(rows((name, text(name, value) if value else "none") for name, value in facts.items()), end="\n\n")
    print(rows((name, _state(state)) for name, state in backends.items()), end="\n\n")
    for name, value in values.items():
        print(f"{name} is not set" if value is None else f"{name}={value}", f"  {env.VARIABLES[name]}", sep="\n")
    return 0


def _machine() -> dict[str, object]:
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "pagedattn": _version("pagedattn"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "triton": _version("triton"),
        "gpus": [
            "{} ({}.{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)) for i in gpus
        ],
        "nvidia_driver": _driver(),
        "extension": library.csrc_status(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return None
    return match[0] if match else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(plain(value), indent=1))
