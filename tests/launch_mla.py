"""Calls of `ops.mla_decode` on a Hopper GPU that is not there (see fake_gpu.py): what is launched, printed as JSON.

To be run without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import fake_gpu
import torch
from fake_gpu import launched

from pagedattn import ops
from pagedattn.kernels import hopper

plan: Any = sys.modules["pagedattn.kernels.mla_decode.plan"]
ROWS = {"bf16": (torch.bfloat16, 576), "e4m3": (torch.float8_e4m3fn, 576), "ds_mla": (torch.uint8, 656)}


def run(stored: str, heads: int, seqs: int, page: int, **options: Any) -> dict[str, Any]:
    """Of two calls, by Triton's dispatch and past it, the grids of the launches and the tensor descriptors of the first
    one: swizzle, bytes and type of an element, box, shape, strides."""
    dtype, width = ROWS[stored]
    cache = torch.zeros(20, page, 1, width, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    query = torch.zeros(seqs, heads, 576, dtype=torch.bfloat16)
    if heads == 1:  # a stride along an axis of one may be anything
        query, options["out"] = (torch.zeros(seqs, n, 1, dtype=query.dtype).transpose(1, 2) for n in (576, 512))
    table = torch.zeros(seqs, 4096 // page, dtype=torch.int32)
    starts, lens = torch.arange(seqs + 1, dtype=torch.int32), torch.full((seqs,), 4096, dtype=torch.int32)
    bounds = {"latent_dim": 512, "max_query_len": 1, "max_seq_len": 4096, "scale": 0.1, "path": "triton"}
    calls = []
    for _ in range(2):
        launched.clear()
        ops.mla_decode(query, cache.view(dtype), table, starts, lens, **bounds, **options)
        described = [arg[1] for arg in launched[0] if isinstance(arg, tuple) and isinstance(arg[1], str)]
        calls.append({"grids": [call[:3] for call in launched], "descriptors": described})
    return {**calls[0], "again": calls[0] == calls[1]}


def main() -> None:
    fake_gpu.install()
    hopper.why_not_here = lambda device: ""  # type: ignore[assignment]
    plan.target_of = lambda device: fake_gpu.HOPPER
    scale = torch.ones(1)
    with torch.no_grad():
        found = {
            "bf16": run("bf16", 16, 64, 64),
            "e4m3": run("e4m3", 16, 64, 64, k_scale=0.5),
            "e4m3, scale in memory": run("e4m3", 128, 3, 16, k_scale=scale, lse=torch.zeros(3, 128)),
            "ds_mla": run("ds_mla", 64, 64, 128),
            "e4m3, one head": run("e4m3", 1, 64, 64),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
