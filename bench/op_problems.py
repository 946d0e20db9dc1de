"""One op by one path, ready to be timed: a call for each layer, each with data of its own, and what checks the result.

Results are compared with torch's indexing (or arithmetic in float64) of the same data, never with another path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from pagedattn import FullAttentionSpec, MLASpec, PagedKVCache, ops
from pagedattn.formats.registry import format_of
from pagedattn.kernels.reference import cpu

from .contenders import contenders
from .problem import DEVICE, Problem, make_problem
from .table import case_of

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
HEADS, DIM, SIZE = 8, 128, 16
QUERY_HEADS = 32
BLOCK_BYTES = 32 << 10  # keys or values of 16 tokens of such a layer in bfloat16
LAYERS = 8  # of a copy of blocks, all in one call
# Of all layers' data together: far more than an L2 cache holds, and enough layers that a graph's start counts little.
_TOTAL_BYTES, _FEWEST, _MOST = (1 << 29, 4, 32) if GPU else (1 << 24, 1, 4)
FP8_SCALE = 0.05
LATENT, ROPE, LATENT_SIZE = 512, 64, 64  # of latent rows (MLA), in blocks as these have them


class OpCalls(NamedTuple):
    """`calls`: the op in each layer. `check`: makes layer 0's call and raises ArithmeticError for a wrong result.

    graphs: whether a CUDA graph can hold the calls; a host tensor that has to be sent first cannot be captured. step:
    the device's work once per step, as of `run.Run`.
    """

    calls: list[Callable[[], object]]
    check: Callable[[], None]
    graphs: bool = True
    step: Callable[[], object] | None = None


def slots_of(tokens: int, size: int = SIZE) -> torch.Tensor:
    """[tokens] int64: as a prompt's come, one after the other in blocks of `size` that lie anywhere."""
    firsts = torch.randperm(tokens // size + 1, device=DEVICE) * size
    return (firsts[:, None] + torch.arange(size, device=DEVICE)).flatten()[:tokens]


def write(path: str, tokens: int, kv_cache_dtype: str = "auto") -> OpCalls:
    """`reshape_and_cache` of keys and values, into caches of this format."""
    slots, form = slots_of(tokens), format_of(kv_cache_dtype)
    layers = _layers(4 * tokens * HEADS * DIM * DTYPE.itemsize)
    rows = torch.randn(layers, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    blocks = tokens // SIZE + 1
    cache = PagedKVCache(layers, blocks, SIZE, HEADS, DIM, dtype=DTYPE, device=DEVICE, kv_cache_dtype=kv_cache_dtype)
    scale = FP8_SCALE if form.takes_scales else None

    def call(layer: int) -> None:
        (key, value), to = rows[layer], cache.layer(layer)
        ops.reshape_and_cache(key, value, to.key, to.value, slots, k_scale=scale, v_scale=scale, path=path, **to.stored)

    def check() -> None:
        call(0)
        divisor = None if scale is None else torch.tensor([scale], device=DEVICE)
        for given, kind, planes in zip(rows[0], (form.key, form.value), cache.layer(0).sides, strict=True):
            for got, want in zip(planes, kind.encode(given, divisor), strict=True):
                same(got[slots // SIZE, slots % SIZE], want)

    return OpCalls([partial(call, i) for i in range(layers)], check)


def written_bytes(kv_cache_dtype: str) -> int:
    """Of one token in a cache of this format, codes and scales of keys and values."""
    spec = FullAttentionSpec(num_kv_heads=HEADS, head_dim=DIM, dtype=DTYPE, kv_cache_dtype=kv_cache_dtype)
    return sum(spec.slot_bytes)


def write_latent(path: str, tokens: int, kv_cache_dtype: str = "auto") -> OpCalls:
    """`concat_and_cache_mla` of latent and rotated parts, each a tensor of its own, into rows of this format."""
    slots, spec = slots_of(tokens, LATENT_SIZE), latent_spec(kv_cache_dtype)
    layers = _layers(latent_bytes(tokens, kv_cache_dtype))
    latents, rotated = (torch.randn(layers, tokens, width, device=DEVICE).to(DTYPE) for width in (LATENT, ROPE))
    cache = PagedKVCache.from_specs([spec] * layers, tokens // LATENT_SIZE + 1, device=DEVICE)
    scale = FP8_SCALE if spec.format.takes_scales else None

    def call(layer: int) -> None:
        rows = cache.layer(layer).key
        ops.concat_and_cache_mla(latents[layer], rotated[layer], rows, slots, k_scale=scale, path=path)

    def check() -> None:
        call(0)
        divisor = None if scale is None else torch.tensor([scale], device=DEVICE)
        (want,) = spec.format.key.encode(torch.cat((latents[0], rotated[0]), -1)[:, None], divisor)
        same(cache.layer(0).key[slots // LATENT_SIZE, slots % LATENT_SIZE], want)

    return OpCalls([partial(call, i) for i in range(layers)], check)


def latent_spec(kv_cache_dtype: str) -> MLASpec:
    """A layer of latent rows in this format."""
    shape = {"head_dim": LATENT + ROPE, "latent_dim": LATENT, "block_size": LATENT_SIZE}
    return MLASpec(dtype=DTYPE, kv_cache_dtype=kv_cache_dtype, **shape)


def latent_bytes(tokens: int, kv_cache_dtype: str) -> int:
    """What a write of so many latent rows reads and writes."""
    return tokens * sum(latent_spec(form).bytes_per_block // LATENT_SIZE for form in ("auto", kv_cache_dtype))


def write_classic(path: str, tokens: int) -> OpCalls:
    """`reshape_and_cache_classic`, read back by `from_classic_layout`."""
    slots, blocks, x = slots_of(tokens), tokens // SIZE + 1, 16 // DTYPE.itemsize
    layers = _layers(4 * tokens * HEADS * DIM * DTYPE.itemsize)
    rows = torch.randn(layers, 2, tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    keys = torch.zeros(layers, blocks, HEADS, DIM // x, SIZE, x, device=DEVICE, dtype=DTYPE)
    values = torch.zeros(layers, blocks, HEADS, DIM, SIZE, device=DEVICE, dtype=DTYPE)

    def call(layer: int) -> None:
        key, value = rows[layer]
        ops.reshape_and_cache_classic(key, value, keys[layer], values[layer], slots, path=path)

    def check() -> None:
        call(0)
        for got, want in zip(ops.from_classic_layout(keys[0], values[0]), rows[0], strict=True):
            same(got.flatten(0, 1)[slots], want)

    return OpCalls([partial(call, i) for i in range(layers)], check)


def copy(path: str, pairs: int, block_bytes: int = 2 * BLOCK_BYTES) -> OpCalls:
    """`copy_blocks` of 8 layers in one call, keys and values in a block."""
    slabs = torch.randint(0, 256, (LAYERS, 2 * pairs, block_bytes), dtype=torch.uint8, device=DEVICE)
    listed = torch.stack((torch.arange(pairs), torch.randperm(pairs) + pairs), 1)
    call = partial(ops.copy_blocks, list(slabs), listed, path=path)

    def check() -> None:
        slabs[:, listed[:, 1]] = 0
        call()
        same(slabs[:, listed[:, 1]], slabs[:, listed[:, 0]])

    return OpCalls([call], check, graphs=path == "csrc")  # which sends the pairs as parameters of its kernel


def swap(path: str, blocks: int, into_device: bool) -> OpCalls:
    """`swap_blocks` of scattered blocks between the device and pinned memory; on a CPU between two tensors."""
    on_device = torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    host = torch.empty(blocks, BLOCK_BYTES, dtype=torch.uint8, pin_memory=GPU).random_(0, 256)
    source, target = (host, on_device) if into_device else (on_device, host)
    pairs = torch.stack([torch.randperm(blocks) for _ in range(2)], 1)
    call = partial(ops.swap_blocks, source, target, pairs, path=path)
    return OpCalls([call], partial(check_swap, call, source, target, pairs), graphs=False)


def check_swap(call: Callable[[], object], source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Whether `call` swaps these pairs; it may be asynchronous."""
    target.zero_()
    call()
    if GPU:
        torch.cuda.synchronize()
    same(target[pairs[:, 1]].cpu(), source[pairs[:, 0]].cpu())


def gather(path: str, seqs: int, length: int) -> OpCalls:
    """`gather_kv` of the keys of sequences whose blocks are shuffled."""
    blocks = seqs * length // SIZE
    layers = _layers(2 * blocks * SIZE * HEADS * DIM * DTYPE.itemsize)
    caches = torch.randn(layers, blocks, SIZE, HEADS, DIM, device=DEVICE).to(DTYPE)
    table = torch.randperm(blocks, device=DEVICE).int().view(seqs, -1)
    lens = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=DEVICE)

    def call(layer: int) -> torch.Tensor:
        return ops.gather_kv(caches[layer], None, table, lens, seqs * length, path=path)[0]

    def check() -> None:
        same(call(0), caches[0][table.long().flatten()].flatten(0, 1))

    return OpCalls([partial(call, i) for i in range(layers)], check)


def merge(path: str, states: int, tokens: int) -> OpCalls:
    """`merge_attn_states` of partial outputs of 32 query heads."""
    layers = _layers((states + 1) * tokens * QUERY_HEADS * DIM * DTYPE.itemsize)
    outputs = torch.randn(layers, states, tokens, QUERY_HEADS, DIM, device=DEVICE).to(DTYPE)
    lses = torch.randn(layers, states, tokens, QUERY_HEADS, device=DEVICE)

    def call(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.merge_attn_states(outputs[layer], lses[layer], path=path)

    def check() -> None:
        out, lse = call(0)
        weights = lses[0].double().softmax(0)
        wants = (outputs[0].double() * weights[..., None]).sum(0), lses[0].double().logsumexp(0)
        close(out, wants[0])
        close(lse, wants[1])

    return OpCalls([partial(call, i) for i in range(layers)], check)


def slot_mapping(path: str, seqs: int, new: int) -> OpCalls:
    """`compute_slot_mapping` of `new` tokens for each of the sequences, behind a context of 1024."""
    length, columns = 1024 + new, (1024 + new) // SIZE + 1
    table = torch.randperm(seqs * columns, device=DEVICE).int().view(seqs, columns)
    starts = torch.arange(0, seqs * new + 1, new, dtype=torch.int32, device=DEVICE)
    lens = torch.full((seqs,), length, dtype=torch.int32, device=DEVICE)
    slots = torch.empty(_layers(8 * seqs * new), seqs * new, dtype=torch.int64, device=DEVICE)

    def call(layer: int) -> None:
        ops.compute_slot_mapping(table, SIZE, starts, lens, slots[layer], path=path)

    def check() -> None:
        call(0)
        position = torch.arange(1024, length, device=DEVICE)
        same(slots[0].view(seqs, new), table[:, position // SIZE].long() * SIZE + position % SIZE)

    return OpCalls([partial(call, i) for i in range(len(slots))], check)


def attend(path: str, workload: str) -> OpCalls:
    """`paged_attention` as the layer calls it, over a workload's caches; on a CPU decodes by csrc or by torch."""
    problem = _problem(workload)
    (contender,) = contenders("TRITON" if path == "triton" else "TORCH")
    run = contender.run(problem)

    def call(layer: int) -> torch.Tensor:
        with _decodes_by(path):
            return run.attend(layer)

    def check() -> None:
        run.plan()
        problem.error(call(0), run.block_size)

    return OpCalls([partial(call, i) for i in range(problem.layers)], check, step=run.step)


@lru_cache(maxsize=1)
def _problem(workload: str) -> Problem:
    """One for all paths: it is large, and so is what it is checked with."""
    return make_problem(case_of(workload, GPU))


@contextmanager
def _decodes_by(path: str) -> Iterator[None]:
    """Which path the CPU's attention takes for decodes; its op has no argument for that."""
    before = cpu.choose
    cpu.choose = lambda *args: path
    try:
        yield
    finally:
        cpu.choose = before


def _layers(bytes_of_layer: int) -> int:
    return min(max(_TOTAL_BYTES // bytes_of_layer, _FEWEST), _MOST)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise ArithmeticError where these are not the same bytes."""
    if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
        raise ArithmeticError("the target does not hold what was to be written")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise ArithmeticError where the relative error against float64 is more than one rounding."""
    error, allowed = float((got.double() - want).norm() / want.norm()), torch.finfo(got.dtype).eps
    if not error <= allowed:
        raise ArithmeticError(f"relative error {error:.2e} where {allowed:.2e} is one rounding")
