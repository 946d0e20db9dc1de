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
from pagedattn.ops import library

from .measure import empty_row, percent, reason
from .problem import DEVICE
from .ratios import Row
from .timing import host_us, time_us

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
HEADS, DIM, SIZE, LAYERS = 8, 128, 16, 8
BLOCK_BYTES = 32 << 10 if GPU else 1 << 10  # keys or values of 16 tokens of such a layer
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
    """New tokens, as a prompt's come: one after the other in blocks that lie anywhere. Then what bounds them."""
    for tokens in (256, 8192) if GPU else (16,):
        firsts = torch.randperm(tokens // SIZE + 1, device=DEVICE) * SIZE
        slots = (firsts[:, None] + torch.arange(SIZE, device=DEVICE)).flatten()[:tokens]
        rows = torch.randn(LAYERS, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
        for stored, kind in ((DTYPE, ""), (torch.float8_e4m3fn, " fp8")):
            moved = 2 * tokens * HEADS * DIM * (DTYPE.itemsize + stored.itemsize)
            for path in _paths("csrc", "triton", "torch"):
                yield _row(f"write {tokens} tokens{kind}", path, moved, partial(_write, rows, slots, stored, path))
        if GPU:
            name, moved = f"write {tokens} tokens", 2 * rows[0].nbytes
            if find_spec("flashinfer") is not None:
                yield _row(name, "FLASHINFER append", moved, partial(_flashinfer_append, rows))
            yield _row(name, "plain copy kernel", moved, partial(_plain_copy, rows))


def _write(rows: torch.Tensor, slots: torch.Tensor, stored: torch.dtype, path: str) -> Times:
    blocks = len(slots) // SIZE + 1
    caches = torch.zeros(LAYERS, blocks, 2, SIZE, HEADS, DIM, device=DEVICE, dtype=stored)
    scale = 0.05 if stored != DTYPE else None

    def write(layer: int) -> None:
        keys, values = caches[layer, :, 0], caches[layer, :, 1]
        key, value = rows[layer]
        ops.reshape_and_cache(key, value, keys, values, slots, k_scale=scale, v_scale=scale, path=path)

    write(0)
    for i in range(2):
        want = rows[0, i]
        if scale is not None:
            want = (want.float() / torch.tensor([scale], device=DEVICE)).clamp(-448, 448).to(stored)
        _same(caches[0, slots // SIZE, i, slots % SIZE], want)
    return time_us([partial(write, i) for i in range(LAYERS)]), host_us(partial(write, 0))


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
    _same(caches[0, 0, pages.long()].flatten(0, 1), rows[0, 0])
    return time_us([partial(append, i) for i in range(LAYERS)]), host_us(partial(append, 0))


def _plain_copy(rows: torch.Tensor) -> Times:
    """An elementwise kernel that reads and writes as many bytes."""
    target = torch.empty_like(rows)
    return time_us([partial(torch.neg, rows[i], out=target[i]) for i in range(LAYERS)]), None


def copies() -> Iterator[Row]:
    """Of 8 layers, keys and values in a block of 64 KB: 2048 pairs read and write 1.07 GB each."""
    for count in (1, 2048) if GPU else (16,):
        slabs = torch.randint(0, 256, (LAYERS, 2 * count, 2 * BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
        pairs = torch.stack((torch.arange(count), torch.randperm(count) + count), 1)
        for path in _paths("csrc", "triton", "torch"):
            name = f"copy_blocks {count} pairs of 8 layers"
            yield _row(name, path, slabs.numel(), partial(_copy, slabs, pairs, path))


def _copy(slabs: torch.Tensor, pairs: torch.Tensor, path: str) -> Times:
    copy = partial(ops.copy_blocks, list(slabs), pairs, path=path)
    slabs[:, pairs[:, 1]] = 0
    copy()
    _same(slabs[:, pairs[:, 1]], slabs[:, pairs[:, 0]])
    return _stream_us(copy), host_us(copy, 10)


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
            yield _row(f"memcpy {way} 1 GB", "one cudaMemcpyAsync", 1 << 30, lambda run=memcpy: (_stream_us(run), None))
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

    target.zero_()
    swap()
    torch.cuda.current_stream().synchronize()
    _same(target[pairs[:, 1]].cpu(), source[pairs[:, 0]].cpu())
    return _stream_us(swap, 3), host_us(swap, 3)


def gathers() -> Iterator[Row]:
    """64 sequences of 1024 tokens out of shuffled blocks."""
    seqs, length, layers = (64, 1024, 4) if GPU else (4, 64, 4)
    blocks = seqs * length // SIZE
    caches = torch.randn(layers, blocks, SIZE, HEADS, DIM, device=DEVICE).to(DTYPE)
    table = torch.randperm(blocks, device=DEVICE).int().view(seqs, -1)
    lens = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=DEVICE)
    for path in _paths("csrc", "triton", "torch"):
        gather = partial(_gather, caches, table, lens, path)
        yield _row(f"gather {seqs} x {length} keys", path, 2 * caches[0].nbytes, gather)


def _gather(caches: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, path: str) -> Times:
    def gather(layer: int) -> torch.Tensor:
        return ops.gather_kv(caches[layer], None, table, lens, table.numel() * SIZE, path=path)[0]

    _same(gather(0), caches[0][table.long().flatten()].flatten(0, 1))
    return time_us([partial(gather, i) for i in range(len(caches))]), host_us(partial(gather, 0))


OPS = (writes, copies, swaps, gathers)


def _paths(*names: str) -> list[str]:
    """Those of the paths that can run here; the interpreter is not timed."""
    there = {"torch", *(["triton"] if GPU and library.has_triton() else [])}
    if library.path_of("copy_blocks", DEVICE) == "csrc":
        there.add("csrc")
    return [name for name in names if name.split()[0] in there]


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
        raise ArithmeticError("the target does not hold what was to be written")


def _stream_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds per call, many enqueued one after the other: what the device takes, unless the host takes longer."""
    call()
    if not GPU:
        return host_us(call, 5)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


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
