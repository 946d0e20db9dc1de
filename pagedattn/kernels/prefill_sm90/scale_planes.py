"""Gluon: scales that each token and head has, and steps of the channels of a block, for prefill on Hopper.

They go into keys and values as these are converted, but for a power of two, the unit of a tile's keys that have scales,
which goes into its logits, and that of its values, which goes into the outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from .plan import CHANNEL_KEYS as _CHANNEL_KEYS
from .work_item import last_seen, take, tiles_of

CHANNEL_KEYS = gl.constexpr(_CHANNEL_KEYS)
_LEAST = gl.constexpr(-100)  # exponent of a unit
# By which one may be below the largest of an item, so that outputs in it are float32: what of smaller values is lost is
# 2**-60 of the largest.
_RANGE = gl.constexpr(40)
# Of tiles: when codes can be staged, values of two tiles before have been converted, for which consumers were done with
# the tile three before.
_UNITS = gl.constexpr(4)
# Tiles whose scales are on their way. In registers they would be waited for where those of the next tile take the place
# of the last one's.
_AHEAD = gl.constexpr(2)


@aggregate
class ScalePlane:
    """Scales of rows [P, S, Hkv, 1] float32. blocks: P. VECTORS: those of a head's slots are one after the other, and
    begin at multiples of 16 bytes."""

    scales: gl.tensor
    blocks: gl.tensor
    per_block: gl.tensor
    per_slot: gl.tensor
    per_head: gl.tensor
    VECTORS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scales, blocks, per_block, per_slot, per_head, VECTORS):
        self.scales, self.blocks, self.VECTORS = scales, blocks, gl.constexpr(VECTORS)
        self.per_block, self.per_slot, self.per_head = per_block, per_slot, per_head

    @gluon.jit
    def copy(self, memory, block, slot, head):
        """Begin to copy those of slots [32, n] of blocks [32, 1] to shared memory, but of blocks not in the cache."""
        at = block.to(gl.int64) * self.per_block + head * self.per_head
        if self.VECTORS:
            at = gl.multiple_of(at, [4, 4]) + slot
        else:
            at = at + slot * self.per_slot
        inside, at = gl.broadcast((block >= 0) & (block < self.blocks), at)
        async_copy.async_copy_global_to_shared(memory, self.scales + at, mask=inside)


@aggregate
class ChannelPlane:
    """Steps and least elements of channels, [P, 1, Hkv, 2 D] float16, as words of two. blocks: P."""

    words: gl.tensor
    blocks: gl.tensor
    per_block: gl.tensor
    per_head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, words, blocks, per_block, per_head):
        self.words, self.blocks, self.per_block, self.per_head = words, blocks, per_block, per_head

    @gluon.jit
    def copy(self, memory, block, head):
        """Begin to copy those of a block to shared memory [D]; zeros of one that is not in the cache."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        word = gl.arange(0, memory.shape[0], LAYOUT)
        first = block.to(gl.int64) * self.per_block + head * self.per_head
        inside = (block >= 0) & (block < self.blocks) & (word >= 0)
        async_copy.async_copy_global_to_shared(memory, self.words + gl.multiple_of(first, 4) + word, mask=inside)


@aggregate
class ScaleRooms:
    """In shared memory: what rows of a staged tile of codes are multiplied by, in its unit, [stages, BLOCK_N]; of the
    last tiles the unit of keys and the exponent of two of that of values, [_UNITS, 2]; scales on their way, of keys and
    of values by turns, [2 * _AHEAD, 32, BLOCK_N / 32]; and of as many tiles as have units what channels of each
    CHANNEL_KEYS keys have, [_UNITS, groups * D] words, or one word."""

    factors: gl.shared_memory_descriptor
    units: gl.shared_memory_descriptor
    coming: gl.shared_memory_descriptor
    channels: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, factors, units, coming, channels):
        self.factors, self.units, self.coming, self.channels = factors, units, coming, channels


