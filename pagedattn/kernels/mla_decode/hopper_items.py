"""Gluon: which tiles of which items a program of the Hopper kernel for latent attention has."""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ...runtime.workspace import COUNTERS
from ..gluon_even_split import program_of, window_mask
from .plan import HOPPER_DIMS, HOPPER_KEYS, HOPPER_MOST_PROGRAMS, MAX_ROWS

LATENT, ROPE = (gl.constexpr(size) for size in HOPPER_DIMS)
HALF = gl.constexpr(LATENT.value // 2)  # of the latent elements: what each computing warpgroup writes of outputs
KEYS = gl.constexpr(HOPPER_KEYS)  # of a tile
_FEW_KEYS, _PROGRAMS = (gl.constexpr(column) for column in zip(*HOPPER_MOST_PROGRAMS, strict=True))
_LIMITS, _MOST = gl.constexpr(len(HOPPER_MOST_PROGRAMS)), gl.constexpr(COUNTERS)


@aggregate
class Shape:
    """What the kernel is compiled for. ROWS of a query block, G heads of each of PARTS groups; PAGE slots of a block,
    COPY of them a copy.

    A product's first side is 64 at least. So with 64 rows logits and weights are [ROWS, KEYS] and outputs [ROWS, HALF],
    and with fewer both are transposed, and rows not padded. AXIS: that of keys and of latent elements, 1 or 0. WEIGHTS
    and OUTPUTS are the shapes, LOGITS and OUTPUT the layouts of these products. ALIGNED: queries can be read 16 bytes
    at a time. WAITS: programs wait for states of others.
    """

    ROWS: gl.constexpr
    G: gl.constexpr
    HEADS: gl.constexpr
    PARTS: gl.constexpr
    PAGE: gl.constexpr
    COPY: gl.constexpr
    OVERHEAD: gl.constexpr
    CHUNK: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    MASK: gl.constexpr
    SOFTCAP: gl.constexpr
    DTYPE: gl.constexpr
    ALIGNED: gl.constexpr
    WAITS: gl.constexpr
    BLOCK_Q: gl.constexpr
    KEYS: gl.constexpr
    AXIS: gl.constexpr
    WEIGHTS: gl.constexpr
    OUTPUTS: gl.constexpr
    LOGITS: gl.constexpr
    OUTPUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE, ALIGNED):
        self.ROWS = gl.constexpr(ROWS)
        self.G, self.HEADS, self.PARTS = gl.constexpr(G), gl.constexpr(HEADS), gl.constexpr(PARTS)
        self.PAGE, self.COPY = gl.constexpr(PAGE), gl.constexpr(min(PAGE, KEYS.value))
        self.OVERHEAD, self.CHUNK = gl.constexpr(OVERHEAD), gl.constexpr(CHUNK)
        self.MASK = gl.constexpr(window_mask(WINDOW))
        self.CAUSAL, self.WINDOW, self.SOFTCAP = gl.constexpr(CAUSAL), gl.constexpr(WINDOW), gl.constexpr(SOFTCAP)
        self.DTYPE, self.ALIGNED, self.WAITS = gl.constexpr(DTYPE), gl.constexpr(ALIGNED), gl.constexpr(False)
        self.BLOCK_Q, self.KEYS = gl.constexpr(ROWS // G), KEYS
        if ROWS == MAX_ROWS:
            axis, weights, outputs = 1, [ROWS, KEYS.value], [ROWS, HALF.value]
        else:
            axis, weights, outputs = 0, [KEYS.value, ROWS], [HALF.value, ROWS]
        self.AXIS, self.WEIGHTS, self.OUTPUTS = gl.constexpr(axis), gl.constexpr(weights), gl.constexpr(outputs)
        layouts = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sides[1], 16]) for sides in (weights, outputs))
        self.LOGITS, self.OUTPUT = (gl.constexpr(layout) for layout in layouts)


