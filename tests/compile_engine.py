"""Compile the engine's Triton kernels for GPUs that need not be there; prints what ptxas says of each, as JSON."""

from __future__ import annotations

import sys
from typing import Any

import triton
from compile_kernels import CODES, format_of_kernels, plane_types, report

from pagedattn.engine.models.kernels import fused, row_product
from pagedattn.engine.sampling.kernels import cutoff, draw, penalize
from pagedattn.engine.sampling.packed_params import PARAMS

VOCAB = 151_936


def compile_fused(arch: int, kind: str) -> None:
    def types(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, f"*{kind}") | {"eps": "fp32"}

    pointers = types("x", "residual", "weight", "out", "gate_up")
    size = {"SIZE": 4096, "N": 4096, "ADD": True, "PDL": arch >= 90}
    report(f"rms_norm-sm{arch}-{kind}", fused._rms_norm_kernel, pointers, size, arch, num_warps=16)
    silu: dict[str, Any] = {"SIZE": 3072, "BLOCK": 1024, "PDL": arch >= 90}
    report(f"silu_mul-sm{arch}-{kind}", fused._silu_mul_kernel, pointers, silu, arch, num_warps=4)


def compile_qkv(arch: int, kind: str, dim: int, heads: int, kv_heads: int, stored: str = "auto") -> None:
    """`stored`: the format of the cache that is written to."""
    encodes, format_constants = stored != "auto", format_of_kernels(stored)
    shape = {
        "S": 16,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "AT_ONCE": min(8, triton.next_power_of_2(kv_heads)),
        "NORM": True,
        "ENCODE": min(8, kv_heads) if encodes else 0,
        **(format_constants if encodes else dict.fromkeys(format_constants)),
        "k_scale": None,
        "v_scale": None,
        "K_SCALES": 0,
        "V_SCALES": 0,
        "PDL": arch >= 90,
    }
    types: dict[str, str] = dict.fromkeys(("qkv", "q_weight", "k_weight", "cos_sin"), f"*{kind}")
    types |= {"positions": "*i32", "slots": "*i64", "eps": "fp32", "k_scale_value": "fp32", "v_scale_value": "fp32"}
    codes = [code.replace("fp8e4nv", "u8") for code in CODES[stored]] or [f"*{kind}"] * 2
    types |= dict(zip(("key_cache", "value_cache"), codes, strict=True)) | plane_types(stored)
    name = f"turn_and_write-sm{arch}-{stored if encodes else kind}-D{dim}"
    report(name, fused._qkv_kernel, types, shape, arch, num_warps=4)


def compile_row_product(arch: int, kind: str) -> None:
    types: dict[str, str] = dict.fromkeys(("x", "weight", "bias", "out"), f"*{kind}")
    sizes = {"K": 3072, "OUTPUTS": 4, "INPUTS": 4096, "PDL": arch >= 90}
    report(f"row_product-sm{arch}-{kind}", row_product._row_product_kernel, types, sizes, arch, num_warps=8)


def compile_draw(arch: int, kind: str) -> None:
    whole = dict.fromkeys(("table", "rows", "lengths", "token_out", "token", "tokens"), "*i32")
    floats = dict.fromkeys(("cutoffs", "candidates", "smallest", "best_out", "best"), "*fp32")
    types = {**whole, **floats, "logits": f"*{kind}"}
    sizes = {"WORDS": PARAMS, "VOCAB": VOCAB, "BLOCK": 2048, "PDL": arch >= 90}
    searched = {**sizes, "SIZE": 4096}
    report(f"cutoff-sm{arch}-{kind}", cutoff._cutoff_kernel, types, searched, arch, num_warps=8)
    report(
        f"draw-sm{arch}-{kind}",
        draw._draw_kernel,
        types,
        {**sizes, "CHUNK": 76 * 2048, "NATIVE": True},
        arch,
        num_warps=8,
    )
    counted = {**whole, "counts": "*i32", "last_tokens": "*i32", "logits": f"*{kind}", "out": "*fp32"}
    pieces = {**sizes, "BLOCK": 4096}
    report(f"penalize-sm{arch}-{kind}", penalize._penalize_kernel, counted, pieces, arch, num_warps=8)
    report(f"choose-sm{arch}", draw._choose_kernel, types, {"PARTS": 3, "N": 4, "PDL": arch >= 90}, arch, num_warps=1)


if __name__ == "__main__":
    compile_fused(90, "bf16")
    compile_fused(80, "fp16")
    compile_qkv(90, "bf16", 128, 16, 8)
    compile_qkv(80, "fp16", 64, 32, 8)
    for stored in ("fp8_e4m3", "turboquant_k3v4"):
        compile_qkv(90, "bf16", 128, 16, 8, stored)
    if "--grid" in sys.argv:
        for stored in ("int8", "k8v4", "turboquant4", "turboquant2"):
            compile_qkv(90, "bf16", 128, 16, 8, stored)
        compile_qkv(90, "bf16", 256, 16, 8, "turboquant_k3v4")
    compile_qkv(80, "fp16", 64, 9, 3, "k8v4")
    compile_row_product(90, "bf16")
    compile_row_product(80, "fp16")
    compile_draw(90, "bf16")
    compile_draw(80, "fp32")
