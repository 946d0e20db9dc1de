"""Which prompts have their keys and values dequantised before they are attended to: pure functions."""

from __future__ import annotations

from ...spec import Mask
from ..shape import AttentionShape, BatchBounds

MOST_BYTES = 64 << 20  # of copied keys and values, however many there are
# Codes of keys whose numbers float16 has: of int4 as they are, of int8, with the scales that `formats/int8` gives rows,
# times a power of two of a tile.
FLOAT16_KEYS = ("int8", "int4_per_channel")
# Tokens times heads of a group from which a copy takes less time than it saves: of formats that a Hopper kernel for
# prompts reads, of which fp8 loses less than int8, and of others.
_FEWEST_ROWS = {("e4m3", "e4m3"): 1024, ("e5m2", "e5m2"): 1024, ("int8", "int8"): 512}
_FEWEST_OTHER_ROWS = 64


def native_shape(shape: AttentionShape) -> AttentionShape:
    """The shape of attention over the copy."""
    return shape._replace(stored_dtype=shape.dtype, codes=(None, None))


def num_warps(tile: int, dim: int) -> int:
    """Of a program that copies `tile` rows of `dim` elements."""
    return max(4, tile * dim // 2048)


def copy_turns(shape: AttentionShape, bounds: BatchBounds) -> int:
    """In how many turns, each of as many KV heads, the prompts of these bounds are attended to over a copy of at most
    MOST_BYTES; 0 where reading the codes is faster, or the keys of one head are too many."""
    size, key_codes = shape.block_size, shape.codes[0]
    if size is None or not shape.paged or key_codes not in ("e4m3", "e5m2", *FLOAT16_KEYS):
        return 0
    if bounds.max_query_len * shape.group < _FEWEST_ROWS.get(shape.codes, _FEWEST_OTHER_ROWS):
        return 0
    if 2 * Mask.of(shape.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len) < bounds.max_seq_len:
        return 0  # most of the copy would not be read
    keys = min(bounds.max_seq_len, bounds.max_keys or bounds.max_seq_len)
    rows = (bounds.num_seqs - bounds.num_decodes) * -(-keys // size) * size
    head_bytes = rows * (shape.head_dim + shape.head_dim_v) * shape.dtype.itemsize
    heads = shape.num_kv_heads
    turns = (heads // n for n in range(heads, 0, -1) if heads % n == 0 and n * head_bytes <= MOST_BYTES)
    return next(turns, 0)
