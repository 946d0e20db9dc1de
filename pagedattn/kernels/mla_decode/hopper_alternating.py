"""Gluon: latent attention (MLA) with 64 query rows over a paged cache on Hopper, by two groups that take tiles in turn.

As `hopper.py`, but for what the two warpgroups do (`hopper_alternating_groups.py`): each group computes the logits of
every second tile, so that the tensor cores have one group's products while the other computes weights. Two tiles are in
shared memory, and are loaded and released by halves.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from ...runtime.launcher import Launcher
from ..gluon_names import tma_load
from ..inputs import VARYING, AttentionInputs
from .hopper import launch_kernel, tile_layout
from .hopper_alternating_groups import Rooms, first, second
from .hopper_groups import Results
from .hopper_items import HALF, KEYS, LATENT, ROPE, Shape, Step
from .plan import MLADecodeConfig


@gluon.jit
def _load_half(latent, blocks, key, c, which, rooms, shape, MORE: gl.constexpr):
    """A half of the latent elements of tile c; MORE bytes will come by the same barrier."""
    rooms.wait_empty(c, which)
    barrier = rooms.full.index(2 * (c % 2) + which)
    mbarrier.expect(barrier, KEYS * HALF * 2 + MORE)
    for j in gl.static_range(KEYS // shape.COPY):
        place = [key % shape.PAGE, blocks[j], which * HALF]
        tma_load(latent, place, barrier, rooms.halves.index(2 * (c % 2) + which).slice(j * shape.COPY, shape.COPY))


@gluon.jit
def _load_rope(rope, blocks, key, c, which, rooms, shape):
    """The rotated part of tile c, with the half that comes second: both halves' readers are done then."""
    barrier = rooms.full.index(2 * (c % 2) + which)
    for j in gl.static_range(KEYS // shape.COPY):
        place = [key % shape.PAGE, blocks[j], LATENT]
        tma_load(rope, place, barrier, rooms.rope.index(c % 2).slice(j * shape.COPY, shape.COPY))


@gluon.jit
def _load_tiles(latent, rope, table, s_table, rooms, step, shape):
    """The loading warp: as in `hopper.py`, but by halves, the one first that its group releases first. An item's tiles
    belong to the groups in turn, beginning with the first."""
    gdc_wait()
    program, programs = gl.program_id(0) // shape.PARTS, gl.num_programs(0) // shape.PARTS
    at, end, _, seq, base = step.range_of(program, programs, shape, 1)
    c = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        begin, past = item.key_range(gl.maximum(at, item.origin), stop)
        row = table + seq.to(gl.int64) * s_table
        last = gl.maximum(item.keys - 1, 0) // shape.PAGE
        group = 0
        for key in range(begin, past, KEYS):
            blocks = ()
            for j in gl.static_range(KEYS // shape.COPY):
                block = gl.load(row + gl.minimum((key + j * shape.COPY) // shape.PAGE, last))
                blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
            _load_half(latent, blocks, key, c, group, rooms, shape, 0)
            _load_half(latent, blocks, key, c, 1 - group, rooms, shape, KEYS * ROPE * 2)
            _load_rope(rope, blocks, key, c, 1 - group, rooms, shape)
            c += 1
            group = 1 - group
        at = stop


@gluon.jit(
    do_not_specialize=["num_seqs", "max_keys", "max_tokens", "sl_t", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _mla_decode_kernel(
    query, latent, rope, out, lse_out, table, query_start_loc, seq_lens, splits, states, num_seqs, max_keys, max_tokens,
    qk_scale, softcap, sq_t, sq_h, so_t, so_h, sl_t, s_table, ROWS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr,
    PARTS: gl.constexpr, PAGE: gl.constexpr, OVERHEAD: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = latent.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape = Shape(ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE)
    step = Step(query_start_loc, seq_lens, num_seqs, max_keys)
    results = Results(out, so_t, so_h, sl_t)
    q_latent = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENT], tile_layout([ROWS, LATENT]))
    q_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], tile_layout([ROWS, ROPE]))
    rooms = Rooms(
        gl.allocate_shared_memory(DTYPE, [4, KEYS, 1, HALF], tile_layout([KEYS, 1, HALF])),
        gl.allocate_shared_memory(DTYPE, [2, KEYS, 1, ROPE], tile_layout([KEYS, 1, ROPE])),
        q_latent.index(0),
        q_rope.index(0),
        q_latent,
        q_rope,
        gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(4):
        mbarrier.init(rooms.full.index(i), count=1)
        mbarrier.init(rooms.empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(rooms.given.index(i), count=1)
        mbarrier.init(rooms.summed.index(i), count=1)
    mbarrier.init(rooms.queries, count=1)
    mbarrier.init(rooms.left, count=1)
    fence_async_shared()
    of_group = (query, sq_t, sq_h, qk_scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape)
    # The second group first: the other way round ptxas lets it wait for its logits before it issues the other product.
    gl.warp_specialize(
        [
            (second, of_group),
            (first, of_group),
            (_load_tiles, (latent, rope, table, s_table, rooms, step, shape)),
        ],
        [4, 1],
        [232, 40],
    )


_launch = Launcher(_mla_decode_kernel, VARYING)


def launch(config: MLADecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor | None) -> None:
    """As of `kernel.launch`."""
    launch_kernel(_launch, HALF.value, config, inputs, workspace)
