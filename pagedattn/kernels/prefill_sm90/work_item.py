"""Gluon: the work items of prefill on Hopper, as `tile_scheduler` lists them, or `split_kv_scheduler` where keys are
split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_names import thread_barrier
from .plan import SPLIT_FIELDS as _PART_FIELDS
from .plan import by_eights as _by_eights

SPLIT_FIELDS = gl.constexpr(_PART_FIELDS)
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma takes
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
LOADERS = gl.constexpr(2)  # warps that load the keys of a tile, and as many its values


@gluon.constexpr_function
def code_layout(dim):
    """Of tiles of 8-bit codes in shared memory."""
    return gl.NVMMASharedLayout(min(dim, 128), 8, 2)


@gluon.constexpr_function
def output_layout(columns):
    """Of a part of the outputs of 64 rows, in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


by_eights = gluon.constexpr_function(_by_eights)


@gluon.constexpr_function
def query_room(pack, width):
    """The shape of a consumer's queries in shared memory, as their descriptor's copies fill it."""
    return [1, ROWS.value, width] if by_eights(pack) else [ROWS.value // pack, pack, width]


@gluon.constexpr_function
def has_four_bits(codes):
    """Whether rows have codes of 4 bits, which stand for levels of rotated rows."""
    return codes == "rotated_int4"


@aggregate
class Shape:
    """What is fixed when a kernel is compiled: BLOCK_N keys a tile, D a head's width, or its first part's, MORE and
    MORE_V those of a second part of keys and of values, or 0, DIM_V the elements of a value, PACK query heads a
    block of rows (`tile_rows`), HEADS of which are of its group, PACKS such blocks per KV head, PAGE slots a cache
    block, 0 of packed keys, LOAD keys of a tile that one warp loads, COPY of them at a time, FIELDS a listed
    item's, by which items may be parts. CODES: of a quantised cache, as `RowFormat.codes`, or None; TOKEN_SCALES:
    rows, those of values at least, have scales, which go into what codes become; CHANNEL_SCALES: channels of keys
    in a block have steps. SPLIT_Q: queries become two of as many bits as keys, which are multiplied as they are
    stored; CONVERT_KEYS: keys become float16 as values do, codes of both are staged in one ring, PER_TILE times a
    tile, and a tile's products and softmax follow each other. V_CODES: of values, whose rotation outputs lose in
    the end where they are of 4 bits. TILE_SCALES: a tile's logits have a factor, KEY_SCALES: each key's; CAST_Q:
    queries become float16, as keys are. ROW_SCALES: converted queries, the logits of whose rows have a factor.
    EARLIER: rows see blocks of so many keys before their own and RECENT others, from key FIRST on; 0: all before."""

    BLOCK_N: gl.constexpr
    D: gl.constexpr
    MORE: gl.constexpr
    MORE_V: gl.constexpr
    DIM_V: gl.constexpr
    PACK: gl.constexpr
    HEADS: gl.constexpr
    PACKS: gl.constexpr
    PAGE: gl.constexpr
    FIELDS: gl.constexpr
    SPLIT_KV: gl.constexpr
    LOAD: gl.constexpr
    COPY: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    DTYPE: gl.constexpr
    V_DTYPE: gl.constexpr
    CODES: gl.constexpr
    V_CODES: gl.constexpr
    TOKEN_SCALES: gl.constexpr
    CHANNEL_SCALES: gl.constexpr
    SPLIT_Q: gl.constexpr
    CONVERT_KEYS: gl.constexpr
    PER_TILE: gl.constexpr
    TILE_SCALES: gl.constexpr
    KEY_SCALES: gl.constexpr
    CAST_Q: gl.constexpr
    ROW_SCALES: gl.constexpr
    EARLIER: gl.constexpr
    RECENT: gl.constexpr
    FIRST: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    CODE_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, BLOCK_N, D, PACK, GROUP, PAGE, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, LOADERS, CODES=None,
        TILE_SCALES=False, MORE=0, MORE_V=0, DIM_V=0, CAST_Q=False, EARLIER=0, RECENT=0, FIRST=0, KEY_SCALES=False,
        CONVERT_KEYS=False, V_CODES=None,
    ):  # fmt: skip
        self.FIELDS, self.SPLIT_KV = gl.constexpr(FIELDS), gl.constexpr(FIELDS == SPLIT_FIELDS.value)
        self.LOAD = gl.constexpr(BLOCK_N // LOADERS)
        self.COPY = gl.constexpr(min(PAGE, BLOCK_N // LOADERS) or BLOCK_N // LOADERS)
        self.BLOCK_N, self.D, self.PACK = gl.constexpr(BLOCK_N), gl.constexpr(D), gl.constexpr(PACK)
        self.HEADS, self.PACKS = gl.constexpr(min(PACK, GROUP)), gl.constexpr((GROUP + PACK - 1) // PACK)
        self.PAGE, self.CAUSAL = gl.constexpr(PAGE), gl.constexpr(CAUSAL)
        self.WINDOW, self.SOFTCAP, self.DTYPE = gl.constexpr(WINDOW), gl.constexpr(SOFTCAP), gl.constexpr(DTYPE)
        codes = CODES is not None
        self.V_CODES = gl.constexpr(V_CODES)
        channels = CODES == "int4_per_channel"
        self.CODES, self.TOKEN_SCALES = gl.constexpr(CODES), gl.constexpr(CODES == "int8" or channels)
        self.CHANNEL_SCALES = gl.constexpr(channels)
        self.TILE_SCALES, self.KEY_SCALES = gl.constexpr(TILE_SCALES), gl.constexpr(KEY_SCALES)
        self.SPLIT_Q, self.CONVERT_KEYS = gl.constexpr(codes and not CONVERT_KEYS), gl.constexpr(CONVERT_KEYS)
        self.PER_TILE = gl.constexpr(2 if CONVERT_KEYS else 1)
        self.CAST_Q = gl.constexpr(CAST_Q or (CONVERT_KEYS and DTYPE != gl.float16))
        self.ROW_SCALES = gl.constexpr(self.SPLIT_Q.value or self.CAST_Q.value)
        self.EARLIER, self.RECENT, self.FIRST = gl.constexpr(EARLIER), gl.constexpr(RECENT), gl.constexpr(FIRST)
        self.V_DTYPE = gl.constexpr(gl.float16 if codes else DTYPE)  # it has every code, and probabilities
        depth = 32 if self.SPLIT_Q.value else 16
        self.MORE, self.MORE_V, self.DIM_V = gl.constexpr(MORE), gl.constexpr(MORE_V), gl.constexpr(DIM_V or D)
        self.S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, depth]))
        # Of 256 columns ptxas has no product for so many warps as convert keys.
        self.O_LAYOUT = gl.constexpr(output_layout(min(D, 128) if CONVERT_KEYS else D))
        self.CODE_LAYOUT = gl.constexpr(code_layout(D))


@aggregate
class Item:
    """A work item: its first token, how many, the position of the first; keys and number of the sequence; a head
    (block of PACK). `live` 0: there are no more. Where items are parts: tiles begin..end, as the nth of `parts`, whose
    states are at `origin`."""

    token: gl.tensor
    tokens: gl.tensor
    first: gl.tensor
    keys: gl.tensor
    seq: gl.tensor
    head: gl.tensor
    live: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    nth: gl.tensor
    parts: gl.tensor
    origin: gl.tensor

    @gluon.constexpr_function
    def __init__(self, token, tokens, first, keys, seq, head, live, begin, end, nth, parts, origin):
        self.token, self.tokens, self.first, self.keys = token, tokens, first, keys
        self.seq, self.head, self.live = seq, head, live
        self.begin, self.end, self.nth, self.parts, self.origin = begin, end, nth, parts, origin


@aggregate
class Items:
    """The list on the device, how many heads (blocks of PACK) go over it, and the keys that a table has room for.
    together: heads that go over it before others begin, 0 is all."""

    entries: gl.tensor
    heads: gl.tensor
    max_keys: gl.tensor
    together: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, entries, heads, max_keys, together):
        self.entries, self.heads, self.max_keys = entries, heads, max_keys
        self.together = gl.constexpr(together)

    @gluon.jit
    def draw(self):
        """The next item that no program has."""
        return gl.atomic_add(self.entries, 1) + gl.num_programs(0)

    @gluon.jit
    def leave(self):
        """A program is done; the last one leaves the counters as it found them."""
        if gl.atomic_add(self.entries + 1, 1) == gl.num_programs(0) - 1:
            gl.store(self.entries, 0)
            gl.store(self.entries + 1, 0)

    @gluon.jit
    def look_up(self, index, shape, LISTED: gl.constexpr):
        """The item of an index. LISTED: the list has room for so many, so that its entry can be read before it is known
        whether it is one."""
        count = gl.load(self.entries + shape.FIELDS)
        live = index < count * self.heads
        if self.together > 0:
            # Of few entries all heads at once: each round of a list ends with short items, which even out.
            together = gl.where(count * self.together < 2 * gl.num_programs(0), self.heads, self.together)
            before = index // together // gl.maximum(count, 1)
            nth = gl.where(live, index // together - before * count, 0)
            head = before * together + index % together
        else:
            nth = index // self.heads if LISTED else gl.where(live, index // self.heads, 0)
            head = index % self.heads
        entry = self.entries + (2 + nth) * shape.FIELDS
        keys = gl.minimum(gl.load(entry + 3), self.max_keys)
        begin, end, nth, parts, origin = head, head, head, head, head
        if shape.SPLIT_KV:
            begin, end, nth, parts = gl.load(entry + 5), gl.load(entry + 6), gl.load(entry + 7), gl.load(entry + 8)
            origin = gl.load(entry + 9) * self.heads + head * parts
        token, tokens, first, seq = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 4)
        return Item(token, tokens, first, keys, seq, head, live.to(gl.int32), begin, end, nth, parts, origin)


