"""Layer calls on a Hopper GPU that is not there (see fake_gpu.py): which kernels they launch, printed as JSON.

To be run without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import fake_gpu
import torch
from fake_gpu import launched

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, StepMetadata, plan_step
from pagedattn.kernels import hopper
from pagedattn.kernels.dequantise import kernel as dequantise
from pagedattn.kernels.dequantise import plan as copies
from pagedattn.kernels.prefill_sm90 import codes_kernel, copy_kernel, kernel, parts_kernel, reduce_splits

reshape: Any = sys.modules["pagedattn.ops.reshape_and_cache"]
MODULES: tuple[Any, ...] = (kernel, codes_kernel, parts_kernel, copy_kernel, reduce_splits, dequantise)
CASES: dict[str, dict[str, Any]] = {
    "prompts": {"query_lens": [300, 40]},
    "prompts and decodes": {"query_lens": [1, 1, 300]},
    "few prompts and long decodes": {"query_lens": [1, 1, 300], "keys": 3000},
    "prompts and long decodes": {"query_lens": [1, 1, 2200], "keys": 1800},
    "a prompt on a long context": {"query_lens": [40], "keys": 3000},
    "several tokens each": {"query_lens": [16, 16, 9], "keys": 3000},
    "blocks of unknown size": {"query_lens": [300], "block_size": None},
    "HND": {"query_lens": [300], "cache_layout": "HND"},
    "one head": {"query_lens": [300], "heads": (1, 1)},
    "D 80": {"query_lens": [300], "dim": 80},
    "D 60": {"query_lens": [300], "dim": 60},
    "fp8": {"query_lens": [1, 1, 60], "keys": 300, "kv_cache_dtype": "fp8_e4m3"},
    "int8": {"query_lens": [1, 1, 60], "keys": 300, "kv_cache_dtype": "int8"},
    "int8, blocks of 24": {"query_lens": [300], "kv_cache_dtype": "int8", "block_size": 24},
    "fp8, blocks of 4": {"query_lens": [300], "kv_cache_dtype": "fp8_e4m3", "block_size": 4},
    "int8, D 60": {"query_lens": [60], "kv_cache_dtype": "int8", "dim": 60},
    "int8, D 80": {"query_lens": [300], "kv_cache_dtype": "int8", "dim": 80},
    "int8, D 256, blocks of 16": {"query_lens": [60], "kv_cache_dtype": "int8", "dim": 256},
    "int8, D 256": {"query_lens": [60], "kv_cache_dtype": "int8", "dim": 256, "block_size": 32},
    "k8v4": {"query_lens": [300], "kv_cache_dtype": "k8v4"},
    "turboquant4, long": {"query_lens": [300], "kv_cache_dtype": "turboquant4"},
    "turboquant4, D 80": {"query_lens": [300], "kv_cache_dtype": "turboquant4", "dim": 80},
    "fp8, long": {"query_lens": [300], "kv_cache_dtype": "fp8_e4m3"},
    "int8, D 256, long": {"query_lens": [300], "kv_cache_dtype": "int8", "dim": 256},
    "int4": {"query_lens": [300], "kv_cache_dtype": "int4", "block_size": 32},
    "int4, chunk": {"query_lens": [60], "keys": 1000, "kv_cache_dtype": "int4", "block_size": 32},
    "int4, decodes": {"query_lens": [1, 1], "kv_cache_dtype": "int4", "block_size": 32},
    "int4, prefix": {"query_lens": [1] * 64, "keys": 4000, "shared": 3000, "kv_cache_dtype": "int4", "block_size": 32},
    "k8v4, in turns": {"query_lens": [300] * 20, "keys": 3700, "kv_cache_dtype": "k8v4"},
    "k8v4, in passes": {"query_lens": [300], "keys": 3000, "dim": 64, "kv_cache_dtype": "k8v4", "most_bytes": 1 << 19},
    "k8v4 and decodes": {"query_lens": [1, 1, 300], "kv_cache_dtype": "k8v4"},
}
WIDTHS: list[int] = []  # of heads that launches are compiled for
_constants_of = kernel.constants_of


def constants_of(*args: Any, **named: Any) -> dict[str, Any]:
    constants = _constants_of(*args, **named)
    WIDTHS.append(constants["D"])
    return constants


kernel.constants_of = constants_of


def run(
    query_lens: list[int],
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    block_size: int | None = 16,
    keys: int = 500,
    most_bytes: int = copies.MOST_BYTES,
    shared: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Launches of a step's plan, of a layer's call, of a captured plan and of its rewriting; and what is described."""
    copies.MOST_BYTES = most_bytes
    dtype, layout = torch.bfloat16, options.get("cache_layout", "NHD")
    layer = Attention(heads[0], dim, heads[1], block_size=block_size, backend="TRITON", dtype=dtype, **options)
    lens = [keys + n for n in query_lens]
    table = torch.zeros(len(lens), 256, dtype=torch.int32)
    stored = options.get("kv_cache_dtype", "auto")
    recent = stored == "int4"
    WIDTHS.clear()
    known: dict[str, Any] = {"dtype": dtype, "layout": layout, "recent_blocks": 90 if recent else None}
    caches = PagedKVCache(2, 90, block_size or 16, heads[1], dim, kv_cache_dtype=stored, **known)
    cache = caches.layer(0)
    second = {"recent_table": table, "block_size": block_size} if recent and block_size else {}
    common = CommonAttentionMetadata.from_lengths(query_lens, lens, table, **second)  # type: ignore[arg-type]
    common = common.replace(shared_prefix_len=shared)
    fused = torch.zeros(sum(query_lens), heads[0] + 2 * heads[1], dim, dtype=dtype)
    counts = [len(launched)]
    plan = plan_step([layer], common)
    counts.append(len(launched))
    layer(fused[:, : heads[0]], None, None, cache, plan)
    counts.append(len(launched))
    last = [text for text in map(str, launched[-1]) if text.startswith("(")]
    captured = plan_step([layer], common, capture=True)
    counts.append(len(launched))
    plan_step([layer], common, into=captured)
    counts.append(len(launched))
    text = plan.of(layer.plan_key).describe()
    made = [after - before for before, after in pairwise(counts)]
    found = {"launches": made, "describe": text, "grid": launched[counts[2] - 1][0], "descriptors": last}
    found |= {"widths": [*WIDTHS]}
    return {**found, "again": repeated(layer, fused[:, : heads[0]], caches, plan)}


