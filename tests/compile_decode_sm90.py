"""Compile the Gluon decode kernel for codes for a Hopper GPU that need not be there; prints what ptxas says of
each variant, and of the instructions in its loop over keys.

It runs in a process without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from assembler import Compiled
from sass_loops import overwritten, product_loops
from triton.experimental.gluon._runtime import GluonASTSource

from pagedattn.kernels.decode_sm90.kernel import _decode_kernel, constants_of
from pagedattn.kernels.decode_sm90.many_rows_kernel import many_rows_kernel
from pagedattn.kernels.decode_sm90.plan import FEW_ROWS, hopper_decode_config
from pagedattn.kernels.shape import AttentionShape, BatchBounds
from pagedattn.runtime.target import Target

KV_HEADS = 8
_NATIVE = (torch.bfloat16, torch.float16)
LEVELS = {f"turboquant{bits}": bits for bits in (4, 3, 2)}
_TORCH_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_ROWS = ("query", "key", "value", "out")
_STRIDES = ("sq_t", "sq_h", "sk_b", "sk_h", "sv_b", "sv_h", "so_t", "so_h")
_FLOATS = ("lse_out", "prior", "alibi_slopes", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
_TYPES = dict.fromkeys(("key", "value", "table", "query_start_loc", "seq_lens", "workspace"), "*i32")
_TYPES |= dict.fromkeys(_FLOATS, "*fp32") | dict.fromkeys(("qk_scale", "out_scale", "softcap"), "fp32")


def compile_one(
    name: str,
    stored: torch.dtype,
    dim: int,
    group: int,
    batch: int,
    tokens: int = 1,
    mask: tuple[int, ...] = (1, 0),
    given: Sequence[str] = (),
    values: str | None = None,
    keys: str | None = None,
    size: int = 16,
    accumulate: bool = False,
) -> None:
    codes = None if stored in _NATIVE else keys or _TORCH_CODES.get(stored, "int8")
    features = (mask, False, True, False, size, (codes, values or codes))
    queries = stored if stored in _NATIVE else torch.bfloat16
    shape = AttentionShape(queries, stored, KV_HEADS, group, dim, dim, *features)
    bounds = BatchBounds(batch * tokens, batch, batch if tokens == 1 else 0, tokens, 4096, 4096)
    config = hopper_decode_config(shape, bounds, Target(132, 232448, True))
    of_rows = None if stored in (*_TORCH_CODES, *_NATIVE) else (size * KV_HEADS, KV_HEADS, 1)
    per_channel = codes == "int4_per_channel"
    constants = constants_of(shape, config, batch, tokens, "softcap" in given) | {"V_STRIDES": of_rows}
    constants |= {"K_STRIDES": (KV_HEADS * dim, 0, dim) if per_channel else of_rows}
    words = [dim * KV_HEADS * bits_of(one) // 32 for one in shape.codes]
    constants |= dict(zip(("K_SLOT", "V_SLOT"), words, strict=True)) | {"ACCUMULATE": accumulate}
    constants["ALIGNED"] = gcd(4, *(width // KV_HEADS for width in words))
    scales = ("k_scale_cache", "v_scale_cache") if of_rows else ()
    absent = {"prior", "lse_out", "sinks", "alibi_slopes", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache"}
    constants |= dict.fromkeys(absent - {*given, *scales})
    kernel = _decode_kernel if config.rows <= FEW_ROWS else many_rows_kernel
    names = kernel.arg_names
    types = _TYPES | dict.fromkeys(("query", "out", "sinks"), "*fp16" if queries == torch.float16 else "*bf16")
    if per_channel:
        types |= {"k_scale_cache": "*i32"}
    if shape.codes[0] in LEVELS:
        types |= dict.fromkeys(("k_scale_cache", "v_scale_cache"), "*fp16")
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    odd = [one for one, width in zip(("sk_h", "sv_h"), words, strict=True) if width // KV_HEADS % 16]
    aligned = [
        i for i, one in enumerate(names) if signature[one].startswith("*") or (one in _STRIDES and one not in odd)
    ]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    made = Compiled(source, 90, {"num_warps": config.tuning.warps, "maxnreg": config.tuning.max_registers})
    loop = min(product_loops(made.sass), key=len)
    facts = {"name": name, "shared": made.shared, "spills": made.spills, "registers": made.registers}
    facts["overwritten"] = overwritten(made.sass)
    counted = Counter(one.split(".")[0] for one in loop)
    # Of 64 bits and more: four codes at a time would be words.
    wide = sum(bool(re.search(r"\.(64|128)\b", one)) for one in loop if one.startswith("LDG"))
    print(json.dumps(facts | {"instructions": len(loop), "wide_loads": wide, "loop": counted}), flush=True)


def bits_of(codes: str | None) -> int:
    if codes is None:
        return 16
    if codes in LEVELS:
        return LEVELS[codes]
    return 4 if codes in ("int4_per_channel", "rotated_int4") else 8


def main() -> None:
    every = ("lse_out", "sinks", "alibi_slopes", "k_scale", "v_scale", "softcap")
    int4: dict[str, Any] = {"keys": "int4_per_channel", "values": "rotated_int4", "size": 32, "mask": (1, 0, 0, 32)}
    compile_one("int4-D128-G4", torch.uint8, 128, 4, 64, given=("lse_out",), accumulate=True, **int4)
    turboquant: dict[str, Any] = {"keys": "turboquant4", "values": "turboquant4", "size": 32}
    three, two = ({"keys": one, "values": one} for one in ("turboquant3", "turboquant2"))
    prior = (*every, "prior")
    compile_one("e5m2-D64-G4-T2-window-all", torch.float8_e5m2, 64, 4, 1, 2, (1, 100), prior, accumulate=True)
    compile_one("k8v4-D128-G4-T16", torch.int8, 128, 4, 64, 16, values="rotated_int4")
    compile_one("k8v4-D128-G4-T8", torch.int8, 128, 4, 64, 8, values="rotated_int4")
    compile_one("bf16-D128-G2", torch.bfloat16, 128, 2, 256)
    compile_one("turboquant4-D80-G4-T16", torch.uint8, 80, 4, 3, 16, **turboquant)
    if "--grid" in sys.argv:
        compile_one("fp16-D64-G8-window-all", torch.float16, 64, 8, 300, 1, (1, 100), prior, accumulate=True)
        compile_one("int8-D128-G4-T8", torch.int8, 128, 4, 64, 8)
        compile_one("e4m3-D128-G8-T5-all", torch.float8_e4m3fn, 128, 8, 1, 5, (1, 100), every)
        compile_one("int4-D128-G4-T16", torch.uint8, 128, 4, 64, 16, given=("lse_out",), accumulate=True, **int4)
        compile_one("turboquant4-D128-G8-T4", torch.uint8, 128, 8, 64, 4, **turboquant)
        compile_one("turboquant4-D128-G4", torch.uint8, 128, 4, 64, **turboquant)
        compile_one("k8v4-D128-G4", torch.int8, 128, 4, 64, values="rotated_int4")
        compile_one("int8-D128-G4", torch.int8, 128, 4, 64)
        compile_one("e4m3-D128-G4", torch.float8_e4m3fn, 128, 4, 64)
        compile_one("e4m3-D128-G4-few", torch.float8_e4m3fn, 128, 4, 1)
        compile_one("int8-D256-G8", torch.int8, 256, 8, 300)
        compile_one("k8v4-D256-G8", torch.int8, 256, 8, 300, values="rotated_int4")
        compile_one("k8v4-D64-G4-few", torch.int8, 64, 4, 1, given=every, values="rotated_int4")
        compile_one("int4-D256-G8", torch.uint8, 256, 8, 300, **int4)
        compile_one("int4-D64-G4-T2-few", torch.uint8, 64, 4, 1, 2, given=every, **int4)
        compile_one("turboquant4-D64-G8-S16-few", torch.uint8, 64, 8, 1, given=every, **turboquant | {"size": 16})
        compile_one("turboquant4-D256-G4", torch.uint8, 256, 4, 300, **turboquant)
        compile_one("turboquant3-D128-G4", torch.uint8, 128, 4, 64, **turboquant | three)
        compile_one("turboquant2-D128-G4", torch.uint8, 128, 4, 64, **turboquant | two)
        compile_one("turboquant3-D64-G4", torch.uint8, 64, 4, 64, **turboquant | three)
        compile_one("turboquant3-D128-G8-T4", torch.uint8, 128, 8, 64, 4, **turboquant | three)
        compile_one(
            "turboquant_k4v3-D128-G8-few", torch.uint8, 128, 8, 1, given=every, **turboquant | {"values": "turboquant3"}
        )
        compile_one("turboquant_k3v4-D256-G8", torch.uint8, 256, 8, 300, **turboquant | {"keys": "turboquant3"})
        compile_one("e4m3-D96-G4", torch.float8_e4m3fn, 96, 4, 64)
        compile_one("int8-D80-G4-T5", torch.int8, 80, 4, 64, 5)
        compile_one("e4m3-D128-G8-T4-all", torch.float8_e4m3fn, 128, 8, 1, 4, (1, 100), every)
        compile_one("int4-D96-G4-T8", torch.uint8, 96, 4, 300, 8, given=prior, accumulate=True, **int4)
        compile_one("int4-D128-G4-T4", torch.uint8, 128, 4, 64, 4, given=("lse_out",), accumulate=True, **int4)
        compile_one("k8v4-D72-G4", torch.int8, 72, 4, 64, values="rotated_int4")
        compile_one("k8v4-D192-G8", torch.int8, 192, 8, 300, values="rotated_int4")
        compile_one("int4-D96-G4", torch.uint8, 96, 4, 64, **int4)
        compile_one("int4-D112-G4-T16", torch.uint8, 112, 4, 64, 16, given=("lse_out",), accumulate=True, **int4)
        compile_one("turboquant3-D96-G4", torch.uint8, 96, 4, 64, **turboquant | three)
        compile_one("turboquant2-D80-G4-T8", torch.uint8, 80, 4, 64, 8, **turboquant | two)
        compile_one("k8v4-D64-G4-T16", torch.int8, 64, 4, 64, 16, values="rotated_int4")
        compile_one("turboquant3-D64-G8-T5", torch.uint8, 64, 8, 64, 5, given=every, **turboquant | three)
        compile_one("e4m3-D128-G16-few", torch.float8_e4m3fn, 128, 16, 4)


if __name__ == "__main__":
    main()
