"""`pagedattn env`: versions, GPUs, kernel libraries, the extension and variables, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path

import torch

from .. import env
from ..backends.registry import backend_names
from ..integrations.vllm import releases as vllm_releases
from ..runtime import op_registry
from ..runtime.distributions import release_of
from . import display
from .backends import probe, state_of
from .terminal import show_rows

# What the optional extras bring; without one, a part of the library says that it is missing when it is asked for.
_EXTRAS = ("transformers", "safetensors", "tokenizers", "jinja2", "tqdm", "gguf", "accelerate", "matplotlib", "rich")


def run(args: argparse.Namespace) -> int:
    """What this machine has."""
    facts, extras = _machine(), {name: release_of(name) for name in _EXTRAS}
    backends = {name: probe(name)[0] for name in backend_names()}
    vllm = vllm_releases.describe()
    values = {name: os.environ.get(name) for name in env.VARIABLES}
    if args.json:
        told = {name: {"value": value, "meaning": env.VARIABLES[name]} for name, value in values.items()}
        display.print_json({**facts, "packages": extras, "backends": backends, "vllm": vllm, "variables": told})
        return 0
    show_rows((name, display.text(name, value) if value else "none") for name, value in facts.items())
    print()
    show_rows((name, value or "not installed") for name, value in extras.items())
    print()
    show_rows((name, state_of(state)) for name, state in backends.items())
    print()
    show_rows([("vllm", "; ".join(vllm))])
    print()
    for name, value in values.items():
        print(f"{name} is not set" if value is None else f"{name}={value}", f"  {env.VARIABLES[name]}", sep="\n")
    return 0


def _machine() -> dict[str, object]:
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "pagedattn": release_of("pagedattn"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "triton": release_of("triton"),
        "gpus": [
            "{} ({}.{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)) for i in gpus
        ],
        "nvidia_driver": _driver(),
        "extension": op_registry.csrc_status(),
        "cache_writes": _paths_of("reshape_and_cache"),
        "block_copies": _paths_of("copy_blocks"),
    }


def _paths_of(op: str) -> str:
    """Who does the work of an op on the devices that are here: `csrc on cpu, triton on cuda`."""
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    return ", ".join(f"{op_registry.path_of(op, device)} on {device.type}" for device in devices)


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[0] if match else None