@gluon.jit
def hand_out(ring, n, item, shape):
    """Pass an item on, from one warp."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, shape.FIELDS, LANES)
    fields = gl.where(field == 0, item.token, item.tokens)
    fields = gl.where(field == 2, item.first, fields)
    fields = gl.where(field == 3, item.keys, fields)
    fields = gl.where(field == 4, item.seq, fields)
    fields = gl.where(field == 5, item.head, fields)
    fields = gl.where(field == 6, item.live, fields)
    if shape.SPLIT_KV:
        fields = gl.where(field == 7, item.begin, fields)
        fields = gl.where(field == 8, item.end, fields)
        fields = gl.where(field == 9, item.nth, fields)
        fields = gl.where(field == 10, item.parts, fields)
        fields = gl.where(field == 11, item.origin, fields)
    ring.wait_empty(n)
    ring.tile(n).store(fields)
    mbarrier.arrive(ring.barrier(n), count=1)


@gluon.jit
def take(ring, n, WARPS: gl.constexpr, shape):
    """The n-th item that was handed out, taken by WARPS warps."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ring.wait_full(n)
    fields = ()
    for i in gl.static_range(12 if shape.SPLIT_KV else 7):
        fields = fields + (gl.max(ring.tile(n).slice(i, 1).load(SCALAR), 0),)  # noqa: RUF005 - no stars in a kernel
    thread_barrier()
    ring.release(n)
    token, tokens, first, keys, seq = fields[0], fields[1], fields[2], fields[3], fields[4]
    begin, end, nth, parts, origin = token, token, token, token, token
    if shape.SPLIT_KV:
        begin, end, nth, parts, origin = fields[7], fields[8], fields[9], fields[10], fields[11]
    return Item(token, tokens, first, keys, seq, fields[5], fields[6], begin, end, nth, parts, origin)


