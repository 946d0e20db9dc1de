"""The engine's Triton kernels compile for GPUs that are not here, with hardly a spill."""

from __future__ import annotations

import json
from importlib.metadata import version

import random_work
from uninterpreted import output_of

from pagedattn.runtime.triton_versions import series

FUSED = {"rms_norm-sm90-bf16", "silu_mul-sm90-bf16", "rms_norm-sm80-fp16", "silu_mul-sm80-fp16"}
QKV = {
    *("turn_and_write-sm90-bf16-D128", "turn_and_write-sm80-fp16-D64", "turn_and_write-sm80-k8v4-D64"),
    *(f"turn_and_write-sm90-{name}-D128" for name in ("fp8_e4m3", "turboquant_k3v4")),
}
if random_work.everything:
    QKV |= {f"turn_and_write-sm90-{name}-D128" for name in ("int8", "k8v4", "turboquant4", "turboquant2")}
    QKV |= {"turn_and_write-sm90-turboquant_k3v4-D256"}
ROW = {"row_product-sm90-bf16", "row_product-sm80-fp16"}
PENALIZE = {"penalize-sm90-bf16", "penalize-sm80-fp32"}
DRAW = {"cutoff-sm90-bf16", "draw-sm90-bf16", "choose-sm90", "cutoff-sm80-fp32", "draw-sm80-fp32", "choose-sm80"}


def test_every_kernel_compiles_with_hardly_a_spill() -> None:
    found = {line["name"]: line for line in map(json.loads, output_of("compile_engine.py", *random_work.option()))}
    assert set(found) == FUSED | QKV | ROW | PENALIZE | DRAW
    for name, line in found.items():
        assert line["entry"] and line["ptx"] > 50, name
        # The search for a cutoff holds 16 scores a thread; with more warps or fewer scores at a time it is slower.
        spills, registers = 16, 128
        if name.startswith("cutoff"):
            spills, registers = 40 if series(version("triton")) >= (3, 7) else 32, 168
        elif name in QKV:  # 64 with heads of 256, 75 with Triton 3.9; a cache in 16 bit takes 32
            spills, registers = 0, 80
        assert line["spills"] and max(line["spills"]) <= spills, name
        assert line["registers"] and max(line["registers"]) <= registers, name