@gluon.jit
def visible(q_pos, offs_n, past, AXIS: gl.constexpr, shape):
    """Which keys offs_n, below `past`, rows at positions q_pos see. AXIS: that along which keys lie."""
    last = q_pos  # the last key that a row sees
    if not shape.CAUSAL:
        last = q_pos * 0 + past
        if shape.WINDOW > 0:
            last = q_pos + (shape.WINDOW - 1)
    keep = offs_n <= gl.expand_dims(gl.minimum(last, past - 1), AXIS)
    if shape.WINDOW > 0:
        keep = keep & (offs_n > gl.expand_dims(q_pos - shape.WINDOW, AXIS))
    return keep


@gluon.jit
def _whole_items(step, shape, total, work, programs, COUNT: gl.constexpr):
    """Fewer programs, where all sequences have as many tiles and ranges begin with sequences then: several ranges for
    each, or several sequences in one. Fewer partial states are written and read again, which is worth some tiles."""
    # Apart from `Step.count`: one reduction of all three spills registers of the loop (README.md).
    widest = gl.max(work, 0)
    live = gl.sum((work > 0).to(gl.int32), 0)
    for first in range(shape.CHUNK, step.num_seqs, shape.CHUNK):
        tiles = step.tiles_of(first, shape, COUNT)
        widest = gl.maximum(widest, gl.max(tiles, 0))
        live += gl.sum((tiles > 0).to(gl.int32), 0)
    live = gl.maximum(live, 1)
    together = (live + programs - 1) // programs  # sequences of a range
    fewer = gl.where(live <= programs, programs // live * live, live // together)
    begins = (widest.to(gl.int64) * live == total) & ((live <= programs) | (live % together == 0))
    more = (total + fewer - 1) // fewer - (total + programs - 1) // programs
    return gl.where(begins & (more <= shape.ROWS // 16 + 5), fewer, programs)


@aggregate
class KeySplit:
    """How the programs of a part share its tiles: `total` in equal ranges, of which this one has number range_id."""

    part: gl.tensor
    range_id: gl.tensor
    programs: gl.tensor
    total: gl.tensor

    @gluon.constexpr_function
    def __init__(self, part, range_id, programs, total):
        self.part, self.range_id, self.programs, self.total = part, range_id, programs, total

    @gluon.jit
    def of_item(self, item):
        """The first and the last range that has tiles of an item."""
        first = program_of(item.origin, self.programs, self.total)
        return first, program_of(item.close - 1, self.programs, self.total)


@gluon.jit
def range_of_program(step, shape, COUNT: gl.constexpr):
    """The program's tiles at..end of its part's, the sequence of the first one, and the number of tiles before that
    sequence; and the `KeySplit`, by as many programs as are worth their states."""
    total, work = step.count(shape, COUNT)
    items = step.num_seqs * shape.PARTS
    keys = (total - step.num_seqs * shape.OVERHEAD) * (shape.KEYS * shape.PARTS)
    most = _MOST + 0 * keys
    for i in gl.static_range(_LIMITS):
        most = gl.where(keys <= _FEW_KEYS[_LIMITS - 1 - i], _PROGRAMS[_LIMITS - 1 - i], most)
    most = gl.maximum((most + items // 2) // items, 1) * step.num_seqs  # of a part
    programs = gl.minimum(gl.num_programs(0) // shape.PARTS, most)
    programs = _whole_items(step, shape, total, work, programs, COUNT)
    range_id = gl.program_id(0) // shape.PARTS
    if shape.WAITS:
        # A program waits for later ranges of its item. Thread blocks start in the order of their numbers: what it waits
        # for has started, however few run at a time. CUDA does not promise that order; stream-K relies on it too.
        range_id = gl.where(range_id < programs, programs - 1 - range_id, range_id)
    at, end, seq, base = step.range_of(range_id, programs, total, work, shape, COUNT)
    return at, end, seq, base, KeySplit(gl.program_id(0) % shape.PARTS, range_id, programs, total)
