"""Which prompts have their keys and values dequantised before they are attended to: pure functions."""

from __future__ import annotations

import math

from ...spec import Mask
from ..shape import FOUR_BIT_VALUES, INT4, K8V4, AttentionShape, BatchBounds
from ..tiles import next_power_of_2

MOST_BYTES = 64 << 20  # of copied keys and values, however many there are
# Codes of rotated keys: a copy has sums of their levels, and a factor of each key.
ROTATED_KEYS = ("turboquant4", "turboquant3", "turboquant2")
# Codes of keys whose numbers float16 has: of int4 as they are, of int8, with the scales that `formats/int8` gives rows,
# times a power of two of a tile.
FLOAT16_KEYS = ("int8", "int4_per_channel", *ROTATED_KEYS)
_SLOWLY_CONVERTED = ("int4_per_channel", *ROTATED_KEYS)
# Tokens times heads of a group from which a copy takes less time than it saves: of formats that a Hopper kernel for
# prompts reads, of which fp8 loses less than int8, and of others. The portable kernel is slow over rotated keys.
_FEWEST_ROWS = {("e4m3", "e4m3"): 1024, ("e5m2", "e5m2"): 1024, ("int8", "int8"): 896, K8V4: 896, INT4: 640}
_FEWEST_OTHER_ROWS = 64
_FEWEST_UNREAD_ROWS = 256  # of 8 bits that it does not read, over which the portable kernel is less slow; by estimate
_SMALL_BYTES = 16 << 20  # of a copy that takes less time than the portable kernel loses, whatever the rows; by estimate
_ROWS_OF_A_KEY = 256  # by which each copied key is seen, on average, that no Hopper kernel reads; by estimate
_FEWEST_KEYS = 2048  # of a pass, so that attending to them takes longer than merging what passes leave


def width(head_dim: int, head_dim_v: int) -> int:
    """Of a copied key and value, with zeros beyond the head, so that heads are read in one part."""
    return next_power_of_2(max(64, head_dim, head_dim_v))


def native_shape(shape: AttentionShape) -> AttentionShape:
    """The shape of attention over the copy, whose rows are in no blocks."""
    dim = width(shape.head_dim, shape.head_dim_v)
    stored = {"stored_dtype": shape.dtype, "codes": (None, None), "block_size": None}
    return shape._replace(**stored, head_dim=dim, head_dim_v=dim)


def rotated_tokens(dim: int) -> int:
    """That a program copies of rotated keys: with more, fewer programs would run at one time."""
    return max(16, 4096 // dim)


def num_warps(tile: int, dim: int) -> int:
    """Of a program that copies `tile` rows of `dim` elements."""
    return max(4, tile * dim // 2048)


def pays(shape: AttentionShape, bounds: BatchBounds, unread: bool = False) -> bool:
    """Whether attending to a copy is faster than reading the codes of prompts of these bounds. unread: no Hopper kernel
    reads them."""
    if shape.block_size is None or not shape.paged or shape.codes[0] not in ("e4m3", "e5m2", *FLOAT16_KEYS):
        return False
    fewest = _FEWEST_ROWS.get(shape.codes, _FEWEST_OTHER_ROWS)
    if unread:
        fewest = min(fewest, _FEWEST_OTHER_ROWS if shape.codes in FOUR_BIT_VALUES else _FEWEST_UNREAD_ROWS)
    small = unread and _is_small(shape, bounds)
    if not (small or shape.codes[0] in ROTATED_KEYS) and bounds.max_query_len * shape.group < fewest:
        return False
    # Of few keys that are seen, most of the copy would not be read.
    seen = Mask.of(shape.mask).max_visible_keys(bounds.max_query_len, bounds.prompt_keys)
    by_many = unread and bounds.max_query_len * shape.group * seen >= _ROWS_OF_A_KEY * bounds.prompt_keys
    return by_many or 2 * seen >= bounds.prompt_keys


def beats_converting(shape: AttentionShape, bounds: BatchBounds, rows: int) -> bool:
    """Whether a copy takes less time than the decode kernel for codes, which converts them for each block of `rows`
    rows: one that is small, of codes of which converting takes long, and of more than one block."""
    several = bounds.max_query_len * shape.group > rows and shape.codes[0] in _SLOWLY_CONVERTED
    return several and _is_small(shape, bounds) and copy_turns(shape, bounds, unread=True) == 1


def passes_pay(shape: AttentionShape, bounds: BatchBounds) -> bool:
    """Whether passes over copies are faster than a Hopper kernel that reads the codes, where a copy has no room for the
    keys of one head: over values of 4 bits, by estimate, of whose tiles converting takes longest."""
    return shape.codes in FOUR_BIT_VALUES and pays(shape, bounds)


def copy_turns(shape: AttentionShape, bounds: BatchBounds, unread: bool = False) -> int:
    """In how many turns, each of as many KV heads, the prompts of these bounds are attended to over a copy of at most
    MOST_BYTES; 0 where that does not pay, or the keys of one head are too many. unread: as of `pays`."""
    size, heads = shape.block_size, shape.num_kv_heads
    if size is None or not pays(shape, bounds, unread):
        return 0
    rows = -(-most_keys(bounds) // size) * size
    turns = (heads // n for n in _divisors(heads) if rows * _key_bytes(shape, bounds, n) <= MOST_BYTES)
    return next(turns, 0)


def keys_per_pass(shape: AttentionShape, bounds: BatchBounds, tile: int) -> int:
    """Of prompts of which one head is too much: for how many keys of each a copy has room, of as many heads as leave
    it _FEWEST_KEYS, or of one; whole blocks and tiles. 0 where a copy does not pay. Asked for where no Hopper kernel
    reads them, or where passes pay."""
    size, heads = shape.block_size, shape.num_kv_heads
    if size is None or not pays(shape, bounds, unread=True):
        return 0
    unit = math.lcm(size, tile)
    most = [MOST_BYTES // _key_bytes(shape, bounds, n) // unit * unit for n in _divisors(heads)]
    return next((keys for keys in most if keys >= _FEWEST_KEYS), most[-1])


def _is_small(shape: AttentionShape, bounds: BatchBounds) -> bool:
    return most_keys(bounds) * _key_bytes(shape, bounds, shape.num_kv_heads) <= _SMALL_BYTES


def most_keys(bounds: BatchBounds) -> int:
    """Of a prompt: its length, or what the block table has room for."""
    return min(bounds.prompt_keys, bounds.max_keys or bounds.prompt_keys)


def _divisors(heads: int) -> list[int]:
    return [n for n in range(heads, 0, -1) if heads % n == 0]


def _key_bytes(shape: AttentionShape, bounds: BatchBounds, heads: int) -> int:
    """In the copy: of one key of each prompt."""
    size = 2 * width(shape.head_dim, shape.head_dim_v) * shape.dtype.itemsize
    return (bounds.num_seqs - bounds.num_decodes) * heads * size
