"""Cache ops, every path: writing new tokens, copying, swapping and gathering blocks; checked, then timed.

Bytes are those that must move: read and written for writes, copies and gathers, sent over the bus for swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from pagedattn import ops
from pagedattn.formats.mla_rows.deepseek import DS_MLA
from pagedattn.formats.mla_rows.format import LATENT_DTYPES
from pagedattn.formats.registry import format_of
from pagedattn.runtime import op_registry

from . import op_problems as problems
from .measure import empty_row, percent, reason
from .op_problems import BLOCK_BYTES, DEVICE, DIM, DTYPE, GPU, HEADS, LAYERS, SIZE, OpCalls
from .ratios import Row
from .timing import host_us, stream_us, time_us

WRITTEN = ("auto", "fp8", "int8", "k8v4")  # formats that new tokens are written in
MECHANISMS = {"csrc kernel": 1, "csrc batch": 2, "csrc copies": 3}
Times = tuple[float, float | None]  # microseconds, and of the host


def measure(ceilings: Mapping[str, float], tell: Callable[[str], object] = lambda name: None) -> Iterator[list[Row]]:
    """The rows of one op after the other."""
    for op in OPS:
        tell(f"cache {op.__name__}")
        rows = list(op())
        for row in rows:
            if row["us"] is not None:
                row["copy_percent"] = percent(row["gb_s"], ceilings, "copy_gb_s")
                row["read_percent"] = percent(row["gb_s"], ceilings, "read_gb_s")
        yield rows


def writes() -> Iterator[Row]:
    """New tokens, as a prompt's come: one after the other in blocks that lie anywhere, in each format. Beside each the
    floor: an elementwise kernel that reads and writes as many bytes."""
    for tokens in (256, 8192) if GPU else (16,):
        for form in WRITTEN:
            name = f"write {tokens} tokens" + ("" if form == "auto" else f" {form}")
            stored = {} if form == "auto" else {"kv_cache_dtype": format_of(form).name}
            moved = tokens * (problems.written_bytes("auto") + problems.written_bytes(form))
            for path in _paths(*(["csrc"] if format_of(form).has_csrc else []), "triton", "torch"):
                yield _row(name, path, moved, partial(_timed, problems.write, path, tokens, form)) | stored
            if GPU and form == "auto" and find_spec("flashinfer") is not None:
                rows = torch.randn(LAYERS, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
                yield _row(name, "FLASHINFER append", moved, partial(_flashinfer_append, rows))
            if GPU:
                yield _row(name, "plain copy kernel", moved, partial(_plain_copy, moved)) | stored


def _flashinfer_append(rows: torch.Tensor) -> Times:
    flashinfer, tokens, seqs = import_module("flashinfer"), rows.shape[2], 4
    blocks = tokens // SIZE
    caches = torch.zeros(LAYERS, 2, blocks, SIZE, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    integers = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    starts, lens = torch.arange(0, tokens + 1, tokens // seqs, device=DEVICE).int(), integers([tokens // seqs] * seqs)
    pages = torch.randperm(blocks, device=DEVICE).int()
    sequence, position = flashinfer.get_batch_indices_positions(starts, lens, tokens)
    where = sequence, position
    pages_of = pages, starts // SIZE, integers([SIZE] * seqs)

    def append(layer: int) -> None:
        flashinfer.append_paged_kv_cache(*rows[layer], *where, (caches[layer, 0], caches[layer, 1]), *pages_of)

    append(0)
    problems.same(caches[0, 0, pages.long()].flatten(0, 1), rows[0, 0])
    return time_us([partial(append, i) for i in range(LAYERS)]), host_us(partial(append, 0))


def _plain_copy(moved: int) -> Times:
    """An elementwise kernel that reads and writes so many bytes, one half each."""
    rows = torch.randn(LAYERS, moved // 2 // DTYPE.itemsize, device=DEVICE).to(DTYPE)
    target = torch.empty_like(rows)
    return time_us([partial(torch.neg, rows[i], out=target[i]) for i in range(LAYERS)]), None


def latent_writes() -> Iterator[Row]:
    """The same for latent rows (MLA), in each format that stores them. Beside each the floor."""
    shape = {"num_kv_heads": 1, "head_dim": problems.LATENT + problems.ROPE, "block_size": problems.LATENT_SIZE}
    for tokens in (256, 8192) if GPU else (16,):
        for form in LATENT_DTYPES:
            name = f"write {tokens} latent rows" + ("" if form == "auto" else f" {form}")
            stored = shape if form == "auto" else shape | {"kv_cache_dtype": form}
            moved = problems.latent_bytes(tokens, form)
            for path in _paths(*(["csrc"] if form != DS_MLA.name else []), "triton", "torch"):
                yield _row(name, path, moved, partial(_timed, problems.write_latent, path, tokens, form)) | stored
            if GPU:
                yield _row(name, "plain copy kernel", moved, partial(_plain_copy, moved)) | stored


def copies() -> Iterator[Row]:
    """Of 8 layers, keys and values in a block of 64 KB: 2048 pairs read and write 1.07 GB each."""
    block = 2 * BLOCK_BYTES if GPU else 2 << 10
    for count in (1, 2048) if GPU else (16,):
        for path in _paths("csrc", "triton", "torch"):
            run = partial(_on_stream, problems.copy, path, count, block)
            yield _row(f"copy_blocks {count} pairs of 8 layers", path, 2 * LAYERS * count * block, run)


def swaps() -> Iterator[Row]:
    """Blocks of 32 KB, scattered and in runs of 64, beside one memcpy of as much pinned memory."""
    if not GPU:
        return  # there is no bus to a device
    count = (1 << 30) // BLOCK_BYTES
    on_device = torch.randint(0, 256, (count, BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    host = torch.empty(count, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True).random_(0, 256)
    with torch.cuda.stream(torch.cuda.Stream()):
        for way, source, target in (("out", on_device, host), ("in", host, on_device)):
            memcpy = partial(target.copy_, source, non_blocking=True)
            yield _row(f"memcpy {way} 1 GB", "one cudaMemcpyAsync", 1 << 30, lambda run=memcpy: (stream_us(run), None))
            for run in (1, 64):
                runs = torch.arange(count).view(-1, run)
                pairs = torch.stack([runs[torch.randperm(len(runs))].flatten() for _ in range(2)], 1)
                for path in _paths("csrc", *MECHANISMS, "triton", "torch"):
                    name = f"swap {way} 1 GB in runs of {run}"
                    yield _row(name, path, 1 << 30, partial(_swap, source, target, pairs, path))


def _swap(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, path: str) -> Times:
    def swap() -> None:
        if path in MECHANISMS:
            torch.ops.pagedattn_csrc.swap_blocks(source, target, pairs, MECHANISMS[path])
        else:
            ops.swap_blocks(source, target, pairs, path=path)

    problems.check_swap(swap, source, target, pairs)
    return stream_us(swap, 3), host_us(swap, 3)


def gathers() -> Iterator[Row]:
    """64 sequences of 1024 tokens out of shuffled blocks."""
    seqs, length = (64, 1024) if GPU else (4, 64)
    for path in _paths("csrc", "triton", "torch"):
        run = partial(_timed, problems.gather, path, seqs, length)
        yield _row(f"gather {seqs} x {length} keys", path, 2 * seqs * length * HEADS * DIM * DTYPE.itemsize, run)


def _timed(prepare: Callable[..., OpCalls], *args: object) -> Times:
    """Checked; by itself on the device, and on the host."""
    made = prepare(*args)
    made.check()
    return time_us(made.calls), host_us(made.calls[0])


def _on_stream(prepare: Callable[..., OpCalls], *args: object) -> Times:
    """The same where host tensors are sent with every call."""
    made = prepare(*args)
    made.check()
    return stream_us(made.calls[0]), host_us(made.calls[0], 10)


OPS = (writes, latent_writes, copies, swaps, gathers)


def _paths(*names: str) -> list[str]:
    """Those of the paths that can run here; the interpreter is not timed."""
    there = {"torch", *(["triton"] if GPU and op_registry.has_triton() else [])}
    if op_registry.path_of("copy_blocks", DEVICE) == "csrc":
        there.add("csrc")
    return [name for name in names if name.split()[0] in there]


def _row(workload: str, path: str, moved: int, run: Callable[[], Times]) -> Row:
    shape = {"num_kv_heads": HEADS, "head_dim": DIM, "block_size": SIZE, "dtype": str(DTYPE).removeprefix("torch.")}
    row = empty_row("cache", workload, path) | shape
    try:
        us, host = run()
    except Exception as error:  # one path's failure is not the end of the others
        return row | {"refused": reason(error)}
    return row | {
        "us": round(us, 2),
        "gb_s": round(moved / us / 1e3, 1),
        "host_us": None if host is None else round(host, 1),
    }
