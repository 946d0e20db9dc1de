"""`pagedattn calibrate`: a file of scales for the fp8 cache of a model."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from ..formats.fp8.calibration import KVScales
from . import display
from .generate import GET_A_MODEL, add_place_options
from .packaged_model import model_folder
from .terminal import UsageError, show_rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn calibrate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"a Hugging Face model folder; {GET_A_MODEL}")
    add("text", metavar="TEXT_FILE", type=Path, help="text like what will be served, in UTF-8; thousands of tokens")
    default = "kv_scales.json"
    add(
        "--output", type=Path, default=Path(default), metavar="FILE", help=f"written as JSON; {default} where not given"
    )
    add("--max-tokens", type=int, default=8192, help="tokens of the text to use at most; 8192 where not given")
    add_place_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the model over the text and write what was found."""
    text = _read(args.text)
    if not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output must be in a folder that exists, got {args.output}")
    options = {name: getattr(args, name) for name in ("device", "dtype") if getattr(args, name) is not None}
    calibrate = import_module("pagedattn.engine").calibrate
    scales: KVScales = calibrate(model_folder(args.model), text, max_tokens=args.max_tokens, **options)
    scales.save(args.output)
    largest = {f"largest_{name}": _largest(scales, name) for name in ("key", "value")}
    if args.json:
        display.print_json({"model": args.model, "output": args.output, "tokens": scales.num_tokens, **largest})
        return 0
    rows = [
        (name.replace("_", " "), f"{one['maximum']:.4g} (layer {one['layer']}, KV head {one['head']})")
        for name, one in largest.items()
    ]
    show_rows([("tokens", str(scales.num_tokens)), *rows, ("written to", str(args.output))])
    return 0


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"TEXT_FILE {path.absolute()} cannot be read: {reason}") from error
    if not text.strip():
        raise UsageError(f"TEXT_FILE {path.absolute()} must hold text, it is empty")
    return text


def _largest(scales: KVScales, name: str) -> dict[str, float]:
    """The largest maximum of keys or of values, and where it was found."""
    found = [(one, n, head) for n, layer in enumerate(scales.layers) for head, one in enumerate(getattr(layer, name))]
    maximum, layer, head = max(found, key=lambda one: one[0])
    return {"maximum": maximum, "layer": layer, "head": head}
