"""Device code that decode kernels share: a step's tiles of keys, in the order of the sequences, cut into equal ranges.

A program finds its range from the lengths on the device, so that nothing is planned for a step's lengths. Source:
stream-K (PPoPP 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .masking import end_key, first_key, sees_first_keys, stops_early

_LONGER = tl.constexpr(8)  # of how many tiles of a share there may be one more, so that no share has parts of two items


@triton.jit
def end_of_keys(seq_len, max_keys, MASK: tl.constexpr):
    """The end of the keys that any row of a sequence sees; those behind it are not read, whatever lies there."""
    end = tl.minimum(seq_len, max_keys)
    if stops_early(MASK):
        end = end_key(seq_len - 1, end, MASK)
    return end


@triton.jit
def key_tiles(q_len, seq_len, max_keys, MASK: tl.constexpr, BLOCK_N: tl.constexpr, TILE_OVERHEAD: tl.constexpr):
    """A sequence's first key that any of its rows sees, the first tile, and how many tiles, TILE_OVERHEAD included:
    none without queries, else one of keys at least, so that rows without keys are written too."""
    low = tl.maximum(first_key(seq_len - q_len, MASK), 0)
    first = low // BLOCK_N
    tiles = tl.maximum(tl.cdiv(end_of_keys(seq_len, max_keys, MASK), BLOCK_N) - first, 1)
    return low, first, tl.where(q_len > 0, tiles + TILE_OVERHEAD, 0)


@triton.jit
def tiles_of(
    first, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q: tl.constexpr, MASK: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE_OVERHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles of a head's items of each of CHUNK sequences from `first` on, [CHUNK]."""
    seq = first + tl.arange(0, CHUNK)
    live = seq < num_seqs
    start = tl.load(query_start_loc + seq, mask=live, other=0)
    q_len = tl.load(query_start_loc + seq + 1, mask=live, other=0) - start
    seq_len = tl.load(seq_lens + seq, mask=live, other=0)
    _, _, tiles = key_tiles(q_len, seq_len, max_keys, MASK, BLOCK_N, TILE_OVERHEAD)
    return tiles * tl.cdiv(q_len, BLOCK_Q)


@triton.jit
def first_tile_of(program, programs, total):
    """The first of a program's tiles where `total` tiles are spread over `programs` programs: the next one's first tile
    is their end. Ranges differ by one tile at most, and are empty only behind the first `total` programs, so that an
    item lies in consecutive programs that all have tiles. Longer ranges are as far apart as can be: where all programs
    but one per item have one tile, the longer ones are those with an item's overhead."""
    used = tl.maximum(tl.minimum(programs, total), 1)
    return program * (total // used) + tl.cdiv(program * (total % used), used)


@triton.jit
def program_of(tile, programs, total):
    """The program that has a tile, as `first_tile_of` spreads them."""
    used = tl.maximum(tl.minimum(programs, total), 1)
    return (tile.to(tl.int64) * used // total).to(tl.int32)


@triton.jit
def shares_of(tiles, share):
    """How many shares so many tiles have parts of. Unsigned, which is divided in fewer instructions."""
    return ((tiles + share - 1).to(tl.uint32) // share.to(tl.uint32)).to(tl.int32)


@triton.jit
def whole_shares(work, share, programs, TILE_OVERHEAD: tl.constexpr):
    """Items of `work` tiles each [N] rounded up to whole shares, so that no program has parts of two: tiles of a share,
    shares of each item, and of all together, which are more than `programs` where those are too few for that. A share
    may be longer by an item's overhead, of which each part costs one."""
    shares = shares_of(work, share)
    count = tl.sum(shares, 0)
    if count > programs:
        fewer = shares_of(work, share + tl.maximum(tl.cdiv(share, _LONGER), TILE_OVERHEAD))
        share = tl.max(shares_of(work, tl.maximum(fewer, 1)), 0)  # as short as it can be
        shares = shares_of(work, share)
        count = tl.sum(shares, 0)
    return share, shares, count


@triton.jit
def in_whole_shares(work, total, share, programs, num_seqs, TILE_OVERHEAD: tl.constexpr):
    """Items of `work` tiles each, `total` together, in shares of `share` tiles: with items rounded up to whole shares,
    if there are programs enough. The tiles that items are then multiples of, else 1, the tiles of a share, of each
    item, and of all."""
    unit = 1
    if (share > 1) & (num_seqs <= programs):
        whole, shares, count = whole_shares(work, share, programs, TILE_OVERHEAD)
        if count <= programs:
            unit, share, work, total = whole, whole, shares * whole, count * whole
    return unit, share, work, total


@triton.jit
def nearest_key(offs_n, low, end, MASK: tl.constexpr):
    """The keys nearest to offs_n that are in low..end, unsigned: divided by shifting."""
    near = tl.minimum(offs_n, end - 1)
    if not sees_first_keys(MASK):
        near = tl.maximum(near, low)
    return near.to(tl.uint32)
