"""Gluon: the loading warps of prefill on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_names import reinterpret, tma_load
from . import tile_rows
from .work_item import ROWS, by_eights, code_layout, hand_out, take, tiles_of

_head_of, _token_of = gluon.jit(tile_rows.head_of.fn), gluon.jit(tile_rows.token_of.fn)
FACTORS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3))  # of a tile's keys


@gluon.jit
def _last_page(item, shape):
    if shape.PAGE == 0:
        return 0
    else:
        return gl.maximum(item.keys - 1, 0) // shape.PAGE


@gluon.jit
def _blocks(row, key, last_page, shape):
    """The cache blocks of keys key..key + LOAD; past the last page, that one again. Of packed keys, the first's row."""
    if shape.PAGE == 0:
        return (gl.load(row) + key,)
    blocks = ()
    for j in gl.static_range(shape.LOAD // shape.COPY):
        block = gl.load(row + gl.minimum((key + j * shape.COPY) // shape.PAGE, last_page))
        blocks = blocks + (block,)  # noqa: RUF005 - no stars in a kernel
    return blocks


@gluon.jit
def _load(descs, blocks, key, kv_head, place, barrier, targets, shape):
    """Keys key..key + LOAD into the parts of a tile [LOAD, D], one copy per block and part. A coordinate outside is
    read as 0."""
    if shape.MORE > 0:
        EACH: gl.constexpr = descs[len(descs) - 1].block_shape[3]
        mbarrier.expect(barrier, shape.LOAD * (shape.D * (len(descs) - 1) + EACH) * 2)
        for j in gl.static_range(shape.LOAD // shape.COPY):
            for i in gl.static_range(len(descs)):
                if shape.PAGE == 0:
                    at = [blocks[j], 0, kv_head, i * shape.D]
                else:
                    at = [key % shape.PAGE, blocks[j], kv_head, i * shape.D]
                tma_load(descs[i], at, barrier, targets[i].slice(j * shape.COPY, shape.COPY))
    else:
        rows, head_rows, head_columns = place
        start = kv_head * head_rows
        if shape.PAGE == 0:
            rows = 1  # a row, not a block
        else:
            start += key % shape.PAGE
        mbarrier.expect(barrier, shape.LOAD * descs[0].block_shape[1] * (descs[0].dtype.primitive_bitwidth // 8))
        for j in gl.static_range(shape.LOAD // shape.COPY):
            at = [blocks[j] * rows + start, kv_head * head_columns]
            tma_load(descs[0], at, barrier, targets[0].slice(j * shape.COPY, shape.COPY))


@gluon.jit
def _zero_rows(w: gl.constexpr, tile, begin, end, shape):
    """Of a warp's rows of a value tile, those outside begin..end become 0: their weights are 0, but 0 * NaN would reach
    the output. Not unrolled: of code that runs once an item the instructions come from memory."""
    WIDTH: gl.constexpr = min(tile.shape[1], 64)  # what is contiguous of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    SWIZZLED: gl.constexpr = tile.layout
    EIGHTS: gl.constexpr = shape.BLOCK_N // 8
    eights = reinterpret(tile, tile.dtype, [EIGHTS * (tile.shape[1] // WIDTH), 8, WIDTH], SWIZZLED)
    for r in range(0, shape.LOAD // 8):
        if (r * 8 + 8 > end) | (r * 8 < begin):
            index = r * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            kept = gl.expand_dims((index >= begin) & (index < end), 1)
            for part in gl.static_range(tile.shape[1] // WIDTH):
                rows = eights.index(part * EIGHTS + w * (shape.LOAD // 8) + r)
                values = rows.load(LAYOUT)
                rows.store(gl.where(kept, values, gl.zeros_like(values)))


@gluon.jit
def load_rows(w: gl.constexpr, descs, item, ring, n, shape):
    """Query rows of one consumer, in parts."""
    ring.wait_empty(n)
    mbarrier.expect(ring.barrier(n), ROWS * (shape.D + shape.MORE) * 2)
    head = item.head * shape.HEADS
    if by_eights(shape.PACK):
        for i in gl.static_range(ROWS // 8):
            own = head + _head_of(w * ROWS + 8 * i, shape.PACK)
            token = item.token + _token_of(w * ROWS + 8 * i, shape.PACK)
            tma_load(descs[0], [own, token, 0], ring.barrier(n), ring.tile(n).slice(8 * i, 8, 1))
            if shape.MORE > 0:
                rest = ring.more[0].index(n % ring.STAGES).slice(8 * i, 8, 1)
                tma_load(descs[1], [own, token, shape.D], ring.barrier(n), rest)
    else:
        token = item.token + _token_of(w * ROWS, shape.PACK)
        tma_load(descs[0], [token, head, 0], ring.barrier(n), ring.tile(n))
        if shape.MORE > 0:
            tma_load(descs[1], [token, head, shape.D], ring.barrier(n), ring.more[0].index(n % ring.STAGES))


@gluon.jit
def _load_queries(descs, item, n, channels, shape):
    """The rows of an item's two halves."""
    load_rows(0, descs, item, channels.q0, n, shape)
    load_rows(1, descs, item, channels.q1, n, shape)


@gluon.jit
def _targets(ring, n, start, COUNT: gl.constexpr):
    """Rows start..start + COUNT of a tile's parts, as copies fill them."""
    targets = (ring.tile(n).slice(start, COUNT),)
    for i in gl.static_range(len(ring.more)):
        targets = targets + (ring.more[i].index(n % ring.STAGES).slice(start, COUNT),)  # noqa: RUF005
    return targets


@gluon.jit
def load_tile(w: gl.constexpr, descs, row, place, item, start, c, ring, shape):
    """A loading warp's part of the c-th tile, of keys from `start` on. row: the sequence's of the table."""
    key = start + w * shape.LOAD
    blocks = _blocks(row, key, _last_page(item, shape), shape)
    ring.wait_empty(c)
    if shape.PER_TILE > 1 and descs[0].block_shape[1] < shape.D:
        WIDTH: gl.constexpr = descs[0].block_shape[1]
        LAYOUT: gl.constexpr = code_layout(WIDTH)
        tile = reinterpret(ring.tile(c), gl.uint8, [shape.BLOCK_N, WIDTH], LAYOUT)
        targets = (tile.slice(w * shape.LOAD, shape.LOAD),)
    else:
        targets = _targets(ring, c, w * shape.LOAD, shape.LOAD)
    _load(descs, blocks, key, item.head // shape.PACKS, place, ring.barrier(c), targets, shape)


@gluon.jit
def _load_scales(scales, item, start, c, ring, shape):
    """The factors of the c-th tile's keys, from `start` on: a descriptor of [B, Hkv, keys], and rooms of stages."""
    room = reinterpret(scales[1].index(c % ring.STAGES), gl.float32, [1, 1, shape.BLOCK_N], FACTORS)
    mbarrier.expect(ring.barrier(c), shape.BLOCK_N * 4)
    tma_load(scales[0], [item.seq, item.head // shape.PACKS, start], ring.barrier(c), room)


@gluon.jit
def _load_tiles(
    w: gl.constexpr, descs, table, s_table, place, item, c, ring, shape, scales=None, values=None, NTH: gl.constexpr = 0
):
    """A loading warp's part of all tiles of an item. The number of tiles loaded, after it. NTH: which of a tile's
    places in a ring that has several; values: descriptors and place of those that follow keys there, or None."""
    low, _, _, high = tiles_of(item, shape)
    row = table + item.seq.to(gl.int64) * s_table
    for back in range(0, high - low):
        start = (high - 1 - back) * shape.BLOCK_N
        load_tile(w, descs, row, place, item, start, c * shape.PER_TILE + NTH, ring, shape)
        if values is not None:
            load_tile(w, values[0], row, values[1], item, start, c * shape.PER_TILE + 1, ring, shape)
        if scales is not None:
            _load_scales(scales, item, start, c, ring, shape)
        c += 1
    return c


@gluon.jit
def produce_items(descs_q, descs, table, s_table, place, ring, items, channels, shape, values=None):
    """Takes items from the step's counter, hands them to the other warps, and loads their queries and the first
    warp's part of their keys, by a descriptor for each part of a tile. values: as `_load_tiles` takes them."""
    # Nothing of what came before is read, and nothing is written, before an item is handed out.
    gdc_wait()
    if shape.SPLIT_KV:
        gdc_launch_dependents()  # what follows is `reduce_splits`, which waits for the end of this launch
    n = 0  # items handed out
    c = 0  # tiles loaded
    item = items.look_up(gl.program_id(0), shape, True)
    while item.live > 0:
        following = items.draw()
        hand_out(channels.items, n, item, shape)
        _load_queries(descs_q, item, n, channels, shape)
        c = _load_tiles(0, descs, table, s_table, place, item, c, ring, shape, None, values)
        n += 1
        item = items.look_up(following, shape, False)
    hand_out(channels.items, n, item, shape)
    items.leave()


@gluon.jit
def produce_items_early(descs, table, s_table, place, ring, items, channels, shape, scales):
    """The same for a warp that loads keys alone, and hands an item out before it loads those of the one before: others
    have time to make its queries ready. scales: as `_load_tiles` takes them."""
    gdc_wait()
    if shape.SPLIT_KV:
        gdc_launch_dependents()
    n = 0  # items handed out but for one
    c = 0  # tiles loaded
    item = items.look_up(gl.program_id(0), shape, True)
    hand_out(channels.items, n, item, shape)
    while item.live > 0:
        following = items.look_up(items.draw(), shape, False)
        hand_out(channels.items, n + 1, following, shape)
        c = _load_tiles(0, descs, table, s_table, place, item, c, ring, shape, scales)
        n += 1
        item = following
    items.leave()


@gluon.jit
def produce_tiles(
    w: gl.constexpr, descs, table, s_table, place, ring, channels, shape, scales=None, NTH: gl.constexpr = 0
):
    """Loads a warp's part of the keys, or of the codes of values, of every item handed out. scales: factors of keys, as
    `_load_scales` takes them, or None. Warps share the keys of 16 bits, for small blocks take many copies to issue: one
    warp alone was what the computing ones waited for."""
    n = 0
    c = 0
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        c = _load_tiles(w, descs, table, s_table, place, item, c, ring, shape, scales, None, NTH)
        n += 1
        item = take(channels.items, n, 1, shape)


@gluon.jit
def produce_values(w: gl.constexpr, descs, table, s_table, place, tail, channels, shape):
    """Loads a half of the values of every item handed out, or all where one warp does; tail: a barrier of each loader,
    for rows that it edits."""
    n = 0
    c = 0
    t = 0  # tiles with rows that no query sees
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        row = table + item.seq.to(gl.int64) * s_table
        last_page = _last_page(item, shape)
        kv_head = item.head // shape.PACKS
        for back in range(0, high - low):
            key = (high - 1 - back) * shape.BLOCK_N + w * shape.LOAD
            blocks = _blocks(row, key, last_page, shape)
            channels.wait_empty_values(c)
            targets = _targets(channels.v, c, w * shape.LOAD, shape.LOAD)
            behind = 0  # rows whose blocks the window may have left to others
            if shape.WINDOW > 0:
                behind = item.first - shape.WINDOW + 1 - key
            if (key + shape.LOAD <= item.keys) & (behind <= 0):
                _load(descs, blocks, key, kv_head, place, channels.v.barrier(c), targets, shape)
            else:
                _load(descs, blocks, key, kv_head, place, tail.index(w), targets, shape)
                mbarrier.wait(tail.index(w), t & 1)
                t += 1
                tiles = channels.v.parts(c)
                for i in gl.static_range(len(tiles)):
                    _zero_rows(w, tiles[i], behind, item.keys - key, shape)
                fence_async_shared()
                mbarrier.arrive(channels.v.barrier(c), count=1)
            c += 1
        n += 1
        item = take(channels.items, n, 1, shape)
