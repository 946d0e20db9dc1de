"""Gluon: scales that each token and head has, for prefill on Hopper.

Those of keys are factors of logits' columns. Those of values go into the values as they are converted, but for a power
of two, the unit of their tile, which goes into the outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from .producer import load_tile
from .work_item import take, tiles_of

_LEAST = gl.constexpr(-100)  # exponent of a unit
# By which one may be below the largest of an item, so that outputs in it are float32: what of smaller values is lost is
# 2**-60 of the largest.
_RANGE = gl.constexpr(40)


@aggregate
class ScalePlane:
    """Scales of rows [P, S, Hkv, 1] float32. blocks: P."""

    scales: gl.tensor
    blocks: gl.tensor
    per_block: gl.tensor
    per_slot: gl.tensor
    per_head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scales, blocks, per_block, per_slot, per_head):
        self.scales, self.blocks, self.per_block = scales, blocks, per_block
        self.per_slot, self.per_head = per_slot, per_head

    @gluon.jit
    def load(self, block, slot, head, live):
        """Of slots of blocks, 0 where they are not live, as whatever lies there could be NaN, or not in the cache."""
        live = live & (block >= 0) & (block < self.blocks)
        at = block.to(gl.int64) * self.per_block + slot * self.per_slot + head * self.per_head
        return gl.load(self.scales + at, mask=live, other=0.0)


@aggregate
class ScaleRooms:
    """In shared memory, of each stage: what columns of a tile's logits are multiplied by, [STAGES, BLOCK_N], and the
    exponent of its values' unit, [STAGES, 32], all the same; and what rows of a tile of values are multiplied by, in
    that unit, [STAGES, BLOCK_N]."""

    of_keys: gl.shared_memory_descriptor
    units: gl.shared_memory_descriptor
    of_values: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, of_keys, units, of_values):
        self.of_keys, self.units, self.of_values = of_keys, units, of_values


@gluon.jit
def make_scale_rooms(STAGES: gl.constexpr, shape):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ScaleRooms(
        gl.allocate_shared_memory(gl.float32, [STAGES, shape.BLOCK_N], FLAT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 32], FLAT),
        gl.allocate_shared_memory(gl.float32, [STAGES, shape.BLOCK_N], FLAT),
    )


@gluon.constexpr_function
def _each(keys):
    """Layout of [32, keys / 32]: keys that follow each other, of which a lane has those of one block."""
    return gl.BlockedLayout([1, keys // 32], [32, 1], [1, 1], [1, 0])


@gluon.jit
def _live(key, item, shape):
    """Which of keys may be seen."""
    live = (key >= 0) & (key < item.keys)
    if shape.WINDOW > 0:  # blocks that the window has left may be others'
        live = live & (key > item.first - shape.WINDOW)
    return live


@gluon.jit
def _keys(start, shape):
    """[32, BLOCK_N / 32], from `start` on."""
    LANES: gl.constexpr = _each(shape.BLOCK_N)
    EACH: gl.constexpr = shape.BLOCK_N // 32
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, LANES)), 1)
    return start + lane * EACH + gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(0, LANES)), 0)


@gluon.jit
def _blocks_of(row, start, item, shape):
    """Of each lane's keys, which a window may have left in part."""
    EACH: gl.constexpr = shape.BLOCK_N // 32
    key = start + gl.arange(0, 32, gl.SliceLayout(1, _each(shape.BLOCK_N))) * EACH
    live = (key >= 0) & (key < item.keys)
    if shape.WINDOW > 0:
        live = live & (key + EACH > item.first - shape.WINDOW + 1)
    return gl.load(row + key // shape.PAGE, mask=live, other=0)


@gluon.jit
def _scales_of(of_tokens, blocks, head, start, item, shape):
    """Of keys and of values from `start` on, in `blocks`."""
    key = _keys(start, shape)
    slot, live = key % shape.PAGE, _live(key, item, shape)
    blocks = gl.expand_dims(blocks, 1)
    return of_tokens[0].load(blocks, slot, head, live), of_tokens[1].load(blocks, slot, head, live)


@gluon.jit
def _unit(scales):
    """Exponent of a unit in which scales [32, n] are at most 256, so that float16 has 127 times them."""
    largest = gl.max(gl.max(scales, 1), 0)
    return gl.maximum(((largest.to(gl.int32, bitcast=True) >> 23) & 255) - 134, _LEAST)


@gluon.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def produce_scaled_values(descs, table, s_table, place, ring, of_tokens, rooms, channels, shape):
    """Loads the codes of values of every item handed out with their scales, and brings the scales of keys. of_tokens:
    the scales of K and V; rooms: `ScaleRooms`.

    A tile's scales are asked for a tile earlier, and the blocks that they are in two: else every tile would take as
    long as two loads, one after the other."""
    n = 0
    c = 0
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        row = table + item.seq.to(gl.int64) * s_table
        head = item.head // shape.PACKS
        start = (high - 1) * shape.BLOCK_N
        of_key, of_value = _scales_of(of_tokens, _blocks_of(row, start, item, shape), head, start, item, shape)
        blocks = _blocks_of(row, start - shape.BLOCK_N, item, shape)
        largest = _unit(of_value)
        for _ in range(0, high - low):
            next_key, next_value = _scales_of(of_tokens, blocks, head, start - shape.BLOCK_N, item, shape)
            blocks = _blocks_of(row, start - 2 * shape.BLOCK_N, item, shape)
            load_tile(0, descs, row, place, item, start, c, ring, shape)
            unit = _unit(of_value)
            largest = gl.maximum(largest, unit)
            unit = gl.maximum(unit, largest - _RANGE)
            rooms.of_values.index(c % ring.STAGES).store((of_value * _power_of_two(-unit)).reshape([shape.BLOCK_N]))
            mbarrier.arrive(ring.barrier(c), count=1)
            channels.k.wait_empty(c)
            rooms.of_keys.index(c % channels.k.STAGES).store(of_key.reshape([shape.BLOCK_N]))
            lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
            rooms.units.index(c % channels.k.STAGES).store((lane * 0 + unit).to(gl.float32))
            mbarrier.arrive(channels.k.barrier(c), count=1)
            of_key, of_value = next_key, next_value
            start -= shape.BLOCK_N
            c += 1
        n += 1
        item = take(channels.items, n, 1, shape)
