"""`pagedattn conformance`: a backend against the oracle, from the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields

from . import display
from .device import present_device
from .spec_options import dtype_of
from .terminal import progress


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn conformance`."""
    parser.add_argument("backend", help="a name that `pagedattn backends` lists, or module:Class")
    parser.add_argument("--device", type=present_device, help="cuda, cpu, ...; cuda where torch finds a GPU, else cpu")
    parser.add_argument(
        "--dtype", type=dtype_of, action="append", help="run every case in it, may be given again; fp32 where not"
    )


def run(args: argparse.Namespace) -> int:
    """Run the kit; status 1 where a case failed or none was served."""
    from ..testing import conformance

    with progress() as tell:
        report = conformance(args.backend, device=args.device, dtypes=args.dtype, tell=tell)
    if args.json:
        values: dict[str, object] = {one.name: getattr(report, one.name) for one in fields(report)}
        display.print_json({"ok": report.ok, **values})
    else:
        print(report)
    return int(not report.ok)
