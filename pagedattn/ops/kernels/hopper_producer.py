"""Gluon: the loading warp of prefill on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper_items import ROWS, tiles_of


@gluon.jit
def _blocks(row, key, last_page, shape):
    """The cache blocks of keys key..key + BLOCK_N; past the last page, that one again."""
    PART: gl.constexpr = shape.PAGE if shape.PAGE < shape.BLOCK_N else shape.BLOCK_N
    blocks = ()
    for j in gl.static_range(shape.BLOCK_N // PART):
        block = gl.load(row + gl.minimum((key + j * PART) // shape.PAGE, last_page))
        blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
    return blocks


@gluon.jit
def _load(desc, blocks, key, kv_head, place, barrier, target, shape):
    """Keys key..key + BLOCK_N into `target` [BLOCK_N, D], one copy per block. A coordinate outside is read as 0."""
    rows, head_rows, head_columns = place
    PART: gl.constexpr = shape.PAGE if shape.PAGE < shape.BLOCK_N else shape.BLOCK_N
    start = kv_head * head_rows + key % shape.PAGE
    mbarrier.expect(barrier, shape.BLOCK_N * shape.D * 2)
    for j in gl.static_range(shape.BLOCK_N // PART):
        at = [blocks[j] * rows + start, kv_head * head_columns]
        tma.async_copy_global_to_shared(desc, at, barrier, target.slice(j * PART, PART))


@gluon.jit
def _zero_rows(tile, begin, end, shape):
    """Rows outside begin..end of a value tile become 0: their weights are 0, but 0 * NaN would reach the output."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.D, shape.D // 8], [1, 1], [1, 0])
    for r in gl.static_range(shape.BLOCK_N // 8):
        if (r * 8 + 8 > end) | (r * 8 < begin):
            rows = tile.slice(r * 8, 8)
            index = r * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            values = rows.load(LAYOUT)
            kept = gl.expand_dims((index >= begin) & (index < end), 1)
            rows.store(gl.where(kept, values, gl.zeros_like(values)))


@gluon.jit
def _hand_out(ring, n, index):
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.wait_empty(n)
    ring.tile(n).store(gl.full([1], index, gl.int32, SCALAR))
    mbarrier.arrive(ring.barrier(n), count=1)


@gluon.jit
def produce(desc_q, desc_k, desc_v, table, s_table, k_place, v_place, items, channels, shape):
    """Takes items from the step's counter, hands them to the consumers, and fills the rings."""
    HALF: gl.constexpr = ROWS // shape.PACK
    counter = items.entries
    total = items.total()
    index = gl.program_id(0)
    n = 0  # items handed out
    c = 0  # tiles loaded
    t = 0  # of them with rows that nobody sees
    while index < total:
        following = gl.atomic_add(counter, 1) + gl.num_programs(0)
        _hand_out(channels.items, n, index)
        token, tokens, first, keys, head = items.look_up(index)
        low, _, _, high = tiles_of(first, tokens, keys, shape)
        channels.q0.wait_empty(n)
        mbarrier.expect(channels.q0.barrier(n), ROWS * shape.D * 2)
        place = [token, head * shape.PACK, 0]
        tma.async_copy_global_to_shared(desc_q, place, channels.q0.barrier(n), channels.q0.tile(n))
        channels.q1.wait_empty(n)
        mbarrier.expect(channels.q1.barrier(n), ROWS * shape.D * 2)
        place = [token + HALF, head * shape.PACK, 0]
        tma.async_copy_global_to_shared(desc_q, place, channels.q1.barrier(n), channels.q1.tile(n))
        row = table + items.sequence(index).to(gl.int64) * s_table
        last_page = gl.maximum(keys - 1, 0) // shape.PAGE
        kv_head = head // shape.PARTS
        for back in range(0, high - low):
            key = (high - 1 - back) * shape.BLOCK_N
            blocks = _blocks(row, key, last_page, shape)
            channels.k.wait_empty(c)
            _load(desc_k, blocks, key, kv_head, k_place, channels.k.barrier(c), channels.k.tile(c), shape)
            channels.v.wait_empty(c)
            behind = 0  # rows whose blocks the window may have left to others
            if shape.WINDOW > 0:
                behind = first - shape.WINDOW + 1 - key
            if (key + shape.BLOCK_N <= keys) & (behind <= 0):
                _load(desc_v, blocks, key, kv_head, v_place, channels.v.barrier(c), channels.v.tile(c), shape)
            else:
                _load(desc_v, blocks, key, kv_head, v_place, channels.tail.index(0), channels.v.tile(c), shape)
                mbarrier.wait(channels.tail.index(0), t & 1)
                t += 1
                _zero_rows(channels.v.tile(c), behind, keys - key, shape)
                fence_async_shared()
                mbarrier.arrive(channels.v.barrier(c), count=1)
            c += 1
        n += 1
        index = following
    _hand_out(channels.items, n, index)
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # the last one leaves the counters as it found them
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
