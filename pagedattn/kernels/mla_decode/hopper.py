"""Gluon: absorbed latent attention (MLA) of new tokens over a paged cache of latent rows, on Hopper.

The work is split as by `kernel.py`, and its second launch adds up the states of items that programs share. Within a
program one warp loads tiles of 64 rows by TMA, and two warpgroups compute (`hopper_groups.py`). With fewer than 64
query rows products are transposed, so that 16 heads are padded to 16 (`Shape`). Sources: FlashMLA (2025) for one load
of a row and for halves of the latent elements, FlashAttention-3 (2024) for logits by one group, stream-K (PPoPP 2023)
for the split.

Legend: as in `kernel.py`. `s` [ROWS, KEYS] and `acc` [ROWS, HALF], or transposed; `c` counts tiles, `t` turns of the
two groups.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LOG2E, tile_layout
from ..gluon_items import Step
from ..gluon_names import tma_load
from ..inputs import VARYING, AttentionInputs
from .hopper_groups import STAGES, WARPS, Results, Rooms, follow, lead
from .hopper_items import KEYS, LATENT, ROPE, Shape, range_of_program
from .kernel import merge
from .plan import MLADecodeConfig


@gluon.jit
def _load_tiles(latent, rope, table, s_table, rooms, step, shape):
    """The loading warp: all rows that the program attends to, in their order, a copy for each part and block. Keys past
    the last block are read from that one again; a block that is not in the cache is read as zeros."""
    gdc_wait()
    at, end, seq, base, _ = range_of_program(step, shape, 1)
    c = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        begin, past = item.key_range(gl.maximum(at, item.origin), stop)
        row = table + seq.to(gl.int64) * s_table
        last = gl.maximum(item.keys - 1, 0) // shape.PAGE
        for key in range(begin, past, KEYS):
            stage = c % STAGES
            blocks = ()
            for j in gl.static_range(KEYS // shape.COPY):
                block = gl.load(row + gl.minimum((key + j * shape.COPY) // shape.PAGE, last))
                blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
            rooms.wait_empty(c)
            barrier = rooms.full.index(stage)
            mbarrier.expect(barrier, KEYS * (LATENT + ROPE) * 2)
            for j in gl.static_range(KEYS // shape.COPY):
                place = [key % shape.PAGE, blocks[j], 0]
                tma_load(latent, place, barrier, rooms.latent.index(stage).slice(j * shape.COPY, shape.COPY))
                place = [key % shape.PAGE, blocks[j], LATENT]
                tma_load(rope, place, barrier, rooms.rope.index(stage).slice(j * shape.COPY, shape.COPY))
            c += 1
        at = stop


@gluon.jit(
    do_not_specialize=["num_seqs", "max_keys", "max_tokens", "sl_t", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _mla_decode_kernel(
    query, latent, rope, out, lse_out, table, query_start_loc, seq_lens, splits, states, num_seqs, max_keys, max_tokens,
    qk_scale, softcap, sq_t, sq_h, so_t, so_h, sl_t, s_table, ROWS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr,
    PARTS: gl.constexpr, PAGE: gl.constexpr, OVERHEAD: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = latent.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shape = Shape(ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE, ALIGNED)
    step = Step(query_start_loc, seq_lens, num_seqs, max_keys)
    results = Results(out, so_t, so_h, sl_t)
    rooms = Rooms(
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 1, LATENT], tile_layout([KEYS, 1, LATENT])),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 1, ROPE], tile_layout([KEYS, 1, ROPE])),
        gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], tile_layout([ROWS, LATENT])),
        gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], tile_layout([ROWS, ROPE])),
        gl.allocate_shared_memory(DTYPE, shape.WEIGHTS, tile_layout(shape.WEIGHTS)),
        gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(rooms.full.index(i), count=1)
        mbarrier.init(rooms.empty.index(i), count=2)
    mbarrier.init(rooms.given, count=1)
    mbarrier.init(rooms.taken, count=1)
    fence_async_shared()
    of_lead = (query, sq_t, sq_h, qk_scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape)
    gl.warp_specialize(
        [
            (lead, of_lead),
            (follow, (states, results, rooms, step, shape)),
            (_load_tiles, (latent, rope, table, s_table, rooms, step, shape)),
        ],
        [4, 1],
        [208, 48],
    )


_launch = Launcher(_mla_decode_kernel, VARYING)


def constants_of(
    heads: int, config: MLADecodeConfig, page: int, num_seqs: int, mask: tuple[int, ...], softcap: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    causal, window = mask
    return {
        "ROWS": config.block_m,
        "G": config.heads,
        "HEADS": heads,
        "PARTS": config.parts,
        "PAGE": page,
        "OVERHEAD": config.tuning.tile_overhead,
        "CHUNK": 32 if num_seqs <= 32 else 256,
        "CAUSAL": bool(causal),
        "WINDOW": window,
        "SOFTCAP": softcap,
    }


def launch(config: MLADecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor | None) -> None:
    """As of `kernel.launch`."""
    query, key, table, out, lse = inputs.query, inputs.key, inputs.block_table, inputs.out, inputs.lse
    if table is None:
        raise ValueError("packed keys have no blocks")
    num_seqs, page = len(inputs.seq_lens), key.shape[1]
    splits, states, _ = config.places(workspace)
    part = min(page, KEYS.value)
    arguments = (
        *(query, *(row_descriptor(key, part, one.value, tile_layout) for one in (LATENT, ROPE)), out, lse, table),
        *(inputs.query_start_loc, inputs.seq_lens, splits, states, num_seqs, page * table.shape[1], config.max_tokens),
        *(inputs.scale * LOG2E.value, inputs.softcap, *query.stride()[:2], *out_strides(out)),
        *(0 if lse is None else lse.stride(0), table.stride(0)),
    )
    constants = constants_of(query.shape[1], config, page, num_seqs, inputs.mask, inputs.softcap > 0)
    # Triton knows of numbers and addresses whether 16 divides them.
    constants["ALIGNED"] = not any(one % 16 for one in (query.data_ptr(), *query.stride()[:2]))
    with on_device(query):
        _launch((config.programs,), arguments, constants, num_warps=WARPS.value, launch_pdl=True)
        merge(config, inputs, splits, states)


def out_strides(out: torch.Tensor) -> Iterator[int]:
    """Of outputs [T, Hq, L] by token and head, 0 along an axis of one: 1 would be a constant, where `Results` has
    tensors."""
    return (step if count > 1 else 0 for count, step in zip(out.shape[:2], out.stride()[:2], strict=True))


def row_descriptor(cache: torch.Tensor, part: int, width: int, layout: Callable[[list[int]], Any]) -> TensorDescriptor:
    """A cache [P, S, 1, n] as [S, P, n], for copies of `width` elements of `part` slots, laid out in shared memory by
    `layout` of their shape."""
    blocks, size, _, dim = cache.shape
    per_block, per_slot = cache.stride()[:2]
    block = [part, 1, width]
    return TensorDescriptor(cache, [size, blocks, dim], [per_slot, per_block, 1], block, layout(block))
