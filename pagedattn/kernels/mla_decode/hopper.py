"""Gluon: absorbed latent attention (MLA) of new tokens over a paged cache of latent rows, on Hopper.

The work is split as by `kernel.py`, and its second launch adds up the states of items that programs share. Within a
program one warp loads tiles of 64 rows by TMA, and two warpgroups compute: each has half of a tile's keys as columns of
the logits, and half of the latent elements as columns of the output, whose 64 x 512 float32 take half of an SM's
registers. Weights pass between the two through shared memory, where both parts of the queries and two tiles of rows
fill the rest. Sources: FlashMLA (2025) for columns of the output by warpgroup, stream-K (PPoPP 2023) for the split.

Legend: as in `kernel.py`. An item's rows are 64, tokens x heads. `c` counts tiles.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_wait

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LN2, LOG2E, tanh
from ..gluon_names import thread_barrier, tma_load
from ..inputs import VARYING, AttentionInputs
from .hopper_items import KEYS, LATENT, ROPE, ROWS, Shape, Step
from .kernel import merge
from .plan import MLADecodeConfig

STAGES = gl.constexpr(2)
WARPS = gl.constexpr(8)  # that compute


@gluon.constexpr_function
def _tile_layout(shape):
    return gl.NVMMASharedLayout(128, element_bitwidth=16, rank=len(shape))


@aggregate
class Tiles:
    """Two stages of rows, in two parts, and barriers that say which are full and which are empty."""

    latent: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, latent, rope, full, empty):
        self.latent, self.rope, self.full, self.empty = latent, rope, full, empty


@gluon.jit
def _load_tiles(latent, rope, table, s_table, tiles, step, shape):
    """The loading warp: all rows that the program attends to, in their order, a copy for each part and block. Keys past
    the last block are read from that one again; a block that is not in the cache is read as zeros."""
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
        for key in range(begin, past, KEYS):
            stage = c % STAGES
            blocks = ()
            for j in gl.static_range(KEYS // shape.COPY):
                block = gl.load(row + gl.minimum((key + j * shape.COPY) // shape.PAGE, last))
                blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
            mbarrier.wait(tiles.empty.index(stage), ((c // STAGES) & 1) ^ 1)
            barrier = tiles.full.index(stage)
            mbarrier.expect(barrier, KEYS * (LATENT + ROPE) * 2)
            for j in gl.static_range(KEYS // shape.COPY):
                place = [key % shape.PAGE, blocks[j], 0]
                tma_load(latent, place, barrier, tiles.latent.index(stage).slice(j * shape.COPY, shape.COPY))
                place = [key % shape.PAGE, blocks[j], LATENT]
                tma_load(rope, place, barrier, tiles.rope.index(stage).slice(j * shape.COPY, shape.COPY))
            c += 1
        at = stop


@gluon.jit
def _load_queries(query, sq_t, sq_h, item, part, q_latent, q_rope, shape):
    """An item's rows into shared memory, zeros where there are none."""
    SOME: gl.constexpr = 16  # at a time, since all would take half of the registers
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for i in gl.static_range(ROWS // SOME):
        row = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
        q_row, head, exists = item.rows(row, part, shape)
        start = query + gl.expand_dims((item.q_start + q_row).to(gl.int64) * sq_t + head.to(gl.int64) * sq_h, 1)
        mask = gl.expand_dims(exists, 1)
        dim = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, WIDE)), 0)
        q_latent.slice(i * SOME, SOME).store(gl.load(start + dim, mask=mask, other=0.0))
        dim = gl.expand_dims(gl.arange(0, ROPE, gl.SliceLayout(0, WIDE)), 0)
        q_rope.slice(i * SOME, SOME).store(gl.load(start + LATENT + dim, mask=mask, other=0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _zero_rows(latent, begin, end):
    """Rows outside begin..end of a tile become 0: their weights are 0, but 0 * NaN would reach the output."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for i in gl.static_range(KEYS // WARPS):
        if (i * WARPS + WARPS > end) | (i * WARPS < begin):
            rows = latent.slice(i * WARPS, WARPS)
            index = i * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, WIDE))
            values = rows.load(WIDE)
            kept = gl.expand_dims((index >= begin) & (index < end), 1)
            rows.store(gl.where(kept, values, gl.zeros_like(values)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _weights(s, m_i, q_pos, key, past, scale, softcap, MASKED: gl.constexpr, shape):
    """Weights of a tile's keys from its logits, the rows' new maximum, and what states so far are multiplied with."""
    if shape.SOFTCAP:
        s = tanh(s * (scale / (softcap * LOG2E))) * (softcap * LOG2E)
    else:
        s = s * scale
    if MASKED:
        offs_n = key + gl.arange(0, KEYS, gl.SliceLayout(0, shape.LOGITS))
        last = q_pos  # the last key that a row sees
        if not shape.CAUSAL:
            last = q_pos * 0 + past
            if shape.WINDOW > 0:
                last = q_pos + (shape.WINDOW - 1)
        last = gl.minimum(last, past - 1)
        visible = gl.expand_dims(offs_n, 0) <= gl.expand_dims(last, 1)
        if shape.WINDOW > 0:
            visible = visible & (gl.expand_dims(offs_n, 0) > gl.expand_dims(q_pos - shape.WINDOW, 1))
        s = gl.where(visible, s, -float("inf"))
    top = gl.maximum(m_i, gl.max(s, 1))
    shift = gl.where(top == -float("inf"), 0.0, top)
    return gl.exp2(s - gl.expand_dims(shift, 1)), top, gl.exp2(m_i - shift)


@gluon.jit
def _attend(item, begin, past, c, q_pos, scale, softcap, q_latent, q_rope, room, tiles, shape):
    """The state after keys begin..past, and the number of tiles until then."""
    m_i = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, shape.LOGITS))
    l_i = gl.zeros([ROWS, KEYS], gl.float32, shape.LOGITS)  # added up at the end: warps would wait for each other
    acc = gl.zeros([ROWS, LATENT], gl.float32, shape.OUTPUT)
    whole = past  # keys that every row sees end there
    if shape.CAUSAL:
        whole = gl.minimum(past, item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q + 1)
    for key in range(begin, past, KEYS):
        stage = c % STAGES
        latent = tiles.latent.index(stage).reshape([KEYS, LATENT])
        rope = tiles.rope.index(stage).reshape([KEYS, ROPE])
        mbarrier.wait(tiles.full.index(stage), (c // STAGES) & 1)
        if (key + KEYS > past) | (key < item.low):
            _zero_rows(latent, item.low - key, past - key)
        s = gl.zeros([ROWS, KEYS], gl.float32, shape.LOGITS)
        s = warpgroup_mma(q_latent, latent.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if (key + KEYS <= whole) & (shape.WINDOW == 0):
            p, m_i, alpha = _weights(s, m_i, q_pos, key, past, scale, softcap, False, shape)
        else:
            p, m_i, alpha = _weights(s, m_i, q_pos, key, past, scale, softcap, True, shape)
        l_i = l_i * gl.expand_dims(alpha, 1) + p
        room.store(p.to(shape.DTYPE))
        fence_async_shared()
        thread_barrier()
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, shape.OUTPUT)), 1)
        acc = warpgroup_mma(room, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(tiles.empty.index(stage), count=1)
        c += 1
    return acc, m_i, gl.sum(l_i, 1), c


@gluon.jit
def _finish(acc, m_i, l_i, item, part, out, lse_out, so_t, so_h, sl_t, q_latent, shape):
    """Write an item's output and LSE: outputs by way of the queries' memory, to have 16 bytes a thread."""
    SOME: gl.constexpr = 16
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    if lse_out is not None:
        q_row, head, exists = item.rows(gl.arange(0, ROWS, m_i.type.layout), part, shape)
        lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
        gl.store(lse_out + (item.q_start + q_row).to(gl.int64) * sl_t + head, lse, mask=exists)
    factor = gl.convert_layout(1.0 / gl.where(l_i == 0, 1.0, l_i), gl.SliceLayout(1, shape.OUTPUT))
    q_latent.store((acc * gl.expand_dims(factor, 1)).to(shape.DTYPE))
    thread_barrier()
    for i in gl.static_range(ROWS // SOME):
        row = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
        q_row, head, exists = item.rows(row, part, shape)
        start = out + gl.expand_dims((item.q_start + q_row).to(gl.int64) * so_t + head.to(gl.int64) * so_h, 1)
        dim = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, WIDE)), 0)
        gl.store(start + dim, q_latent.slice(i * SOME, SOME).load(WIDE), mask=gl.expand_dims(exists, 1))


@gluon.jit
def _publish(acc, m_i, l_i, item, part, begins, states, shape):
    """Leave an item's partial state. A program may end inside one item and start inside another: it has two places."""
    place = 2 * gl.program_id(0) + gl.where(begins, 1, 0)
    state = states + place.to(gl.int64) * (2 * ROWS + ROWS * LATENT)
    row = gl.arange(0, ROWS, m_i.type.layout)
    _, _, exists = item.rows(row, part, shape)
    gl.store(state + row, m_i.to(gl.int32, bitcast=True), mask=exists)
    gl.store(state + ROWS + row, l_i.to(gl.int32, bitcast=True), mask=exists)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, shape.OUTPUT))
    _, _, exists = item.rows(row, part, shape)
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, shape.OUTPUT))
    to = state + 2 * ROWS + gl.expand_dims(row * LATENT, 1) + gl.expand_dims(dim, 0)
    gl.store(to, acc.to(gl.int32, bitcast=True), mask=gl.expand_dims(exists, 1))