@gluon.jit
def make_scale_rooms(STAGES: gl.constexpr, shape):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CHANNELS: gl.constexpr = [_UNITS, shape.BLOCK_N // CHANNEL_KEYS * shape.D] if shape.CHANNEL_SCALES else [1, 1]
    channels = gl.allocate_shared_memory(gl.int32, CHANNELS, FLAT)
    return ScaleRooms(
        gl.allocate_shared_memory(gl.float32, [STAGES, shape.BLOCK_N], FLAT),
        gl.allocate_shared_memory(gl.float32, [_UNITS, 2], FLAT),
        gl.allocate_shared_memory(gl.float32, [2 * _AHEAD, 32, shape.BLOCK_N // 32], LANES),
        channels,
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
    if shape.EARLIER > 0:  # others may not be encoded yet
        live = live & (key <= last_seen(item.first + item.tokens - 1, shape)) & (key >= shape.FIRST)
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
    """Of each lane's keys, which a window may have left in part; -1 where none is live."""
    EACH: gl.constexpr = shape.BLOCK_N // 32
    key = start + gl.arange(0, 32, gl.SliceLayout(1, _each(shape.BLOCK_N))) * EACH
    live = (key >= 0) & (key < item.keys)
    if shape.WINDOW > 0:
        live = live & (key + EACH > item.first - shape.WINDOW + 1)
    return gl.load(row + key // shape.PAGE, mask=live, other=-1)


@gluon.jit
def _copy_scales(of_tokens, blocks, start, nth, item, rooms, shape):
    """Begin to copy those of keys and of values from `start` on, the nth tile of an item, in `blocks`."""
    slot, head = _keys(start, shape) % shape.PAGE, item.head // shape.PACKS
    for plane in gl.static_range(shape.CHANNEL_SCALES, 2):
        memory = rooms.coming.index(2 * (nth % _AHEAD) + plane)
        of_tokens[plane].copy(memory, gl.expand_dims(blocks, 1), slot, head)
    async_copy.commit_group()


@gluon.jit
def _copy_channels(plane, row, start, c, item, rooms, shape):
    """Begin to copy what channels of keys from `start` on have, the c-th tile; waited for as the scales behind them."""
    room = rooms.channels.index(c % _UNITS)
    for group in gl.static_range(shape.BLOCK_N // CHANNEL_KEYS):
        key = start + group * CHANNEL_KEYS
        block = gl.load(row + key // shape.PAGE, mask=(key >= 0) & (key < item.keys), other=-1)
        plane.copy(room.slice(group * shape.D, shape.D), block, item.head // shape.PACKS)


@gluon.jit
def _copied(start, nth, item, rooms, shape):
    """What was copied, 0 where it is not live."""
    live = _live(_keys(start, shape), item, shape)
    of_value = rooms.coming.index(2 * (nth % _AHEAD) + 1).load(_each(shape.BLOCK_N))
    of_key = of_value
    if not shape.CHANNEL_SCALES:
        of_key = rooms.coming.index(2 * (nth % _AHEAD)).load(_each(shape.BLOCK_N))
    return gl.where(live, of_key, 0.0), gl.where(live, of_value, 0.0)


@gluon.jit
def _unit(scales):
    """Exponent of a unit in which scales [32, n], but those that are not finite, are at most 32, so that float16 has
    1,152 times them."""
    largest = gl.max(gl.where(scales < float("inf"), scales, 0.0), 1)
    # As whole numbers, of which a warp finds the largest in one instruction.
    return gl.maximum((gl.max(largest.to(gl.int32, bitcast=True), 0) >> 23) - 131, _LEAST)


@gluon.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_factors(scales, unit, n, ring, rooms, shape):
    """Scales in a unit, for the codes of the n-th use of a ring."""
    rooms.factors.index(n % ring.STAGES).store((scales * _power_of_two(-unit)).reshape([shape.BLOCK_N]))
    mbarrier.arrive(ring.barrier(n), count=1)


@gluon.jit
def produce_scales(table, s_table, ring, of_tokens, rooms, channels, shape):
    """Brings the scales of every item handed out to the codes in `ring`. of_tokens: those of K and V; rooms:
    `ScaleRooms`."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = 0
    c = 0
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        row = table + item.seq.to(gl.int64) * s_table
        start = (high - 1) * shape.BLOCK_N
        for ahead in gl.static_range(_AHEAD):
            at = start - ahead * shape.BLOCK_N
            if shape.CHANNEL_SCALES:
                _copy_channels(of_tokens[0], row, at, c + ahead, item, rooms, shape)
            _copy_scales(of_tokens, _blocks_of(row, at, item, shape), at, ahead, item, rooms, shape)
        largest = low * 0 + _LEAST
        for back in range(0, high - low):
            blocks = _blocks_of(row, start - _AHEAD * shape.BLOCK_N, item, shape)
            async_copy.wait_group(_AHEAD - 1)
            of_key, of_value = _copied(start, back, item, rooms, shape)
            unit = _unit(of_value)
            key_unit = unit * 0 if shape.CHANNEL_SCALES else _unit(of_key)
            largest = gl.maximum(largest, unit)
            unit = gl.maximum(unit, largest - _RANGE)
            units = rooms.units.index(c % _UNITS)
            ring.wait_empty(2 * c)
            units.slice(0, 1).store(gl.full([1], 1.0, gl.float32, ONE) * _power_of_two(key_unit))
            units.slice(1, 1).store(gl.full([1], 1.0, gl.float32, ONE) * unit.to(gl.float32))
            if shape.CHANNEL_SCALES:
                mbarrier.arrive(ring.barrier(2 * c), count=1)
            else:
                _store_factors(of_key, key_unit, 2 * c, ring, rooms, shape)
            ring.wait_empty(2 * c + 1)
            _store_factors(of_value, unit, 2 * c + 1, ring, rooms, shape)
            if shape.CHANNEL_SCALES:
                _copy_channels(of_tokens[0], row, start - _AHEAD * shape.BLOCK_N, c + _AHEAD, item, rooms, shape)
            _copy_scales(of_tokens, blocks, start - _AHEAD * shape.BLOCK_N, back, item, rooms, shape)
            start -= shape.BLOCK_N
            c += 1
        async_copy.wait_group(0)  # of tiles that are another item's, or nobody's
        n += 1
        item = take(channels.items, n, 1, shape)
