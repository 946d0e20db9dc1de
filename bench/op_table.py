"""What is measured of the ops: each at several sizes, by every path that it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pagedattn.formats.mla_rows.deepseek import DS_MLA
from pagedattn.formats.mla_rows.format import LATENT_DTYPES
from pagedattn.runtime import op_registry

from . import op_problems as problems
from .op_problems import BLOCK_BYTES, DEVICE, DIM, DTYPE, GPU, HEADS, LAYERS, QUERY_HEADS, OpCalls
from .table import case_of

_ROW = HEADS * DIM * DTYPE.itemsize  # bytes of a token's keys
_HAS_CSRC = (
    *("reshape_and_cache", "reshape_and_cache_classic", "copy_blocks", "swap_blocks", "gather_kv"),
    "concat_and_cache_mla",
)


class OpCase(NamedTuple):
    """An op at one size. `moved`: bytes that a call must read and write; `make` prepares it by one path."""

    op: str
    size: str
    moved: int
    make: Callable[[str], OpCalls]

    @property
    def name(self) -> str:
        """What the op is called, which a format or a kind may follow: `reshape_and_cache fp8`."""
        return self.op.partition(" ")[0]


def op_cases() -> list[OpCase]:
    """Small, medium and large calls of every op; on a CPU fewer of them."""
    return [*_writes(), *_copies(), *_reads(), *_slots(), *_attention()]


def paths_of(case: OpCase) -> list[str]:
    """The paths that can run here: without Triton's interpreter, whose times say nothing."""
    csrc = op_registry.path_of("copy_blocks", DEVICE) == "csrc"
    decodes = not GPU and case.op == "paged_attention decode"
    there = {
        "csrc": csrc and (case.name in _HAS_CSRC or decodes) and DS_MLA.name not in case.op,
        "triton": GPU and op_registry.has_triton() and case.name != "reshape_and_cache_classic",
        "torch": True,
    }
    return [path for path, runs in there.items() if runs]


def default_of(case: OpCase) -> str:
    """The path that a call takes when it names none."""
    if not GPU and case.op == "paged_attention decode":
        return op_registry.choose("auto", DEVICE, "decode_attention")
    return op_registry.path_of(case.name, DEVICE)


def _writes() -> list[OpCase]:
    tokens = (1, 64, 512, 4096, 16384) if GPU else (1, 64, 2048)
    cases = [
        OpCase(op, _tokens(n), n * row, partial(problems.write, tokens=n, kv_cache_dtype=form))
        for op, form in (("reshape_and_cache", "auto"), ("reshape_and_cache fp8", "fp8"))
        for row in (problems.written_bytes("auto") + problems.written_bytes(form),)
        for n in tokens
    ]
    classic = problems.write_classic
    cases += [
        OpCase("reshape_and_cache_classic", _tokens(n), 4 * n * _ROW, partial(classic, tokens=n)) for n in tokens[:4]
    ]
    for form in LATENT_DTYPES:
        op = "concat_and_cache_mla" + ("" if form == "auto" else f" {form}")
        make = partial(problems.write_latent, kv_cache_dtype=form)
        cases += [OpCase(op, _tokens(n), problems.latent_bytes(n, form), partial(make, tokens=n)) for n in tokens]
    return cases


def _copies() -> list[OpCase]:
    counts, moved = (1, 16, 256, 2048) if GPU else (1, 16, 128), 2 * LAYERS * 2 * BLOCK_BYTES
    ways = {"out": False, "in": True} if GPU else {"on the host": False}
    blocks = (1, 16, 256, 4096) if GPU else (1, 64, 1024)
    copies = [OpCase("copy_blocks", _count(n, "pair"), n * moved, partial(problems.copy, pairs=n)) for n in counts]
    for way, into_device in ways.items():
        make = partial(problems.swap, into_device=into_device)
        name = f"swap_blocks {way}"
        copies += [OpCase(name, _count(n, "block"), n * BLOCK_BYTES, partial(make, blocks=n)) for n in blocks]
    return copies


def _reads() -> list[OpCase]:
    gathers = ((1, 128), (8, 512), (64, 512), (64, 2048)) if GPU else ((1, 64), (16, 256), (16, 1024))
    merges = ((2, 1), (2, 64), (16, 64), (2, 1024), (2, 8192)) if GPU else ((2, 1), (2, 64), (2, 512))
    cases = []
    for seqs, length in gathers:
        make = partial(problems.gather, seqs=seqs, length=length)
        cases.append(OpCase("gather_kv", f"{seqs} x {length} tokens", 2 * seqs * length * _ROW, make))
    for states, tokens in merges:
        make = partial(problems.merge, states=states, tokens=tokens)
        moved = (states + 1) * tokens * QUERY_HEADS * DIM * DTYPE.itemsize
        cases.append(OpCase("merge_attn_states", f"{states} states of {_tokens(tokens)}", moved, make))
    return cases


def _slots() -> list[OpCase]:
    steps = ((1, 1), (64, 1), (512, 1), (8, 2048), (1, 16384)) if GPU else ((1, 1), (64, 1), (8, 256))
    make = problems.slot_mapping
    return [OpCase("compute_slot_mapping", f"{b} x {n} new", 8 * b * n, partial(make, seqs=b, new=n)) for b, n in steps]


def _attention() -> list[OpCase]:
    decodes = ("1q1s1k", "16q1s1k", "64q1s4k") if GPU else ("1q1s64", "4q1s256", "16q1s512")
    prompts = ("1q512", "4q1k") if GPU else ("1q32", "2q128")
    return [
        OpCase(f"paged_attention {kind}", text, _bytes_of(text), partial(problems.attend, workload=text))
        for kind, texts in (("decode", decodes), ("prefill", prompts))
        for text in texts
    ]


def _bytes_of(workload: str) -> int:
    case = case_of(workload, GPU)
    return case.bytes_read("auto")


def _tokens(count: int) -> str:
    return _count(count, "token")


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