def repeated(layer: Attention, query: torch.Tensor, caches: PagedKVCache, plan: StepMetadata) -> dict[str, bool]:
    """Of a second layer's call, whether it is made without checks, and launches what one with all checks does, and what
    Triton itself does."""
    slabs = [caches.slabs, *([] if caches.recent is None else [caches.recent.slabs])]
    (metadata,), out, lines = plan.by_key.values(), torch.empty(query.shape, dtype=query.dtype), []
    assert metadata.repeated is not None
    made, alive, launch = list[weakref.ref[torch.Tensor]](), [0], dequantise.launch

    def seen(*args: Any) -> Any:
        made.append(weakref.ref((copied := launch(*args)).key))
        alive.append(len({id(one()) for one in made if one() is not None}))
        return copied

    dequantise.launch = seen
    layer(query, None, None, caches.layer(0), plan, out)
    dequantise.launch = launch
    launched.clear()
    freed = max(alive) <= 1 and not any(one() is not None for one in made)
    kept = dict(metadata.repeated.calls)
    for calls, direct in ((kept, True), ({}, True), ({}, False)):
        for module in MODULES:
            module._launch._direct = direct
        metadata.repeated.calls.clear()
        metadata.repeated.calls.update(calls)
        launched.clear()
        layer(query[:, :], None, None, caches.layer(1), plan, out)
        lines.append(_placed([line for call in launched for line in call], (query, out, *slabs)))
    again, careful, own = lines
    for module in MODULES:
        module._launch._direct = True
    # What is compiled in, and hooks that nobody listens to, Triton passes too.
    same = all(y is None or x == y for x, y in zip(own, again, strict=True))
    return {"kept": len(kept) == 2, "freed": freed, "careful": again == careful != [], "triton": same}


def _placed(arguments: list[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Arguments of launches, of which addresses outside `tensors` are numbered: copies lie elsewhere in each call."""
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
    numbers: dict[int, int] = {}

    def one(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(one, x))
        x = x.data_ptr() if isinstance(x, torch.Tensor) else x
        if not isinstance(x, int) or x < 1 << 32 or any(start <= x < start + size for start, size in ranges):
            return x
        return "elsewhere", numbers.setdefault(x, len(numbers))

    return [one(x) for x in arguments]


WAYS: dict[str, tuple[list[int], str]] = {
    "prompts": ([300, 40], "auto"),
    "prompts, fp8 codes": ([60, 40], "fp8_e4m3"),
    "prompts, int8 codes": ([60, 40], "int8"),
    "prompts, dequantised": ([300, 40], "int8"),
    "prompts, turboquant4": ([300, 40], "turboquant4"),
    "decodes, fp8": ([1, 1, 1], "fp8_e4m3"),
    "decodes, int8": ([1, 1, 1], "int8"),
    "decodes, k8v4": ([1, 1, 1], "k8v4"),
}


def way(query_lens: list[int], stored: str) -> dict[str, Any]:
    """The library's files on the way to each launch, the write's first, from two layers of a step."""
    layer = Attention(8, 128, 2, block_size=16, backend="TRITON", dtype=torch.bfloat16, kv_cache_dtype=stored)
    caches = PagedKVCache(2, 90, 16, 2, 128, dtype=torch.bfloat16, kv_cache_dtype=stored)
    lens = [500 + n for n in query_lens]
    common = CommonAttentionMetadata.from_lengths(query_lens, lens, torch.zeros(len(lens), 256, dtype=torch.int32))
    query, key, value = (torch.zeros(sum(query_lens), heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    layer(query, key, value, caches.layer(0), plan_step([layer], common))  # Triton compiles, by another way
    step = plan_step([layer], common)
    calls = [lambda at=at: layer(query, key, value, caches.layer(at), step) for at in range(2)]
    first, later = map(fake_gpu.files_to_a_launch, calls)
    return {"first": first, "later": later, "describe": step.describe()}


def main() -> None:
    fake_gpu.install()
    hopper.why_not_here = lambda device: ""  # type: ignore[assignment]
    for module in MODULES:
        module.target_of = lambda device: fake_gpu.HOPPER
    with torch.no_grad():
        found = {name: run(**case) for name, case in CASES.items()}
        reshape.choose = lambda *args: "triton"
        print(json.dumps({"calls": found, "ways": {name: way(*case) for name, case in WAYS.items()}}))


if __name__ == "__main__":
    main()
