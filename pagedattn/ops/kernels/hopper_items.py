"""Gluon: the work items of prefill on Hopper, as `work_list` lists them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ..hopper import FIELDS as _FIELDS

FIELDS = gl.constexpr(_FIELDS)
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma takes


@aggregate
class Shape:
    """What is fixed when a kernel is compiled: BLOCK_N keys a tile, D a head's width, PACK query heads a block of rows,
    PARTS such blocks per KV head, PAGE slots a cache block."""

    BLOCK_N: gl.constexpr
    D: gl.constexpr
    PACK: gl.constexpr
    PARTS: gl.constexpr
    PAGE: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    DTYPE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, BLOCK_N, D, PACK, PARTS, PAGE, CAUSAL, WINDOW, SOFTCAP, DTYPE):
        self.BLOCK_N, self.D, self.PACK = gl.constexpr(BLOCK_N), gl.constexpr(D), gl.constexpr(PACK)
        self.PARTS, self.PAGE, self.CAUSAL = gl.constexpr(PARTS), gl.constexpr(PAGE), gl.constexpr(CAUSAL)
        self.WINDOW, self.SOFTCAP, self.DTYPE = gl.constexpr(WINDOW), gl.constexpr(SOFTCAP), gl.constexpr(DTYPE)


@aggregate
class Items:
    """The list on the device, how many heads (blocks of PACK) go over it, and the keys that a table has room for."""

    entries: gl.tensor
    heads: gl.tensor
    max_keys: gl.tensor

    @gluon.constexpr_function
    def __init__(self, entries, heads, max_keys):
        self.entries, self.heads, self.max_keys = entries, heads, max_keys

    @gluon.jit
    def total(self):
        return gl.load(self.entries + FIELDS) * self.heads

    @gluon.jit
    def look_up(self, index):
        """First token, tokens, position of the first, keys of the sequence, head."""
        entry = self.entries + (2 + index // self.heads) * FIELDS
        keys = gl.minimum(gl.load(entry + 3), self.max_keys)
        return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), keys, index % self.heads

    @gluon.jit
    def sequence(self, index):
        return gl.load(self.entries + (2 + index // self.heads) * FIELDS + 4)


@gluon.jit
def tiles_of(first, tokens, keys, shape):
    """Tiles low..high of an item, one at least, of which whole_low..whole_high are seen whole by every row."""
    last = first + tokens - 1
    end = keys
    whole = keys
    if shape.CAUSAL:
        end = gl.minimum(end, last + 1)
        whole = gl.minimum(whole, first + 1)
    elif shape.WINDOW > 0:
        end = gl.minimum(end, last + shape.WINDOW)
        whole = gl.minimum(whole, first + shape.WINDOW)
    high = gl.maximum((end + shape.BLOCK_N - 1) // shape.BLOCK_N, 1)
    low = high * 0
    whole_low = low
    if shape.WINDOW > 0:
        low = gl.minimum(gl.maximum(first - shape.WINDOW + 1, 0) // shape.BLOCK_N, high - 1)
        whole_low = (gl.maximum(last - shape.WINDOW + 1, 0) + shape.BLOCK_N - 1) // shape.BLOCK_N
    whole_high = gl.minimum(gl.maximum(gl.maximum(whole, 0) // shape.BLOCK_N, low), high)
    whole_low = gl.minimum(gl.maximum(whole_low, low), whole_high)
    return low, whole_low, whole_high, high
