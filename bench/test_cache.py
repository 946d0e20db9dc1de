"""Cache ops, every path: writing new tokens, copying, swapping and gathering blocks; checked, then timed.

Bytes are those that must move: read and written for writes, copies and gathers, sent over the bus for swaps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from problem import DEVICE
from timing import host_us, time_us

from pagedattn import ops
from pagedattn.ops import library

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
HEADS, DIM, SIZE = 8, 128, 16
BLOCK_BYTES = 32 << 10  # keys or values of 16 tokens of such a layer
MECHANISMS = {"csrc kernel": 1, "csrc batch": 2, "csrc copies": 3}


def _paths(*names: str) -> list[str]:
    """Those of the paths that can run here; the interpreter is not timed."""
    there = {"torch", *(["triton"] if GPU and library.has_triton() else [])}
    if library.path_of("copy_blocks", DEVICE) == "csrc":
        there.add("csrc")
    return [name for name in names if name.split()[0] in there]


@pytest.mark.parametrize("path", _paths("csrc", "triton", "torch"))
@pytest.mark.parametrize("stored", [DTYPE, torch.float8_e4m3fn], ids=["same", "fp8"])
@pytest.mark.parametrize("tokens", [256, 8192] if GPU else [16])
def test_write(results, tokens: int, stored: torch.dtype, path: str) -> None:
    layers, blocks = 8, tokens // SIZE + 1
    # As a prompt's tokens come: one after the other in blocks that lie anywhere.
    firsts = torch.randperm(blocks, device=DEVICE) * SIZE
    slots = (firsts[:, None] + torch.arange(SIZE, device=DEVICE)).flatten()[:tokens]
    rows = torch.randn(layers, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    caches = torch.zeros(layers, blocks, 2, SIZE, HEADS, DIM, device=DEVICE, dtype=stored)
    scale = 0.05 if stored != DTYPE else None

    def write(layer: int) -> None:
        keys, values = caches[layer, :, 0], caches[layer, :, 1]
        key, value = rows[layer]
        ops.reshape_and_cache(key, value, keys, values, slots, k_scale=scale, v_scale=scale, path=path)

    write(0)
    for i in range(2):
        want = rows[0, i] if scale is None else (rows[0, i].float() / torch.tensor([scale], device=DEVICE))
        want = want if scale is None else want.clamp(-448, 448).to(stored)
        got = caches[0, slots // SIZE, i, slots % SIZE]
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), "the cache does not hold what was written"
    us = time_us([lambda i=i: write(i) for i in range(layers)])
    moved = 2 * tokens * HEADS * DIM * (DTYPE.itemsize + stored.itemsize)
    kind = "" if scale is None else " fp8"
    _record(results, f"write {tokens} tokens{kind}", path, us, moved, host_us(lambda: write(0)))


@pytest.mark.skipif(not GPU or find_spec("flashinfer") is None, reason="needs FlashInfer and a GPU")
@pytest.mark.parametrize("tokens", [256, 8192])
def test_flashinfer_append(results, tokens: int) -> None:
    """The peer of `test_write`: its append of as many tokens to as many caches."""
    import flashinfer  # type: ignore[import-not-found]

    layers, seqs, blocks = 8, 4, tokens // SIZE
    rows = torch.randn(layers, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    caches = torch.zeros(layers, 2, blocks, SIZE, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    integers = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    starts, lens = torch.arange(0, tokens + 1, tokens // seqs, device=DEVICE).int(), integers([tokens // seqs] * seqs)
    pages = torch.randperm(blocks, device=DEVICE).int()
    page_starts, last = starts // SIZE, integers([SIZE] * seqs)
    sequence, position = flashinfer.get_batch_indices_positions(starts, lens, tokens)

    def append(layer: int) -> None:
        cache = caches[layer, 0], caches[layer, 1]
        flashinfer.append_paged_kv_cache(*rows[layer], sequence, position, cache, pages, page_starts, last)

    append(0)
    assert torch.equal(caches[0, 0, pages.long()].flatten(0, 1), rows[0, 0]), "the cache does not hold what was written"
    us = time_us([lambda i=i: append(i) for i in range(layers)])
    moved = 4 * tokens * HEADS * DIM * DTYPE.itemsize
    _record(results, f"write {tokens} tokens", "FLASHINFER append", us, moved, host_us(lambda: append(0)))


@pytest.mark.skipif(not GPU, reason="the ceiling of a GPU")
@pytest.mark.parametrize("tokens", [256, 8192])
def test_copy_of_as_much(results, tokens: int) -> None:
    """What bounds `test_write`: an elementwise kernel that reads and writes as many bytes."""
    rows = torch.randn(8, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    target = torch.empty_like(rows)
    us = time_us([lambda i=i: torch.neg(rows[i], out=target[i]) for i in range(8)])
    _record(results, f"write {tokens} tokens", "plain copy kernel", us, 2 * rows[0].nbytes, None)


@pytest.mark.parametrize("path", _paths("csrc", "triton", "torch"))
@pytest.mark.parametrize("count", [1, 2048] if GPU else [16])
def test_copy_blocks(results, count: int, path: str) -> None:
    """Of 8 layers, keys and values in a block of 64 KB: 2048 pairs read and write 1.07 GB each."""
    slabs = torch.randint(0, 256, (8, 2 * count, 2 * BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    caches = list(slabs)
    pairs = torch.stack((torch.arange(count), torch.randperm(count) + count), 1)
    ops.copy_blocks(caches, pairs, path=path)
    assert torch.equal(slabs[:, pairs[:, 1]], slabs[:, pairs[:, 0]]), "the copies differ from their sources"
    us = _stream_us(lambda: ops.copy_blocks(caches, pairs, path=path))
    host = host_us(lambda: ops.copy_blocks(caches, pairs, path=path), 10)
    _record(results, f"copy_blocks {count} pairs of 8 layers", path, us, slabs.numel(), host)


@pytest.mark.skipif(not GPU, reason="there is no bus to a device here")
@pytest.mark.parametrize("way", ["out", "in"])
def test_swap_blocks(results, way: str) -> None:
    """1 GB of blocks of 32 KB, scattered and in runs of 64, beside one memcpy of as much pinned memory."""
    count = (1 << 30) // BLOCK_BYTES
    on_device = torch.randint(0, 256, (count, BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    host = torch.empty(count, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True).random_(0, 256)
    source, target = (on_device, host) if way == "out" else (host, on_device)
    with torch.cuda.stream(torch.cuda.Stream()):
        us = _stream_us(lambda: target.copy_(source, non_blocking=True), 5)
        _record(results, f"memcpy {way} 1 GB", "one cudaMemcpyAsync", us, 1 << 30, None)
        for run in (1, 64):
            runs = torch.arange(count).view(-1, run)
            shuffled = [runs[torch.randperm(len(runs))].flatten() for _ in range(2)]
            pairs = torch.stack(shuffled, 1)
            for path in _paths("csrc", *MECHANISMS, "triton", "torch"):
                _swap(results, f"swap {way} 1 GB in runs of {run}", source, target, pairs, path)


def _swap(
    results: list[dict[str, object]],
    name: str,
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    path: str,
) -> None:
    def call() -> None:
        if path in MECHANISMS:
            torch.ops.pagedattn_csrc.swap_blocks(source, target, pairs, MECHANISMS[path])
        else:
            ops.swap_blocks(source, target, pairs, path=path)

    target.zero_()
    call()
    torch.cuda.current_stream().synchronize()
    assert torch.equal(target[pairs[:, 1]].cpu(), source[pairs[:, 0]].cpu()), f"{path}: the blocks differ"
    _record(results, name, path, _stream_us(call, 3), 1 << 30, host_us(call, 3))


@pytest.mark.parametrize("path", _paths("csrc", "triton", "torch"))
def test_gather(results, path: str) -> None:
    """64 sequences of 1024 tokens out of shuffled blocks."""
    seqs, length = (64, 1024) if GPU else (4, 64)
    blocks = seqs * length // SIZE
    caches = torch.randn(4, blocks, SIZE, HEADS, DIM, device=DEVICE).to(DTYPE)
    table = torch.randperm(blocks, device=DEVICE).int().view(seqs, -1)
    lens = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=DEVICE)

    def gather(layer: int) -> torch.Tensor:
        return ops.gather_kv(caches[layer], None, table, lens, seqs * length, path=path)[0]

    assert torch.equal(gather(0), caches[0][table.long().flatten()].flatten(0, 1)), "not the rows asked for"
    us = time_us([lambda i=i: gather(i) for i in range(4)])
    _record(results, f"gather {seqs} x {length} keys", path, us, 2 * caches[0].nbytes, host_us(lambda: gather(0)))


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


def _record(
    results: list[dict[str, object]], workload: str, path: str, us: float, moved: int, host: float | None
) -> None:
    gb_s = moved / us / 1e3
    row = {
        "suite": "cache",
        "workload": workload,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "block_size": SIZE,
        "dtype": str(DTYPE).removeprefix("torch."),
        "backend": path,
        "us": round(us, 2),
        "gb_s": round(gb_s, 1),
        "host_us": None if host is None else round(host, 1),
    }
    results.append(row)
    print(f"\n{workload}, {path}: {us:.2f} us, {gb_s:.0f} GB/s, host {row['host_us']} us")
