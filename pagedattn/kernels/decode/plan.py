"""Launch configuration of the decode kernel, a pure function of shapes and target."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...runtime.target import Target
from ...runtime.workspace import COUNTERS
from ..tiles import block_dims, next_power_of_2, shared_memory

DECODE_ROWS = 64  # packed rows of a decode's query block at most


class DecodeTuning(NamedTuple):
    """What is chosen by measurement: keys per tile, programs per SM, how many partial states a program adds up.

    prefetch_block_table: block ids are loaded an iteration before they are needed. reduction_unroll_regs: registers of
    a thread for partial states that are being loaded. tile_overhead: tiles that an item counts for beyond its keys'
    when they are split, since it takes time until its first keys are there.
    """

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    max_registers: int | None = None
    fan_in: int = 16
    prefetch_block_table: bool = True
    reduction_unroll_regs: int = 32
    tile_overhead: int = 0


class DecodeConfig(NamedTuple):
    """A decode launch of `programs` programs; `rows` of the block_m rows of a query block are in use.

    tiles: the most tiles of keys there can be; state: elements of a partial state.
    """

    block_m: int
    heads: int
    rows: int
    state: int
    programs: int
    tiles: int
    supports_pdl: bool
    tuning: DecodeTuning

    @property
    def workspace(self) -> int:
        """int32 elements of the workspace: counters, then two places for partial states per program."""
        return 3 * COUNTERS + 2 * self.programs * self.state

    @property
    def keys(self) -> int:
        """The most keys that are loaded, by all query blocks of all heads together."""
        return self.tiles * self.tuning.block_n

    @property
    def reduction_unroll(self) -> int:
        """Partial states of which a thread's parts fit into the registers they may take, a power of two."""
        outputs = self.state - max(2 * self.rows, 4)
        fit = self.tuning.reduction_unroll_regs * 32 * self.tuning.num_warps // outputs
        return min(next_power_of_2(self.tuning.fan_in), 1 << max(fit, 1).bit_length() - 1)


# Two programs per SM hide each other's ends; where there is little work, deep loads of one program's own do it better.
# Where an SM's share is part of one item, adding up states takes longest (bench/results/h200/tune_decode.json).
FULL = DecodeTuning(block_n=64, num_warps=4, num_stages=3, per_sm=2, tile_overhead=2)
# SHORT loses 1 % from 1,000 keys a sequence on, and wins 6 to 20 % below 300 (bench/results/h200/tune_short.json).
SHORT = DecodeTuning(block_n=32, num_warps=4, num_stages=4, per_sm=4, max_registers=128, tile_overhead=2)
# Four warps of one tile mostly wait for each other: 2 to 8 % of a layer over int4, whose open blocks are such.
ONE_TILE = DecodeTuning(block_n=32, num_warps=1, num_stages=2, per_sm=8, tile_overhead=2, prefetch_block_table=False)
LATENCY = DecodeTuning(block_n=128, num_warps=4, num_stages=3, per_sm=1)
FEW_ITEMS = LATENCY._replace(reduction_unroll_regs=128)
_LARGE_STATE = 16 * 128  # outputs, which 32 registers of a thread have room for two of: more are loaded at once
_LARGE_STATE_ITEMS = 0.5  # of an SM, where programs that share an item are many
# Heads of 256, of no more items than SMs: two programs an SM would have one buffer each.
WIDE = DecodeTuning(block_n=64, num_warps=4, num_stages=4, per_sm=1)
WIDE_FEW_ITEMS = WIDE._replace(num_warps=8, reduction_unroll_regs=128)
# Heads of 64, whose tiles are small: products of one program beside the softmax of another.
PAIRED = FULL._replace(tile_overhead=0)
_PAIRED_ITEMS = 0.1  # of an SM, from which on adding up states takes no longer than that saves
_SHORT_KEYS = 512
_SHORT_ITEMS = 2.5  # of an SM, below which four programs have too little each
_KEYS_PER_SM = 1024  # of query blocks of 64 rows, from which on two programs an SM win (README.md, what was measured)


