"""Compile representative Triton kernels for GPUs that need not be there; prints what ptxas says of each, as JSON.

It runs in a process without TRITON_INTERPRET, which is read when the kernels are imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from assembler import Compiled
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from pagedattn.formats.registry import FORMATS
from pagedattn.kernels.cache_write import block_kernel as seal_blocks
from pagedattn.kernels.cache_write import kernel as reshape_and_cache
from pagedattn.kernels.decode import kernel as decode
from pagedattn.kernels.decode.plan import decode_config
from pagedattn.kernels.dequantise import kernel as dequantise
from pagedattn.kernels.dequantise.plan import FLOAT16_KEYS, num_warps, rotated_tokens, width
from pagedattn.kernels.merge import kernel as merge_states
from pagedattn.kernels.mla_decode import kernel as mla_decode
from pagedattn.kernels.mla_decode.plan import mla_decode_config
from pagedattn.kernels.prefill import kernel as attention
from pagedattn.kernels.prefill.plan import attention_config
from pagedattn.kernels.prefill_sm90 import reduce_splits
from pagedattn.kernels.prefill_sm90.plan import keys_per_tile
from pagedattn.kernels.quantise_queries import kernel as quantise_queries
from pagedattn.kernels.tiles import block_dims
from pagedattn.runtime.target import Target

TARGETS = {
    80: Target(108, 166912),
    89: Target(128, 101376),
    90: Target(132, 232448, supports_pdl=True),
    120: Target(170, 101376, supports_pdl=True),
}
TYPES = dict.fromkeys(("table", "query_start_loc", "seq_lens", "workspace"), "*i32") | dict.fromkeys(
    ("qk_scale", "out_scale", "softcap"), "fp32"
)
ABSENT = dict.fromkeys(("sinks", "alibi_slopes", "k_scale", "v_scale"))
PLANES = ("k_scale_cache", "v_scale_cache")
ROWS_OF = {"auto": 64, "fp8_e4m3": 32, "fp8_ds_mla": 32}  # packed rows of a query block over latent rows
# How Triton calls the codes of a format.
CODES = {
    "auto": (),
    **dict.fromkeys(("fp8_e4m3", "fp8_ds_mla"), ("*fp8e4nv",) * 2),
    "int8": ("*i8",) * 2,
    "k8v4": ("*i8", "*u8"),
}
CODES |= dict.fromkeys(("int4", "turboquant4", "turboquant_k3v4", "turboquant2"), ("*u8",) * 2)
# Of attention over full blocks alone, with a window and without first blocks, and of these blocks alone.
BEFORE = {
    "int4": (0, 32),
    "turboquant4": (0, 16, 4, 1),
    "turboquant_k3v4": (0, 16, 4, 1),
    "turboquant2": (0, 16, 4, 0, 1),
}
_SCALES = {torch.float32: "*fp32", torch.float16: "*fp16"}
PRIOR = ("prior", "lse_out")  # what is added to
_PRODUCT = r"\b[HIDQ]G?MMA\."  # and not HFMA2.MMA
_EFFECT = r"\s(st\.global|cp\.async|atom|red)\b"  # what must not come before a wait
_JUMP = r"\bBRA\b.*`\(\.(L_x_\d+)\)"


def attention_case(
    arch: int, kind: str, dim: int, group: int, window: int, softcap: bool, stored: str = "auto", dim_v: int = 0
) -> None:
    shape = {"group": group, "head_dim": dim, "head_dim_v": dim_v or dim, "itemsize": 2}
    format_of_keys = {"packed_keys": CODES[stored][:1] == ("*u8",), "tile_keys": FORMATS[stored].key.tile_keys}
    config = attention_config(**shape, target=TARGETS[arch], **format_of_keys)
    codes = _codes(stored, kind)
    types = {**TYPES, **dict.fromkeys(("query", "out"), f"*{kind}"), **codes, **plane_types(stored)}
    types |= dict.fromkeys(PRIOR, "*fp32")
    constants = {
        **ABSENT,
        **({"prior": None} if stored == "auto" else {}),
        **_shape(dim, group, dim_v or dim),
        **format_of_kernels(stored),
        "key_start_loc": None,
        "G": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "MASK": (1, window, *BEFORE.get(stored, ())),
        "SOFTCAP": softcap,
        "ONE_LOOP": False,
        "ACCUMULATE": stored != "auto",
        "PRECISION": "tf32",
    }
    name = f"attention-sm{arch}-{kind if stored == 'auto' else stored}-D{dim}{f'-{dim_v}' if dim_v else ''}-G{group}"
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    report(name, attention._paged_attention_kernel, types, constants, arch, **options)


def decode_case(
    arch: int,
    kind: str,
    dim: int,
    group: int,
    tokens: int,
    num_seqs: int,
    stored: str = "auto",
    accumulate: bool = False,
    keys: int = 4096,
) -> None:
    sizes = {"itemsize": 2, "stored_itemsize": 1 if CODES[stored] else 2}
    shape = {"group": group, "head_dim": dim, "head_dim_v": dim, **sizes}
    step = {"num_seqs": num_seqs, "num_kv_heads": 8, "max_query_len": tokens, "max_seq_len": keys}
    tile_keys = FORMATS[stored].key.tile_keys
    config = decode_config(**shape, **step, target=TARGETS[arch], short=accumulate, tile_keys=tile_keys)
    tuning = config.tuning
    types = {**TYPES, **plane_types(stored), **dict.fromkeys(("query", "out"), f"*{kind}")}
    types |= _codes(stored, kind)
    types |= dict.fromkeys(PRIOR if accumulate else (), "*fp32")
    constants = {
        **ABSENT,
        **dict.fromkeys(() if accumulate else PRIOR),
        **_shape(dim, group, dim),
        **format_of_kernels(stored),
        "ROTATE_OUT": FORMATS[stored].value.kernels.rotate,
        "ACCUMULATE": accumulate,
        "KV_HEADS": 8,
        "G": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": tuning.block_n,
        "ROWS": config.rows,
        "TILE_OVERHEAD": tuning.tile_overhead,
        "FAN_IN": tuning.fan_in,
        "REDUCTION_UNROLL": config.reduction_unroll,
        "CHUNK": 1 if num_seqs == 1 else 256,
        "MANY_SEQS": num_seqs > 256,
        "ONE_TOKEN": tokens == 1,
        "ONE_BLOCK": tokens <= config.block_m // config.heads,
        "MASK": (1, 0, *BEFORE.get(stored, ())),
        "SOFTCAP": False,
        "SAME_STRIDES": True,
        "PREFETCH_BLOCK_TABLE": tuning.prefetch_block_table,
        "PDL": config.supports_pdl,
        "PRECISION": "tf32",
    }
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    options |= {"maxnreg": tuning.max_registers} if tuning.max_registers else {}
    what, after = kind if stored == "auto" else stored, "-accumulate" if accumulate else ""
    after += "" if keys == 4096 else f"-of-{keys}"
    name = f"decode-sm{arch}-{what}-D{dim}-G{group}-{num_seqs}x{tokens}{after}"
    report(name, decode._decode_kernel, types, constants, arch, **options)


def mla_case(arch: int, kind: str, heads: int, tokens: int, num_seqs: int, stored: str = "auto") -> None:
    """Both launches of the kernel for latent attention, rows of 512 + 64."""
    step = {"num_seqs": num_seqs, "max_query_len": tokens, "max_seq_len": 4096, "num_tokens": num_seqs * tokens}
    shape = {"num_heads": heads, "latent_dim": 512, "rope_dim": 64, "itemsize": 4 if kind == "fp32" else 2}
    shape["stored_itemsize"] = 1 if CODES[stored] else shape["itemsize"]
    shape["max_rows"] = 16 if kind == "fp32" else ROWS_OF[stored]
    config = mla_decode_config(**shape, **step, target=TARGETS[arch])
    tuning = config.tuning
    types = {**TYPES, **dict.fromkeys(("query", "out"), f"*{kind}"), "lse_out": "*fp32", "k_scale": "*fp32"}
    types |= {**dict.fromkeys(("splits", "states"), "*i32"), "key": _codes(stored, kind)["key"]}
    types |= {"scales": "*fp32", "halves": "*i16"}
    shared = {
        "HEADS": heads,
        "G": config.heads,
        "PARTS": config.parts,
        "L": 512,
        "BLOCK_L": 512,
        "BLOCK_M": config.block_m,
        "PDL": config.supports_pdl,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",
    }
    constants = {
        **shared,
        "S": 64,
        "R": 64,
        "BLOCK_R": 64,
        "BLOCK_N": tuning.block_n,
        "TILE_OVERHEAD": tuning.tile_overhead,
        "CHUNK": 256,
        "MASK": (1, 0),
        "SOFTCAP": False,
        "E4M3": stored != "auto",
        **({"k_scale": None} if stored in ("auto", "fp8_ds_mla") else {}),
        **({} if stored == "fp8_ds_mla" else {"scales": None, "halves": None}),
    }
    what, options = kind if stored == "auto" else f"{kind}-{stored}", {"num_stages": tuning.num_stages}
    name = f"sm{arch}-{what}-H{heads}-{num_seqs}x{tokens}"
    kernel = mla_decode._mla_decode_kernel
    report(f"mla_decode-{name}", kernel, types, constants, arch, num_warps=tuning.num_warps, **options)
    if stored != "auto" or config.merge is None:
        return  # partial states are what they are over rows of the query's dtype
    unroll, dims, some = config.merge
    merging = {**shared, "UNROLL": unroll, "DIMS": dims, "SOME": some}
    report(f"mla_decode-{name}-merge", mla_decode._merge_kernel, types, merging, arch, num_warps=4)


def dequantise_case(stored: str, kind: str, block_size: int, dim: int, earlier: bool = False) -> None:
    """earlier: before a window of recent blocks, and behind a first one."""
    form, names = FORMATS[stored], format_of_kernels(stored)
    tile = min(keys_per_tile(dim), form.key.tile_keys or 128)
    tile = tile if form.key.kernels.rotate is None else rotated_tokens(width(dim, dim))
    key = "fp16" if form.key.codes in FLOAT16_KEYS else kind
    types = {**TYPES, **plane_types(stored), **_codes(stored, kind), "to_starts": "*i32", "to_key": f"*{key}"}
    types |= {"to_scales": "*fp32", "to_value": f"*{kind}"}
    constants = {"S": block_size, "H": 8, "D": dim, "DV": dim, "TOKENS": tile}
    constants |= dict.fromkeys(("BLOCK_D", "BLOCK_DV"), width(dim, dim))
    constants |= {"MASK": (1, 0, 0, block_size, 2, 1) if earlier else (1, 0)}
    constants |= {"K_FORMAT": form.key.kernels, "V_FORMAT": form.value.kernels}
    constants |= {"K_STRIDES": names["K_SCALE_STRIDES"], "V_STRIDES": names["V_SCALE_STRIDES"]}
    constants |= {} if form.key.kernels.row_scale is not None else {"to_scales": None}
    name = f"dequantise-sm90-{stored}-D{dim}{'-earlier' if earlier else ''}"
    report(name, dequantise._dequantise_kernel, types, constants, 90, num_warps=num_warps(tile, width(dim, dim)))


def _shape(dim: int, group: int, dim_v: int) -> dict[str, Any]:
    block_d, block_dv = block_dims(dim, dim_v)
    return {"S": 16, "GROUP": group, "D": dim, "DV": dim_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv}


def _codes(stored: str, kind: str) -> dict[str, str]:
    return dict(zip(("key", "value"), CODES[stored] or (f"*{kind}",) * 2, strict=True))


def plane_types(stored: str) -> dict[str, str]:
    given = zip(PLANES, (FORMATS[stored].key, FORMATS[stored].value), strict=True)
    planes = {name: rows.planes(128, torch.bfloat16)[1:] for name, rows in given}
    return {name: _SCALES[scales[0].dtype] for name, scales in planes.items() if scales}


def format_of_kernels(stored: str) -> dict[str, Any]:
    form, strides = FORMATS[stored], (3072, 8, 1) if plane_types(stored) else None
    absent = {} if plane_types(stored) else dict.fromkeys(PLANES)
    kernels = {"K_FORMAT": form.key.kernels, "V_FORMAT": form.value.kernels}
    return {**absent, **kernels, "K_SCALE_STRIDES": strides, "V_SCALE_STRIDES": strides}


def report(name: str, kernel: Any, types: Mapping[str, str], constants: dict[str, Any], arch: int, **options: int):  # type: ignore[no-untyped-def]
    """Compile with pointers and strides divisible by 16, as a cache and a model's tensors have them."""
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    aligned = [
        at
        for at, one in enumerate(names)
        if signature[one].startswith("*")
        or (one.startswith("s") and "_" in one and signature[one] == "i32" and not kernel.params[at].do_not_specialize)
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    made = Compiled(source, arch, {**options, "enable_fp_fusion": True})
    line = {"name": name, "ptx": made.ptx.count("\n"), "entry": ".visible .entry" in made.ptx}
    shared = {"shared": made.shared, "limit": TARGETS[arch].shared_bytes}
    # Disassembling takes a second, and where nothing is spilled nothing is to be found.
    inside = spills_among_products(made.sass) if any(made.spills) else 0
    unwritten = unwritten_addresses(made.sass) if kernel is attention._paged_attention_kernel and arch == 90 else []
    before, _, _ = made.ptx.partition("griddepcontrol.wait")
    facts = {"waits": made.ptx.count("griddepcontrol.wait"), "inside": inside, "unwritten": unwritten}
    facts |= {"to_fp8": made.ptx.count("cvt.rn.satfinite.e4m3x2.f32"), "tanh": made.ptx.count("tanh.approx")}
    facts |= {"early": len(re.findall(_EFFECT, before)), "triggers": made.ptx.count("griddepcontrol.launch")}
    print(json.dumps({**line, **shared, **facts, "spills": made.spills, "registers": made.registers}))


def spills_among_products(sass: str) -> int:
    """Loads and stores of spilled registers in innermost loops around matrix products."""
    lines = sass.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\s*\.(L_x_\d+):", line))}
    jumps = [(labels.get(found[1], at), at) for at, line in enumerate(lines) if (found := re.search(_JUMP, line))]
    loops = [lines[first:last] for first, last in jumps if first < last]
    around = [loop for loop in loops if any(re.search(_PRODUCT, line) for line in loop)]
    inner = [loop for loop in around if not any(len(other) < len(loop) and other[0] in loop for other in around)]
    if any(re.search(_PRODUCT, line) for line in lines) and not inner:
        raise AssertionError("products without a loop around them: is the assembly of another form?")
    return sum(" LDL" in line or " STL" in line for loop in inner for line in loop)


def unwritten_addresses(sass: str) -> list[str]:
    """Where an address is advanced in uniform registers that nothing wrote. Other reads are of halves of wide results,
    whose writing `uniform_registers` does not know."""
    begin = next(line.split("*/")[1].split(";")[0].strip() for line in sass.splitlines() if "/*0000*/" in line)
    return [one for one in unwritten_reads(sass, begin) if re.search(r"UIADD3 UR(\d+), UP\d, UR\1,", one)]


def main() -> None:
    attention_case(90, "bf16", 64, 2, 0, True, "int8", dim_v=16)
    attention_case(80, "fp16", 64, 8, 128, True)
    attention_case(90, "bf16", 128, 4, 0, False, "turboquant4")
    decode_case(90, "bf16", 128, 4, 1, 1024)
    decode_case(90, "bf16", 128, 4, 1, 64, "int4")
    decode_case(80, "fp16", 64, 8, 4, 8)
    attention_case(89, "bf16", 256, 2, 0, False)
    attention_case(120, "bf16", 128, 4, 0, False)
    # Not bf16: where fp8 was compiled for sm_90 before, Triton 3.6 converts so on sm_89 too, by what it lacks.
    decode_case(89, "fp16", 128, 4, 1, 64, "fp8_e4m3")
    decode_case(120, "bf16", 256, 8, 1, 64)
    mla_case(120, "bf16", 128, 1, 64)
    mla_case(90, "bf16", 16, 1, 64)
    mla_case(80, "fp16", 16, 2, 8)
    mla_case(90, "bf16", 128, 1, 64, "fp8_ds_mla")
    if "--grid" in sys.argv:
        compile_more()
    compile_writes()


def compile_more() -> None:
    dequantise_case("k8v4", "fp16", 16, 64)
    dequantise_case("k8v4", "bf16", 16, 128, earlier=True)
    dequantise_case("int8", "bf16", 16, 64, earlier=True)
    dequantise_case("fp8_e4m3", "bf16", 16, 256)
    dequantise_case("turboquant4", "bf16", 16, 256)
    dequantise_case("turboquant4", "bf16", 16, 80)
    dequantise_case("turboquant_k3v4", "bf16", 32, 64, earlier=True)
    mla_case(90, "bf16", 16, 1, 64, "fp8_e4m3")
    decode_case(90, "bf16", 128, 4, 1, 64, "turboquant_k3v4")
    decode_case(90, "bf16", 128, 4, 1, 64, accumulate=True)
    decode_case(90, "bf16", 128, 4, 1, 64, keys=32)
    decode_case(80, "fp16", 128, 8, 2, 64, keys=32)
    attention_case(80, "bf16", 128, 4, 0, False)
    attention_case(90, "bf16", 128, 4, 0, False, "int8")
    attention_case(90, "bf16", 128, 4, 0, False, "int4")
    attention_case(89, "bf16", 128, 4, 0, False)
    attention_case(120, "bf16", 256, 2, 0, False)
    attention_case(120, "bf16", 128, 4, 0, False, "int4")
    decode_case(90, "bf16", 128, 4, 1, 1)
    decode_case(90, "bf16", 512, 8, 16, 2)
    for stored in ("fp8_e4m3", "int8", "k8v4", "turboquant2"):
        decode_case(90, "bf16", 128, 4, 1, 64, stored)
    decode_case(89, "bf16", 128, 4, 16, 64)
    decode_case(120, "bf16", 128, 4, 1, 64, "int8")
    mla_case(90, "bf16", 128, 1, 64)
    mla_case(90, "bf16", 128, 1, 64, "fp8_e4m3")
    mla_case(89, "bf16", 128, 1, 64)
    mla_case(120, "bf16", 16, 1, 64)
    mla_case(80, "bf16", 128, 1, 64)
    mla_case(90, "fp32", 128, 2, 64)
    mla_case(90, "fp16", 32, 1, 64, "fp8_e4m3")
    mla_case(89, "fp16", 128, 1, 64, "fp8_e4m3")
    mla_case(89, "fp16", 128, 1, 64, "fp8_ds_mla")
    attention_case(90, "bf16", 128, 4, 0, False)
    decode_case(90, "bf16", 128, 4, 1, 64)
    decode_case(90, "bf16", 128, 4, 16, 64)
    decode_case(90, "bf16", 128, 4, 16, 64, accumulate=True)
    decode_case(90, "bf16", 128, 1, 1, 64)
    decode_case(90, "bf16", 256, 8, 1, 64)


def compile_writes() -> None:
    dequantise_case("int4", "bf16", 32, 128, earlier=True)
    dequantise_case("int8", "bf16", 16, 64)
    shapes = {"TOKENS": 1, "S": 16, "H": 8, "D": 128, "DV": 128, "PDL": False}
    rows = {
        **dict.fromkeys(("key", "value"), "*bf16"),
        "slots": "*i64",
        "k_scale_value": "fp32",
        "v_scale_value": "fp32",
    }
    copied = {**shapes, "k_scale": None, "v_scale": None, "K_SCALES": 0, "V_SCALES": 0}
    for name, arch, codes, given in (
        ("auto", 90, "*bf16", copied | {"PDL": True}),
        ("fp8_e4m3", 80, "*u8", {**shapes, "K_SCALES": 8, "V_SCALES": 1}),
        ("fp8_e4m3", 89, "*u8", copied | {"TOKENS": 2}),
        ("int8", 80, "*i8", copied),
        ("k8v4", 80, "*i8", copied),
        ("turboquant_k3v4", 80, "*u8", copied),
        ("turboquant2", 80, "*u8", copied),
    ):
        types = {**rows, **dict.fromkeys(("key_cache", "value_cache"), codes), **plane_types(name)}
        types["value_cache"] = "*u8" if name == "k8v4" else codes
        types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32")
        kernel = reshape_and_cache._reshape_and_cache_kernel
        report(
            f"reshape_and_cache-sm{arch}-{name}", kernel, types, {**given, **format_of_kernels(name)}, arch, num_warps=4
        )
    tables = {"recent_table": "*i32", **{name: TYPES[name] for name in ("table", "query_start_loc", "seq_lens")}}
    for name, size, recent in (("int4", 32, 0), ("turboquant_k3v4", 48, 2)):
        given = {"SEQS": 256, "S": size, "D": 128, "DV": 128, "PARTS": 4, "RECENT": recent, **format_of_kernels(name)}
        types = {**tables, **rows, **dict.fromkeys(("key_cache", "value_cache"), "*u8"), **plane_types(name)}
        options = {"num_warps": 2, "maxnreg": seal_blocks._MAX_REGISTERS}
        report(f"seal_blocks-sm80-{name}", seal_blocks._seal_blocks_kernel, types, given, 80, **options)
    states = {"outputs": "*fp32", "lses": "*fp32", "out": "*bf16", "lse_out": "*fp32"}
    merge = merge_states._merge_states_kernel
    report("merge_states-sm90-bf16", merge, states, {"STATES": 16, "DV": 128, "BLOCK_D": 128}, 90, num_warps=1)
    given = reduce_splits.constants_of(group=4, pack=4, dim_v=128, width=128, halves=2) | {"v_scale": None, "PDL": True}
    types = {**TYPES, **states, "entries": "*i32"}
    report("reduce_splits-sm90-bf16", reduce_splits._reduce_splits_kernel, types, given, 90, num_warps=4)
    types = {**TYPES, "query": "*bf16", "codes": "*u8", "descales": "*fp32", "k_scale": "fp32", "v_scale": "fp32"}
    given = {"partial": None, "PARTS": 1, "G": 4, "D": 128, "ROWS": 32, "BLOCK_D": 128}
    report("quantise_queries-sm90-bf16", quantise_queries._quantise_kernel, types, given, 90, num_warps=4)


if __name__ == "__main__":
    main()
