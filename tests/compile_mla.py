"""Compile the Gluon kernels for latent attention for a Hopper GPU that need not be there; prints what ptxas says.

It runs in a process without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from assembler import Compiled
from compile_hopper import descriptor
from sass_loops import overwritten, product_loops
from triton.experimental.gluon._runtime import GluonASTSource

from pagedattn.kernels.mla_decode import hopper, hopper_fp8
from pagedattn.kernels.mla_decode.plan import HOPPER_DIMS, HOPPER_KEYS, max_rows, mla_decode_config
from pagedattn.runtime.target import Target

_TYPES = dict.fromkeys(("table", "query_start_loc", "seq_lens", "splits", "states", "flags"), "*i32")
_TYPES |= dict.fromkeys(("qk_scale", "out_scale", "softcap"), "fp32") | dict.fromkeys(("lse_out", "k_scale"), "*fp32")
_ROWS = {"": None, "e4m3": torch.float8_e4m3fn, "ds_mla": torch.uint8}  # None: of the query's dtype


def compile_one(
    kind: str,
    heads: int,
    tokens: int,
    num_seqs: int,
    page: int,
    mask: tuple[int, int] = (1, 0),
    softcap: bool = False,
    stored: str = "",
    aligned: bool = True,
) -> None:
    latent, rope = HOPPER_DIMS
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    rows = _ROWS[stored] or dtype
    config = mla_decode_config(
        num_seqs=num_seqs,
        num_heads=heads,
        latent_dim=latent,
        rope_dim=rope,
        itemsize=2,
        stored_itemsize=rows.itemsize,
        max_rows=max_rows(dtype, rows),
        num_tokens=num_seqs * tokens,
        max_query_len=tokens,
        max_seq_len=4096,
        target=Target(132, 232448, True),
        hopper=True,
    )
    constants = hopper.constants_of(heads, config, page, num_seqs, mask, softcap)
    part = min(page, HOPPER_KEYS)
    types = _TYPES | dict.fromkeys(("query", "out"), f"*{kind}")
    kernel = hopper_fp8._mla_decode_kernel if stored else hopper._mla_decode_kernel
    if stored:
        grouped = stored == "ds_mla"
        constants |= {"GROUPED": grouped} | ({"k_scale": None} if grouped else {"scales": None})
        constants |= {"splits": None} if config.merge is None else {"flags": None}
        types |= {"codes": _of_bytes(part, latent), "rope": _of_bytes(part, 2 * rope if grouped else rope)}
        types |= {"scales": _of_bytes(part, 16)}
    else:
        constants["ALIGNED"] = aligned
        types |= {"latent": descriptor(kind, part, 1, latent), "rope": descriptor(kind, part, 1, rope)}
    made = _compiled(kernel, constants, types, config.tuning.num_warps)
    unusual = ("-cap" if softcap else "") + ("" if aligned else "-unaligned")
    name = f"{kind}{stored and '-'}{stored}-H{heads}-{num_seqs}x{tokens}-page{page}-{mask}{unusual}"
    facts = {
        "name": name,
        "shared": made.shared,
        "spills": made.spills,
        "registers": made.registers,
        "serialized": "wgmma.mma_async instructions are serialized" in made.said,
        "wgmma": made.ptx.count("wgmma.mma_async"),
        "tma": made.ptx.count("cp.async.bulk.tensor"),
        "loops": len(product_loops(made.sass)),
        "of_codes": made.ptx.count(".e4m3.e4m3"),
        "overwritten": overwritten(made.sass),
        "spilled_in_loop": _spilled_in_loops(made.sass),
    }
    print(json.dumps(facts), flush=True)


def _of_bytes(*block: int) -> str:
    shape = [block[0], 1, block[1]]
    return f"tensordesc<u8{shape},{hopper_fp8.byte_layout(shape)!r}>"


def _compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], num_warps: int) -> Compiled:
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    strides = ["so_t", "so_h", *(["sq_t", "sq_h"] if constants.get("ALIGNED", True) else [])]
    divisible = [at for at, one in enumerate(names) if signature[one].startswith("*") or one in strides]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in divisible},
    )
    return Compiled(source, 90, {"num_warps": num_warps})


def _spilled_in_loops(sass: str) -> int:
    """Accesses to spilled registers in the loops over keys."""
    return sum(name.startswith(("STL", "LDL")) for loop in product_loops(sass) for name in loop)


def main() -> None:
    compile_one("bf16", 128, 1, 64, 64)
    compile_one("bf16", 128, 1, 64, 64, stored="ds_mla")
    compile_one("bf16", 128, 1, 1, 64, stored="e4m3")
    if "--grid" in sys.argv:
        compile_one("fp16", 16, 2, 8, 16, (1, 100), True, aligned=False)
        compile_one("bf16", 16, 1, 64, 64, stored="e4m3")
        compile_one("bf16", 16, 1, 300, 8)
        compile_one("bf16", 64, 4, 64, 128)
        compile_one("bf16", 96, 1, 64, 64, (0, 0))
        compile_one("bf16", 128, 1, 64, 64, stored="e4m3")
        compile_one("bf16", 128, 1, 1, 64, stored="ds_mla")
        compile_one("fp16", 8, 2, 300, 8, (1, 100), True, stored="e4m3")
        compile_one("bf16", 16, 1, 64, 128, stored="ds_mla")
        compile_one("fp16", 16, 2, 8, 16, (0, 100), True, stored="ds_mla")


if __name__ == "__main__":
    main()