@lru_cache(maxsize=4096)
def decode_config(
    *,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    stored_itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    target: Target,
    short: bool = False,
    tile_keys: int | None = None,
    tuning: DecodeTuning | None = None,
) -> DecodeConfig:
    """The configuration of a decode launch over sequences of at most max_query_len tokens, which see max_seq_len keys.

    itemsize is of the query, stored_itemsize of the cache. short: most sequences have few keys, whatever the most is;
    so it is taken to be where all have few. tile_keys: the most that the cache's format takes. `tuning` is taken as it
    is, but for that and for what does not fit the device's shared memory.
    """
    block_m = max(16, min(next_power_of_2(max(max_query_len, 1) * group), DECODE_ROWS))
    width, shape = block_dims(head_dim, head_dim_v)[1], (head_dim, head_dim_v, itemsize)
    # The output of a query block stays in registers, its queries in shared memory.
    while block_m > 16 and (block_m * width > 16384 or shared_memory(block_m, 16, 1, *shape) > target.shared_bytes):
        block_m //= 2
    heads = min(group, block_m)
    tokens = max(1, min(max_query_len, block_m // heads))
    items = num_seqs * num_kv_heads * -(-group // heads) * -(-max(max_query_len, 1) // (block_m // heads))
    padded = next_power_of_2(tokens * heads)
    together = 1  # programs that an SM shall have room for
    if tuning is None:
        items_per_sm = items / target.num_sms
        full = SHORT if items_per_sm >= _SHORT_ITEMS and (short or max_seq_len <= _SHORT_KEYS) else FULL
        if max_seq_len <= ONE_TILE.block_n and itemsize == 2:
            full = ONE_TILE
        sizes = (itemsize, stored_itemsize)
        tuning = _tuning(items_per_sm, full, max_seq_len, block_m, padded, width, *sizes)
        together = tuning.per_sm
        # What a tile has beyond the last key costs its instructions all the same.
        tuning = tuning._replace(block_n=min(tuning.block_n, max(32, next_power_of_2(max_seq_len))))
    tuning = tuning._replace(block_n=min(tuning.block_n, tile_keys or tuning.block_n))

    def taken(chosen: DecodeTuning) -> int:
        # A tile's buffers are free once it has been multiplied: one stage needs none.
        return shared_memory(block_m, chosen.block_n, max(1, chosen.num_stages - 1), *shape)

    while together * taken(tuning) > target.shared_bytes and tuning.num_stages > 2:
        tuning = tuning._replace(num_stages=tuning.num_stages - 1)
    while taken(tuning) > target.shared_bytes and tuning.block_n > 16:
        tuning = tuning._replace(block_n=tuning.block_n // 2)
    room = target.shared_bytes // taken(tuning)
    tiles = items * max(1, -(-max_seq_len // tuning.block_n))
    parts = num_kv_heads * -(-group // heads)  # each has as many programs as every other
    programs = min(target.num_sms * max(1, min(tuning.per_sm, room)), tiles, COUNTERS)
    programs = max(1, programs // parts) * parts
    # A row of its own for each warp: fewer would have warps share states, and pass their parts through shared memory.
    rows = max(padded, tuning.num_warps)
    state = max(2 * rows, 4) + rows * width
    return DecodeConfig(block_m, heads, rows, state, programs, tiles, target.supports_pdl, tuning)


def _tuning(
    items_per_sm: float,
    full: DecodeTuning,
    keys: int,
    block_m: int,
    rows: int,
    width: int,
    itemsize: int,
    stored_itemsize: int,
) -> DecodeTuning:
    """`full` where there are more items than SMs, else LATENCY, with changed what registers do not hold: large tiles
    of output, and keys and values that are converted. `keys` of an item; block_m x width is a query block's output,
    rows x width of it that of a partial state."""
    busy, outputs = items_per_sm > 1, block_m * width
    tuning = full if busy else LATENCY if items_per_sm > 1 / 32 else FEW_ITEMS
    if not busy and width <= 64 and items_per_sm > _PAIRED_ITEMS:
        tuning = PAIRED
    # Rows for wgmma: products of one program hide the softmax of another, at the price of more states to add up.
    hidden = block_m == 64 and width <= 128 and items_per_sm * keys >= _KEYS_PER_SM
    if outputs > 32 * 128 and not hidden:
        tuning = DecodeTuning(block_n=64, num_warps=8, num_stages=5, per_sm=1)
    elif outputs > 16 * 128:
        tuning = WIDE if width > 128 and not busy else PAIRED
    elif stored_itemsize < itemsize:
        tuning = PAIRED if busy else LATENCY._replace(num_warps=8)
    if itemsize == 4:
        return tuning._replace(block_n=32)
    large = rows * width >= _LARGE_STATE and items_per_sm <= _LARGE_STATE_ITEMS
    few_items = {LATENCY: FEW_ITEMS, WIDE: WIDE_FEW_ITEMS}
    return few_items.get(tuning, tuning) if large else tuning
