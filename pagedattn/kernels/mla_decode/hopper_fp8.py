"""Gluon: absorbed latent attention (MLA) of new tokens over latent rows of fp8, on Hopper.

The work is split as in `hopper.py`. States of items that programs share are added up by the program that begins the
item, or by the second launch (`MLADecodeConfig.merge`). Within a program one warp loads tiles of 64 rows by TMA as
bytes, which two warpgroups take by turns (`hopper_fp8_groups.py`) and read from shared memory into registers as
operands of their products (`hopper_fp8_operands.py`). Sources: as of `hopper.py`.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from ...formats.mla_rows.deepseek import ROPE_AT, SCALES_AT
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LOG2E, tile_layout
from ..gluon_items import Step
from ..gluon_names import tma_load
from ..inputs import VARYING, AttentionInputs
from .hopper import constants_of, out_strides, row_descriptor
from .hopper_fp8_groups import attend
from .hopper_fp8_operands import WARPS
from .hopper_fp8_rooms import GROUPS, STAGES, CodeRooms, CodeShape, byte_layout
from .hopper_groups import Results
from .hopper_items import KEYS, LATENT, ROPE, range_of_program
from .kernel import merge
from .plan import MLADecodeConfig

SCALE_BYTES = gl.constexpr(4 * GROUPS.value)
_SCALES_AT, _ROPE_AT = gl.constexpr(SCALES_AT), gl.constexpr(ROPE_AT)


@gluon.jit
def _load_tile(codes, rope, scales, blocks, key, c, rooms, shape):
    """Rows of the blocks that a tile lies in."""
    stage = c % STAGES
    barrier = rooms.full.index(stage)
    if shape.GROUPED:
        mbarrier.expect(barrier, KEYS * (LATENT + SCALE_BYTES + shape.ROPE_BYTES))
    else:
        mbarrier.expect(barrier, KEYS * (LATENT + shape.ROPE_BYTES))
    for j in gl.static_range(KEYS // shape.COPY):
        slot = key % shape.PAGE
        rope_rows = rooms.rope.index(stage).slice(j * shape.COPY, shape.COPY)
        tma_load(codes, [slot, blocks[j], 0], barrier, rooms.codes.index(stage).slice(j * shape.COPY, shape.COPY))
        if shape.GROUPED:
            tma_load(rope, [slot, blocks[j], _ROPE_AT], barrier, rope_rows)
            scale_rows = rooms.scales.index(stage).slice(j * shape.COPY, shape.COPY)
            tma_load(scales, [slot, blocks[j], _SCALES_AT], barrier, scale_rows)
        else:
            tma_load(rope, [slot, blocks[j], LATENT], barrier, rope_rows)


@gluon.jit
def _load_tiles(codes, rope, scales, table, s_table, rooms, step, shape):
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
            blocks = ()
            for j in gl.static_range(KEYS // shape.COPY):
                block = gl.load(row + gl.minimum((key + j * shape.COPY) // shape.PAGE, last))
                blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
            rooms.wait_empty(c)
            _load_tile(codes, rope, scales, blocks, key, c, rooms, shape)
            c += 1
        at = stop


@gluon.jit(
    do_not_specialize=["num_seqs", "max_keys", "max_tokens", "sl_t", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _mla_decode_kernel(
    query, codes, rope, scales, out, lse_out, table, query_start_loc, seq_lens, k_scale, splits, states, flags,
    num_seqs, max_keys, max_tokens, qk_scale, out_scale, softcap, sq_t, sq_h, so_t, so_h, sl_t, s_table,
    ROWS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, PARTS: gl.constexpr, PAGE: gl.constexpr,
    OVERHEAD: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype.element_ty
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WAITS: gl.constexpr = flags is not None
    shape = CodeShape(ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE, GROUPED, WAITS)
    step = Step(query_start_loc, seq_lens, num_seqs, max_keys)
    Q_ROPE: gl.constexpr = DTYPE if GROUPED else gl.float16
    SCALED: gl.constexpr = KEYS if GROUPED else 8  # of other rows there is nothing to be kept
    rope_shape: gl.constexpr = [KEYS, 1, shape.ROPE_BYTES]
    scale_shape: gl.constexpr = [SCALED, 1, SCALE_BYTES]
    rooms = CodeRooms(
        gl.allocate_shared_memory(gl.uint8, [STAGES, KEYS, 1, LATENT], byte_layout([KEYS, 1, LATENT])),
        gl.allocate_shared_memory(gl.uint8, [STAGES, KEYS, 1, shape.ROPE_BYTES], byte_layout(rope_shape)),
        gl.allocate_shared_memory(gl.uint8, [STAGES, SCALED, 1, SCALE_BYTES], byte_layout(scale_shape)),
        gl.allocate_shared_memory(gl.float16, [1, ROWS, LATENT], tile_layout([ROWS, LATENT])),
        gl.allocate_shared_memory(Q_ROPE, [ROWS, ROPE], tile_layout([ROWS, ROPE])),
        gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], tile_layout([KEYS, ROWS])),
        gl.allocate_shared_memory(gl.float16, [2, GROUPS, SCALED], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [4, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, WARPS], PLAIN),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(rooms.full.index(i), count=1)
        mbarrier.init(rooms.empty.index(i), count=1)
    mbarrier.init(rooms.met, count=2)
    fence_async_shared()
    results = Results(out, so_t, so_h, sl_t)
    of_query = (query, sq_t, sq_h, qk_scale, out_scale, softcap, k_scale)
    of_states = (lse_out, splits, states, flags, max_tokens)
    gl.warp_specialize(
        [
            (attend, (0, of_query, of_states, results, rooms, step, shape)),
            (attend, (1, of_query, of_states, results, rooms, step, shape)),
            (_load_tiles, (codes, rope, scales, table, s_table, rooms, step, shape)),
        ],
        [4, 1],
        [240, 32],
    )


_launch = Launcher(_mla_decode_kernel, VARYING)


def launch(config: MLADecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor | None) -> None:
    """As of `kernel.launch`."""
    query, key, table, out, lse = inputs.query, inputs.key, inputs.block_table, inputs.out, inputs.lse
    if table is None:
        raise ValueError("packed keys have no blocks")
    num_seqs, page = len(inputs.seq_lens), key.shape[1]
    splits, states, flags = config.places(workspace)
    grouped, part = key.dtype == torch.uint8, min(page, KEYS.value)
    rows = key.view(torch.uint8)
    widths = (LATENT.value, 2 * ROPE.value, SCALE_BYTES.value) if grouped else (LATENT.value, ROPE.value)
    codes, rope, *scales = (row_descriptor(rows, part, width, byte_layout) for width in widths)
    arguments = (
        *(query, codes, rope, scales[0] if scales else None),
        *(out, lse, table, inputs.query_start_loc, inputs.seq_lens, inputs.k_scale, splits, states, flags),
        *(num_seqs, page * table.shape[1], config.max_tokens),
        *(inputs.scale * LOG2E.value, inputs.out_scale, inputs.softcap),
        *(*query.stride()[:2], *out_strides(out), 0 if lse is None else lse.stride(0), table.stride(0)),
    )
    constants = constants_of(query.shape[1], config, page, num_seqs, inputs.mask, inputs.softcap > 0)
    with on_device(query):
        _launch((config.programs,), arguments, constants | {"GROUPED": grouped}, num_warps=WARPS.value, launch_pdl=True)
        merge(config, inputs, splits, states)
