"""Gluon: which tiles of which items a program has of a step's tiles of keys, cut into equal ranges.

`shape` is what a kernel is compiled for: BLOCK_Q tokens of an item, KEYS of a tile, OVERHEAD of empty tiles that an
item counts for, CHUNK sequences that are looked at together, MASK, and G heads of HEADS for each token of an item.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .gluon_even_split import end_of_keys, first_tile_of, key_tiles, tiles_before, tiles_of


@aggregate
class Step:
    """The lengths of a step on the device."""

    query_start_loc: gl.tensor
    seq_lens: gl.tensor
    num_seqs: gl.tensor
    max_keys: gl.tensor

    @gluon.constexpr_function
    def __init__(self, query_start_loc, seq_lens, num_seqs, max_keys):
        self.query_start_loc, self.seq_lens = query_start_loc, seq_lens
        self.num_seqs, self.max_keys = num_seqs, max_keys

    @gluon.jit
    def tiles_of(self, first, shape, COUNT: gl.constexpr):
        """Tiles of a part's items of each of CHUNK sequences from `first` on; COUNT warps look."""
        return tiles_of(
            first, self.query_start_loc, self.seq_lens, self.num_seqs, self.max_keys, shape.BLOCK_Q, shape.MASK,
            shape.KEYS, shape.OVERHEAD, shape.CHUNK, COUNT,
        )  # fmt: skip

    @gluon.jit
    def count(self, shape, COUNT: gl.constexpr):
        """How many tiles all programs of a part have, and those of the first CHUNK sequences' items."""
        work = self.tiles_of(0, shape, COUNT)
        total = gl.sum(work, 0)
        for more in range(shape.CHUNK, self.num_seqs, shape.CHUNK):
            total += gl.sum(self.tiles_of(more, shape, COUNT), 0)
        return total, work

    @gluon.jit
    def range_of(self, program, programs, total, work, shape, COUNT: gl.constexpr):
        """A program's tiles at..end of what `count` gave, the sequence of the first one, and the number of tiles before
        that sequence."""
        here = gl.sum(work, 0)
        at = first_tile_of(program, programs, total)
        end = gl.minimum(first_tile_of(program + 1, programs, total), total)
        first = 0
        base = 0
        for _ in range(shape.CHUNK, self.num_seqs, shape.CHUNK):
            if base + here <= at:
                base += here
                first += shape.CHUNK
                work = self.tiles_of(first, shape, COUNT)
                here = gl.sum(work, 0)
        passed, tiles = tiles_before(work, base, at)
        return at, end, first + passed, base + tiles

    @gluon.jit
    def lengths(self, seq, shape):
        """Of a sequence: its first new token, how many, its keys, the first that is seen, its tile, and tiles."""
        q_start = gl.load(self.query_start_loc + seq)
        q_len = gl.load(self.query_start_loc + seq + 1) - q_start
        seq_len = gl.load(self.seq_lens + seq)
        low, first, tiles = key_tiles(q_len, seq_len, self.max_keys, shape.MASK, shape.KEYS, shape.OVERHEAD)
        return q_start, q_len, seq_len, low, first, tiles

    @gluon.jit
    def item_of(self, at, seq, base, shape):
        """The item that tile `at` belongs to, from sequence `seq` on, before which there are `base` tiles."""
        q_start, q_len, seq_len, low, first, tiles = self.lengths(seq, shape)
        past = base + tiles * ((q_len + shape.BLOCK_Q - 1) // shape.BLOCK_Q)
        while at >= past:
            base = past
            seq += 1
            q_start, q_len, seq_len, low, first, tiles = self.lengths(seq, shape)
            past = base + tiles * ((q_len + shape.BLOCK_Q - 1) // shape.BLOCK_Q)
        q_block = (at - base) // tiles
        origin = base + q_block * tiles + shape.OVERHEAD
        keys = end_of_keys(seq_len, self.max_keys, shape.MASK)
        close = base + (q_block + 1) * tiles
        return Item(seq, base, q_start, q_len, seq_len, keys, low, first, q_block, origin, close, shape.KEYS)


@aggregate
class Item:
    """A query block of a sequence: tiles origin..close, the first of which is the sequence's tile number `first`; keys
    low..keys are seen by some row. KEYS of a tile."""

    seq: gl.tensor
    base: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    seq_len: gl.tensor
    keys: gl.tensor
    low: gl.tensor
    first: gl.tensor
    q_block: gl.tensor
    origin: gl.tensor
    close: gl.tensor
    KEYS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, seq, base, q_start, q_len, seq_len, keys, low, first, q_block, origin, close, KEYS):
        self.seq, self.base, self.q_start, self.q_len, self.seq_len = seq, base, q_start, q_len, seq_len
        self.keys, self.low, self.first, self.q_block = keys, low, first, q_block
        self.origin, self.close, self.KEYS = origin, close, gl.constexpr(KEYS)

    @gluon.jit
    def key_range(self, at, stop):
        """Keys of tiles at..stop, which begin with a tile's first."""
        begin = (self.first + at - self.origin) * self.KEYS
        return begin, gl.minimum((self.first + stop - self.origin) * self.KEYS, self.keys)

    @gluon.jit
    def rows(self, row, part, shape):
        """Query token in the sequence, head, and whether there is one, of rows."""
        q_row = self.q_block * shape.BLOCK_Q + row // shape.G
        head = part * shape.G + row % shape.G
        return q_row, head, (row < shape.BLOCK_Q * shape.G) & (q_row < self.q_len) & (head < shape.HEADS)