@gluon.jit
def _note_splits(item, part, share, splits, max_tokens, shape):
    """Say of all rows of an item which programs have parts of it."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, shape.LOGITS))
    q_row, _, exists = item.rows(row, part, shape)
    token = (item.q_start + q_row).to(gl.int64)
    field = splits + (token * shape.PARTS + part) * 3
    told = exists & (row % shape.G == 0) & (token < max_tokens)
    gl.store(field, item.origin // share, mask=told)
    gl.store(field + 1, (item.close - 1) // share, mask=told)
    gl.store(field + 2, row, mask=told)


@gluon.jit
def _compute(
    query, out, lse_out, splits, states, q_latent, q_rope, room, tiles, scale, softcap, max_tokens, sq_t, sq_h, so_t,
    so_h, sl_t, step, shape,
):  # fmt: skip
    """The computing warps: attention of the program's items."""
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    part = gl.program_id(0) % shape.PARTS
    program, programs = gl.program_id(0) // shape.PARTS, gl.num_programs(0) // shape.PARTS
    at, end, share, seq, base = step.range_of(program, programs, shape, WARPS)
    c = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            _load_queries(query, sq_t, sq_h, item, part, q_latent, q_rope, shape)
            q_row, _, _ = item.rows(gl.arange(0, ROWS, gl.SliceLayout(1, shape.LOGITS)), part, shape)
            begin, past = item.key_range(at, stop)
            q_pos = item.seq_len - item.q_len + q_row
            acc, m_i, l_i, c = _attend(
                item, begin, past, c, q_pos, scale, softcap, q_latent, q_rope, room, tiles, shape
            )  # fmt: skip
            begins = item.origin == at
            if splits is not None:
                if begins:
                    _note_splits(item, part, share, splits, max_tokens, shape)
            if begins & (stop == item.close):
                _finish(acc, m_i, l_i, item, part, out, lse_out, so_t, so_h, sl_t, q_latent, shape)
            else:
                if splits is not None:
                    _publish(acc, m_i, l_i, item, part, begins, states, shape)
            thread_barrier()  # the next item's queries are not stored before
        at = stop


