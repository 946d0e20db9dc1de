"""Compile the Gluon decode kernel for 8-bit caches for a Hopper GPU that need not be there; prints what ptxas says of
each variant, and of the instructions in its loop over keys.

It runs in a process without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from assembler import Compiled
from triton.experimental.gluon._runtime import GluonASTSource

from pagedattn.kernels.decode_quantised.kernel import _decode_kernel, constants_of
from pagedattn.kernels.decode_quantised.plan import quantised_decode_config
from pagedattn.kernels.shape import AttentionShape, BatchBounds
from pagedattn.runtime.target import Target

BLOCK_SIZE, KV_HEADS = 16, 8
_ROWS = ("query", "key", "value", "out")
_STRIDES = ("sq_t", "sq_h", "sk_b", "sk_s", "sk_h", "sv_b", "sv_s", "sv_h", "so_t", "so_h")
_FLOATS = ("lse_out", "alibi_slopes", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
_TYPES = dict.fromkeys(("key", "value", "table", "query_start_loc", "seq_lens", "workspace"), "*i32")
_TYPES |= dict.fromkeys(_FLOATS, "*fp32") | dict.fromkeys(("qk_scale", "out_scale", "softcap"), "fp32")


def compile_one(
    name: str,
    stored: torch.dtype,
    dim: int,
    group: int,
    batch: int,
    tokens: int = 1,
    mask: tuple[int, int] = (1, 0),
    given: Sequence[str] = (),
    values: str | None = None,
) -> None:
    codes = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}[stored]
    features = (mask, False, True, False, BLOCK_SIZE, (codes, values or codes))
    shape = AttentionShape(torch.bfloat16, stored, KV_HEADS, group, dim, dim, *features)
    bounds = BatchBounds(batch * tokens, batch, batch if tokens == 1 else 0, tokens, 4096, 4096)
    config = quantised_decode_config(shape, bounds, Target(132, 232448, True))
    of_rows = (BLOCK_SIZE * KV_HEADS, KV_HEADS, 1) if stored == torch.int8 else None
    constants = constants_of(shape, config, batch, tokens, "softcap" in given) | {"K_STRIDES": of_rows}
    constants |= {"V_STRIDES": of_rows}
    scales = ("k_scale_cache", "v_scale_cache") if of_rows else ()
    absent = {"lse_out", "sinks", "alibi_slopes", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache"}
    constants |= dict.fromkeys(absent - {*given, *scales})
    names = _decode_kernel.arg_names
    types = _TYPES | dict.fromkeys(("query", "out", "sinks"), "*bf16")
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    aligned = [i for i, one in enumerate(names) if signature[one].startswith("*") or one in _STRIDES]
    source = GluonASTSource(
        _decode_kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    made = Compiled(source, 90, {"num_warps": config.tuning.warps, "maxnreg": config.tuning.max_registers})
    loop = key_loop(made.sass)
    facts = {"name": name, "shared": made.shared, "spills": made.spills, "registers": made.registers}
    counted = Counter(one.split(".")[0] for one in loop)
    # Of 64 bits and more: four codes at a time would be words.
    wide = sum(bool(re.search(r"\.(64|128)\b", one)) for one in loop if one.startswith("LDG"))
    print(json.dumps(facts | {"instructions": len(loop), "wide_loads": wide, "loop": counted}), flush=True)


def key_loop(sass: str) -> list[str]:
    """Names of the instructions of the shortest loop that multiplies matrices."""
    lines, labels, found = sass.splitlines(), dict[str, int](), list[list[str]]()
    for at, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = at
        back = re.search(r"BRA .*`\((\.L_x_\d+)\)", line)
        if back and back[1] in labels:
            body = [
                re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)", x)
                for x in lines[labels[back[1]] : at]
            ]
            names = [one[1] for one in body if one]
            if any(one.startswith("HMMA") for one in names):
                found.append(names)
    return min(found, key=len)


def main() -> None:
    every = ("lse_out", "sinks", "alibi_slopes", "k_scale", "v_scale", "softcap")
    compile_one("e4m3-D128-G4", torch.float8_e4m3fn, 128, 4, 64)
    compile_one("int8-D128-G4", torch.int8, 128, 4, 64)
    compile_one("k8v4-D128-G4", torch.int8, 128, 4, 64, values="rotated_int4")
    compile_one("e5m2-D64-G4-T2-window-all", torch.float8_e5m2, 64, 4, 1, 2, (1, 100), every)
    if "--grid" in sys.argv:
        compile_one("e4m3-D128-G4-few", torch.float8_e4m3fn, 128, 4, 1)
        compile_one("int8-D256-G8", torch.int8, 256, 8, 300)
        compile_one("k8v4-D256-G8", torch.int8, 256, 8, 300, values="rotated_int4")
        compile_one("k8v4-D64-G4-few", torch.int8, 64, 4, 1, given=every, values="rotated_int4")
        compile_one("e4m3-D128-G16-few", torch.float8_e4m3fn, 128, 16, 4)


if __name__ == "__main__":
    main()
