"""Signatures of what our backend for vLLM derives from and calls, read from the vLLM that can be imported.

`python tests/integrations/vllm_record.py > tests/integrations/vllm_signatures_0.24.json` records a release: names of
members, names and kinds of parameters and whether they have defaults. test_vllm_signatures.py compares ours with them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from pagedattn.integrations.vllm import releases

CLASSES = ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder")
REGISTERED = ("CUSTOM", "FLASH_ATTN")
VARIABLES = (releases.RAY_PREFIXES, releases.RAY_NAMES)


def parameters(function: Callable[..., Any]) -> list[list[Any]]:
    """Name, kind and whether there is a default, of each parameter besides `self`."""
    found = list(inspect.signature(function).parameters.values())
    return [[p.name, p.kind.name, p.default is not p.empty] for p in found if p.name != "self"]


def members(cls: type) -> dict[str, dict[str, Any]]:
    """Methods and attributes by name, inherited ones too; parameters are None where nothing is called."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name for base in cls.__mro__[:-1] for name in vars(base)}):
        if (name.startswith("__") and name != "__init__") or name in ("_abc_impl", "_is_protocol"):
            continue
        value = getattr(cls, name)
        called = inspect.isfunction(value) or inspect.ismethod(value)
        abstract = name in getattr(cls, "__abstractmethods__", ())
        found[name] = {"parameters": parameters(value) if called else None, "abstract": abstract}
    return found


def record() -> dict[str, Any]:
    """All that is recorded of the release that is here."""
    from vllm import envs
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends import registry

    return {
        "release": version("vllm"),
        "classes": {name: members(getattr(backend, name)) for name in CLASSES},
        "fields": {"CommonAttentionMetadata": [f.name for f in fields(backend.CommonAttentionMetadata)]},
        "functions": {"register_backend": parameters(registry.register_backend)},
        "enums": {
            "AttentionBackendEnum": [name for name in REGISTERED if name in registry.AttentionBackendEnum.__members__],
            "AttentionCGSupport": [m.name for m in backend.AttentionCGSupport],
        },
        "variables": [name for name in VARIABLES if name in envs.environment_variables],
    }


def as_text(found: Any, depth: int = 0) -> str:
    """JSON with a line for each entry of the outer three levels."""
    if depth == 3 or not isinstance(found, dict):
        return json.dumps(found)
    inner = ",\n".join(f"{' ' * depth} {json.dumps(key)}: {as_text(value, depth + 1)}" for key, value in found.items())
    return f"{{\n{inner}\n{' ' * depth}}}"


if __name__ == "__main__":
    print(as_text(record()))
