"""Compile the Gluon kernel for latent attention for a Hopper GPU that need not be there; prints what ptxas says.

It runs in a process without TRITON_INTERPRET, which is read when kernels are imported.
"""

from __future__ import annotations

import json
import sys

from assembler import Compiled
from compile_hopper import descriptor
from triton.experimental.gluon._runtime import GluonASTSource

from pagedattn.kernels.mla_decode.hopper import _mla_decode_kernel, constants_of
from pagedattn.kernels.mla_decode.plan import HOPPER_DIMS, HOPPER_KEYS, mla_decode_config
from pagedattn.runtime.target import Target

_TYPES = dict.fromkeys(("table", "query_start_loc", "seq_lens", "splits", "states"), "*i32")
_TYPES |= dict.fromkeys(("qk_scale", "softcap"), "fp32") | {"lse_out": "*fp32"}


def compile_one(
    kind: str, heads: int, tokens: int, num_seqs: int, page: int, mask: tuple[int, int] = (1, 0), softcap: bool = False
) -> None:
    latent, rope = HOPPER_DIMS
    config = mla_decode_config(
        num_seqs=num_seqs,
        num_heads=heads,
        latent_dim=latent,
        rope_dim=rope,
        itemsize=2,
        stored_itemsize=2,
        max_rows=64,
        num_tokens=num_seqs * tokens,
        max_query_len=tokens,
        max_seq_len=4096,
        target=Target(132, 232448, True),
        hopper=True,
    )
    constants = constants_of(heads, config, page, num_seqs, mask, softcap)
    part = min(page, HOPPER_KEYS)
    types = _TYPES | dict.fromkeys(("query", "out"), f"*{kind}")
    types |= {"latent": descriptor(kind, part, 1, latent), "rope": descriptor(kind, part, 1, rope)}
    names = _mla_decode_kernel.arg_names
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    divisible = [
        at for at, one in enumerate(names) if signature[one].startswith("*") or one in ("sq_t", "sq_h", "so_t", "so_h")
    ]
    source = GluonASTSource(
        _mla_decode_kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in divisible},
    )
    made = Compiled(source, 90, {"num_warps": 4})
    name = f"{kind}-H{heads}-{num_seqs}x{tokens}-page{page}-{mask}{'-cap' if softcap else ''}"
    facts = {
        "name": name,
        "shared": made.shared,
        "spills": made.spills,
        "registers": made.registers,
        "serialized": "wgmma.mma_async instructions are serialized" in made.said,
        "wgmma": made.ptx.count("wgmma.mma_async"),
        "tma": made.ptx.count("cp.async.bulk.tensor"),
    }
    print(json.dumps(facts), flush=True)


def main() -> None:
    compile_one("bf16", 128, 1, 64, 64)
    compile_one("fp16", 16, 2, 8, 16, (1, 100), True)
    if "--grid" in sys.argv:
        compile_one("bf16", 16, 1, 300, 8)
        compile_one("bf16", 64, 4, 64, 128)
        compile_one("bf16", 96, 1, 64, 64, (0, 0))


if __name__ == "__main__":
    main()