@gluon.jit(
    do_not_specialize=["num_seqs", "max_keys", "max_tokens", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _mla_decode_kernel(
    query, latent, rope, out, lse_out, table, query_start_loc, seq_lens, splits, states, num_seqs, max_keys, max_tokens,
    qk_scale, softcap, sq_t, sq_h, so_t, so_h, sl_t, s_table, G: gl.constexpr, HEADS: gl.constexpr, PARTS: gl.constexpr,
    PAGE: gl.constexpr, OVERHEAD: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = latent.dtype
    TILE: gl.constexpr = _tile_layout([KEYS, 1, LATENT])
    MATRIX: gl.constexpr = _tile_layout([ROWS, LATENT])
    shape = Shape(G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE)
    step = Step(query_start_loc, seq_lens, num_seqs, max_keys)
    tiles = Tiles(
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 1, LATENT], TILE),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 1, ROPE], TILE),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    q_latent = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], MATRIX)
    q_rope = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], MATRIX)
    room = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], MATRIX)
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles.full.index(i), count=1)
        mbarrier.init(tiles.empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    query, out, lse_out, splits, states, q_latent, q_rope, room, tiles, qk_scale, softcap, max_tokens,
                    sq_t, sq_h, so_t, so_h, sl_t, step, shape,
                ),
            ),
            (_load_tiles, (latent, rope, table, s_table, tiles, step, shape)),
        ],
        [1],
        [40],
    )  # fmt: skip


_launch = Launcher(_mla_decode_kernel, VARYING)


def constants_of(
    heads: int, config: MLADecodeConfig, page: int, num_seqs: int, mask: tuple[int, ...], softcap: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    causal, window = mask
    return {
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
    splits, states = config.places(workspace)
    part = min(page, KEYS.value)
    arguments = (
        *(query, _rows(key, part, LATENT.value), _rows(key, part, ROPE.value), out, lse, table),
        *(inputs.query_start_loc, inputs.seq_lens, splits, states, num_seqs, page * table.shape[1], config.max_tokens),
        *(inputs.scale * LOG2E.value, inputs.softcap, *query.stride()[:2], *out.stride()[:2]),
        *(0 if lse is None else lse.stride(0), table.stride(0)),
    )
    constants = constants_of(query.shape[1], config, page, num_seqs, inputs.mask, inputs.softcap > 0)
    with on_device(query):
        _launch((config.programs,), arguments, constants, num_warps=WARPS.value, launch_pdl=True)
        merge(config, inputs, splits, states)


def _rows(cache: torch.Tensor, part: int, width: int) -> TensorDescriptor:
    """A cache [P, S, 1, L + R] as [S, P, L + R], for copies of `width` elements of `part` slots."""
    blocks, size, _, dim = cache.shape
    per_block, per_slot = cache.stride()[:2]
    block = [part, 1, width]
    return TensorDescriptor(cache, [size, blocks, dim], [per_slot, per_block, 1], block, _tile_layout(block))
