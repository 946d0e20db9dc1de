"""Compile the Gluon prefill kernel for a Hopper GPU that need not be there; prints what ptxas says of each variant.

It runs in a process without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from assembler import Compiled
from softmax_overlap import softmax_beside_products
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from uniform_registers import unwritten_reads

from pagedattn import Mask
from pagedattn.kernels.prefill_sm90 import codes_kernel, copy_kernel, parts_kernel
from pagedattn.kernels.prefill_sm90.kernel import LOADERS, _prefill_kernel, block_constants, constants_of
from pagedattn.kernels.prefill_sm90.plan import (
    FIELDS,
    SPLIT_FIELDS,
    converts_keys,
    copied_queries,
    head_parts,
    heads_per_tile,
)
from pagedattn.kernels.prefill_sm90.producer import FACTORS

POINTERS = {  # and numbers that are no int32
    **dict.fromkeys(("table", "starts"), "*i32"),
    "entries": "*i32",
    "lse_out": "*fp32",
    "workspace": "*i32",
    "k_scale": "*fp32",
    "v_scale": "*fp32",
    "k_scale_cache": "*fp32",
    "factors": "*fp32",
    "v_scale_cache": "*fp32",
    **dict.fromkeys(("scale", "qk_scale", "out_scale", "softcap"), "fp32"),
}
CODES = {"fp8e4nv": "e4m3", "fp8e5": "e5m2", "i8": "int8", "i4": "int4_per_channel"}
KERNELS = {
    None: _prefill_kernel,
    "copy": copy_kernel._prefill_kernel,
    **dict.fromkeys(CODES, codes_kernel._prefill_kernel),
}


def descriptor(kind: str, *shape: int) -> str:
    bits = 16 if "16" in kind else 8
    layout = NVMMASharedLayout(min(128, shape[-1] * bits // 8), element_bitwidth=bits, rank=len(shape))
    return f"tensordesc<{kind}{list(shape)},{layout!r}>"


def compile_one(
    name: str,
    kind: str,
    dim: int,
    group: int,
    page: int,
    sinks: bool,
    stored: str | None = None,
    dim_v: int = 0,
    factors: str = "",
    out: str = "",
    longest: int = 0,
    v_codes: str = "",
    vectors: bool = True,
    **flags: Any,
) -> None:
    dim_v = dim_v or dim
    (first, more), (_, more_v) = head_parts(dim), head_parts(dim_v)
    kernel = parts_kernel._prefill_kernel if more else KERNELS[stored]
    names = kernel.arg_names
    pack = heads_per_tile(group, longest, True)
    fixed = constants_of(dim, group, page, pack=pack, dim_v=dim_v, **flags)
    fixed |= {"MORE": more, "MORE_V": more_v, "DIM_V": dim_v} if more else {}
    constants = {**fixed, **({} if sinks else {"sinks": None})}
    converted, registers = False, 240  # of a consumer's thread
    if fixed["FIELDS"] == FIELDS:
        constants["workspace"] = None
    if stored in CODES:
        converted = converts_keys(CODES[stored], torch.float16 if kind == "fp16" else torch.bfloat16)
        registers = codes_kernel.registers_of(converted, bool(v_codes))[0]
        constants |= codes_kernel.code_constants((CODES[stored], v_codes or CODES[stored]), converted, dim, vectors)
        planes, scales = ("k_scale_cache", "v_scale_cache"), ("k_scale", "v_scale")
        constants |= dict.fromkeys(scales if stored in ("i8", "i4") else planes) | block_constants(flags["mask"])
    if stored == "copy":
        constants |= {"k_scale": None, "v_scale": None, **block_constants(flags["mask"])}
        constants |= {"KEY_SCALES": factors == "key", "DIM_V": dim_v}
        constants |= {} if factors else {"factors": None}
        del constants["PAGE"]  # a copy has none
    if more and not more_v:
        constants["more_value"] = None
    codes = None if stored == "copy" else stored
    most = fixed["BLOCK_N"] // (LOADERS.value if stored is None else 1)
    part = most if stored == "copy" else min(page, most) or most
    rows = copied_queries(pack)
    types = {
        **POINTERS,
        "out": f"*{out or kind}",
        "sinks": f"*{kind}",
        "query": descriptor(kind, *rows, first),
    }
    types |= {
        "key": descriptor(
            "u8" if converted else codes or ("fp16" if stored == "copy" else kind),
            part,
            dim // 2 if stored == "i4" else dim,
        ),
        "value": descriptor("u8" if codes else kind, part, dim // 2 if v_codes else dim),
    }
    types |= {"k_scale_cache": "*i32"} if stored == "i4" else {}
    if factors == "key":
        types["factors"] = f"tensordesc<fp32[1, 1, {fixed['BLOCK_N']}],{FACTORS.value!r}>"
    if more:
        types |= dict.fromkeys(("key", "value"), descriptor(kind, part, 1, 1, first))
        types |= {
            "more_query": descriptor(kind, *rows, more),
            "more_key": descriptor(kind, part, 1, 1, more),
        }
        types |= {"more_value": descriptor(kind, part, 1, 1, more_v)} if more_v else {}
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    aligned = [i for i, one in enumerate(names) if signature[one].startswith("*") or one in ("so_t", "so_h")]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    made = Compiled(source, 90, {"num_warps": 4, "enable_fp_fusion": True})
    facts = {
        "name": name,
        "shared": made.shared,
        "spills": made.spills,
        "in_order": converted,
        "serialized": "wgmma.mma_async instructions are serialized" in made.said,
        "warp_groups": made.ptx.count("setmaxnreg.dec"),
        "wgmma": made.ptx.count("wgmma.mma_async"),
        "tma": made.ptx.count("cp.async.bulk.tensor"),
        "scale_bytes": sorted(
            {int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x\w+)", made.ptx)}
        ),
        "beside": softmax_beside_products(made.sass),
        "unwritten": unwritten_reads(made.sass, f"USETMAXREG.TRY_ALLOC.CTAPOOL UP0, {registers:#x}"),
    }
    print(json.dumps(facts))


def main() -> None:
    plain = {"mask": Mask(True), "softcap": False}
    splits_kv: dict[str, Any] = {"fields": SPLIT_FIELDS}
    compile_one("bf16-D128-G4-S16-parts", "bf16", 128, 4, 16, False, **plain, **splits_kv)
    compile_one("int8-D128-G4-S16", "bf16", 128, 4, 16, False, "i8", **plain)
    compile_one("int8-D128-G4-S16-scales-by-slot", "bf16", 128, 4, 16, False, "i8", vectors=False, **plain)
    four: dict[str, Any] = {"v_codes": "rotated_int4", **plain, **splits_kv}
    earlier_four: dict[str, Any] = {"mask": Mask(True, earlier_blocks=32), "softcap": False, "v_codes": "rotated_int4"}
    compile_one("int4-D128-G4-S32-parts", "bf16", 128, 4, 32, False, "i4", **earlier_four, **splits_kv)
    compile_one("k8v4-D128-G4-S16-parts", "bf16", 128, 4, 16, False, "i8", **four)
    earlier: dict[str, Any] = {"mask": Mask(True, earlier_blocks=32, from_block=1), "softcap": False}
    of_keys: dict[str, Any] = {"factors": "key", **plain, **splits_kv}
    compile_one("copy-turboquant4-D128-G4-S16-parts", "bf16", 128, 4, 16, False, "copy", **of_keys)
    compile_one("copy-int4-D128-G4-S32-unrounded", "bf16", 128, 4, 32, False, "copy", out="fp32", **earlier)
    compile_one("bf16-D128-G5-S16-parts", "bf16", 128, 5, 16, False, longest=150, **plain, **splits_kv)
    compile_one("bf16-D96-G4-S16-parts", "bf16", 96, 4, 16, False, **plain, **splits_kv)
    if "--grid" in sys.argv:
        compile_one("copy-int8-D128-G4-S16", "bf16", 128, 4, 16, False, "copy", factors="tile", **plain)
        compile_one("e4m3-D128-G4-S16", "bf16", 128, 4, 16, False, "fp8e4nv", **plain)
        compile_one("bf16-D128-G4-packed", "bf16", 128, 4, 0, False, kv_heads=32, **plain)
        compile_one("fp16-D64-G1-S64-softcap", "fp16", 64, 1, 64, False, mask=Mask(causal=False), softcap=True)
        compile_one("bf16-D192-128-G1-S16", "bf16", 192, 1, 16, False, dim_v=128, kv_heads=128, **plain)
        compile_one("fp16-D72-G8-S64-window-sinks", "fp16", 72, 8, 64, True, mask=Mask(True, 100), softcap=False)
        compile_one("bf16-D240-G4-S16-softcap", "bf16", 240, 4, 16, False, mask=Mask(True), softcap=True)
        compile_one("e5m2-D64-G4-S16-parts", "bf16", 64, 4, 16, False, "fp8e5", **plain, **splits_kv)
        window: dict[str, Any] = {"mask": Mask(True, 100), "softcap": False}
        compile_one("e4m3-D256-G8-S256-window-sinks", "bf16", 256, 8, 256, True, "fp8e4nv", **window)
        compile_one("int8-D64-G8-S256-window-sinks", "bf16", 64, 8, 256, True, "i8", **window)
        compile_one("int8-D64-G4-S16-parts-fp16", "fp16", 64, 4, 16, False, "i8", **plain, **splits_kv)
        compile_one("int8-D256-G4-S32-parts", "bf16", 256, 4, 32, False, "i8", **plain, **splits_kv)
        compile_one("e4m3-D128-G4-S16-parts-fp16", "fp16", 128, 4, 16, False, "fp8e4nv", **plain, **splits_kv)
        compile_one("bf16-D128-G4-S16", "bf16", 128, 4, 16, False, **plain)
        compile_one(
            "bf16-D128-G5-S32-window", "bf16", 128, 5, 32, False, longest=5, mask=Mask(True, 4096), softcap=False
        )
        compile_one("bf16-D256-G8-S256-window-sinks", "bf16", 256, 8, 256, True, mask=Mask(True, 100), softcap=False)
        compile_one("bf16-D256-G8-S16-parts-sinks", "bf16", 256, 8, 16, True, **plain, **splits_kv)


if __name__ == "__main__":
    main()
