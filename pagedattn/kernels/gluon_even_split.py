"""Gluon device code of kernels that split keys: `even_split.py`, and the item that a program's next tile belongs to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import even_split, masking

end_of_keys = gluon.jit(even_split.end_of_keys.fn)
key_tiles = gluon.jit(even_split.key_tiles.fn)
first_tile_of = gluon.jit(even_split.first_tile_of.fn)
program_of = gluon.jit(even_split.program_of.fn)
shares_of = gluon.jit(even_split.shares_of.fn)
in_whole_shares = gluon.jit(even_split.in_whole_shares.fn)
visible = gluon.jit(masking.visible.fn)
least_key = gluon.jit(masking.first_key.fn)
end_key = gluon.jit(masking.end_key.fn)


@gluon.constexpr_function
def window_mask(length):
    """The mask of a sliding window, 0 of none."""
    return (1, length)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def tiles_of(
    first, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q: gl.constexpr, MASK: gl.constexpr,
    TILE: gl.constexpr, OVERHEAD: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tiles of a head's items of each of CHUNK sequences from `first` on, [CHUNK]."""
    SEQS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    seq = first + gl.arange(0, CHUNK, SEQS)
    live = seq < num_seqs
    start = gl.load(query_start_loc + seq, mask=live, other=0)
    q_len = gl.load(query_start_loc + seq + 1, mask=live, other=0) - start
    seq_len = gl.load(seq_lens + seq, mask=live, other=0)
    _, _, tiles = key_tiles(q_len, seq_len, max_keys, MASK, TILE, OVERHEAD)
    return tiles * ((q_len + BLOCK_Q - 1) // BLOCK_Q)


@gluon.jit
def tiles_before(work, base, at):
    """Of sequences with so many tiles each, `base` before them: how many end by tile `at`, and their tiles."""
    before = gl.associative_scan(work, 0, _add) + base <= at
    return gl.sum(before.to(gl.int32), 0), gl.sum(gl.where(before, work, 0), 0)