@gluon.jit
def last_seen(position, shape):
    """The last key that a query at `position` sees under a causal mask; below 0: none."""
    if shape.EARLIER > 0:
        return (position // shape.EARLIER - shape.RECENT) * shape.EARLIER - 1
    else:
        return position


@gluon.jit
def tiles_of(item, shape):
    """Tiles low..high of an item, one at least, of which whole_low..whole_high are seen whole by every row."""
    first = item.first
    last = first + item.tokens - 1
    end = item.keys
    whole = item.keys
    if shape.CAUSAL:
        end = gl.minimum(end, last_seen(last, shape) + 1)
        whole = gl.minimum(whole, last_seen(first, shape) + 1)
    elif shape.WINDOW > 0:
        end = gl.minimum(end, last + shape.WINDOW)
        whole = gl.minimum(whole, first + shape.WINDOW)
    high = gl.maximum((end + shape.BLOCK_N - 1) // shape.BLOCK_N, 1)
    low = high * 0
    whole_low = low
    if shape.WINDOW > 0:
        low = gl.minimum(gl.maximum(first - shape.WINDOW + 1, 0) // shape.BLOCK_N, high - 1)
        whole_low = (gl.maximum(last - shape.WINDOW + 1, 0) + shape.BLOCK_N - 1) // shape.BLOCK_N
    if shape.FIRST > 0:
        low = gl.minimum(low + shape.FIRST // shape.BLOCK_N, high - 1)
        whole_low = low * 0 + (shape.FIRST + shape.BLOCK_N - 1) // shape.BLOCK_N
    if shape.SPLIT_KV:
        high = gl.maximum(gl.minimum(high, item.end), 1)
        low = gl.minimum(gl.maximum(low, item.begin), high - 1)
    whole_high = gl.minimum(gl.maximum(gl.maximum(whole, 0) // shape.BLOCK_N, low), high)
    whole_low = gl.minimum(gl.maximum(whole_low, low), whole_high)
    return low, whole_low, whole_high, high
