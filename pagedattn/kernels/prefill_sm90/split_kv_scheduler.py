"""Triton: the list of a step's prefill work items where query blocks are too few for all SMs, so that their keys are
cut into parts, made once per step for all layers.

All blocks are cut at the same keys, multiples of one length, for parts of the same keys of several blocks run at one
time and share what the L2 holds. Of more blocks than SMs, the first may stay whole. Whole ones and parts of full length
come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..masking import end_key, first_key
from .plan import MOST_SPLIT_BLOCKS, TileSchedulerParams, halves_per_tile, keys_per_tile, partial_size, tokens_per_tile
from .tile_scheduler import look_up

_CANDIDATES = 64
_SIZES = ((16, 8), (64, 16), (MOST_SPLIT_BLOCKS, 32))  # slots at most, and warps for them


@triton.jit
def _span(position, tokens, keys, MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles that a query block sees, as `work_item.tiles_of` has them."""
    high = tl.maximum((end_key(position + tokens - 1, keys, MASK) + BLOCK_N - 1) // BLOCK_N, 1)
    low = tl.minimum(tl.maximum(first_key(position, MASK), 0) // BLOCK_N, high - 1)
    return low, high


@triton.jit
def _quotient(tiles, inverse):
    """tiles // step of numbers below 2**20, whose inverse rounds to `inverse`: of integers it would be most of what the
    kernel is, and that is read from memory."""
    return ((tiles + 0.5) * inverse).to(tl.int32)


@triton.jit
def _parts(low, high, step):
    """Of tiles low..high, cut at multiples of `step`: in which multiple the first part is, how many parts, and how
    many of them of full length."""
    inverse = 1.0 / step
    first = _quotient(low, inverse)
    parts = _quotient(high - 1, inverse) - first + 1
    return first, parts, tl.maximum(_quotient(high, inverse) - _quotient(low + step - 1, inverse), 0)


@triton.jit
def _best_cut(
    low, high, live, last, nth, kv_heads, heads, num_sms, entries, places, state_cost, reading, CANDIDATES: tl.constexpr
):
    """The length of parts, in tiles, and how many blocks to leave whole in front of those that are cut, with which the
    last SM is probably done first: all are cut, or those after as many as keep all SMs equally busy."""
    tiles = tl.where(live, high - low, 0)
    candidate = tl.arange(0, 2 * CANDIDATES)
    k = 1 + candidate % CANDIDATES
    count = tl.sum(live.to(tl.int32), 0)
    kept = tl.where(candidate < CANDIDATES, 0, count * heads // num_sms * num_sms // heads)
    whole = live[:, None] & (nth[:, None] < kept[None, :])
    cut = live[:, None] & (nth[:, None] >= kept[None, :])
    longest = tl.max(tl.where(cut, tiles[:, None], 0), 0)
    # Of k = 1 no multiple lies within.
    step = tl.where(k == 1, tl.max(high, 0), tl.maximum((longest + k - 1) // k, 1))
    _, parts, full = _parts(low[:, None], high[:, None], step[None, :])
    parts, full = tl.where(cut, parts, 0), tl.where(cut, full, 0)
    # What is left of a block counts as a part of full length where it nearly is one, else as time that SMs may idle.
    rest = tl.where(cut, tiles[:, None], 0) - full * step[None, :]
    nearly = 4 * rest > 3 * step[None, :]
    long = tl.sum(full + nearly.to(tl.int32), 0) * heads
    even = (tl.sum(tl.where(cut, tiles[:, None], 0), 0) * heads + num_sms - 1) // num_sms
    even += tl.max(tl.where(nearly, 0, rest), 0) // 2
    busy = tl.maximum((long + num_sms - 1) // num_sms * step, even)
    busy += (kept * heads + num_sms - 1) // num_sms * tl.max(tl.where(whole, tiles[:, None], 0), 0)
    units = (tl.sum(parts, 0) + kept) * heads
    states = tl.sum(tl.where(parts > 1, parts, 0), 0) * heads
    # All SMs together read a tile each in `reading` times what computing takes; blocks of a sequence share its keys.
    # What takes nearly as long as the other makes both slower.
    read = reading * tl.sum(tl.where(last, tiles, 0), 0) * kv_heads / num_sms
    longer = tl.maximum(tl.maximum(busy.to(tl.float32), read), 1.0)
    fraction = tl.minimum(busy.to(tl.float32), read) / longer
    fraction = fraction * fraction * fraction * fraction
    both = longer * tl.sqrt(tl.sqrt(tl.sqrt(1.0 + fraction * fraction)))
    # In tiles: what an item costs by itself, and parts to add up, all of them by all SMs and those of a block in turn.
    cost = both + 1.5 * ((units + num_sms - 1) // num_sms)
    cost += tl.where(states > 0, 0.5 + k / 10 + states * state_cost, 0.0)
    cost = tl.where((states <= places) & (units <= entries * heads), cost, float("inf"))
    best = candidate == tl.argmin(cost, 0)
    return tl.sum(tl.where(best, step, 0), 0), tl.sum(tl.where(best, kept, 0), 0)


@triton.jit(
    do_not_specialize=["num_seqs", "rounds", "slots", "entries", "kv_heads", "heads", "places", "max_keys", "num_sms"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def _part_list_kernel(
    query_start_loc, seq_lens, items, num_seqs, rounds, slots, entries, kv_heads, heads, places, max_keys,
    num_sms, state_cost, reading, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr,
    SLOTS: tl.constexpr, CANDIDATES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    # The last blocks of a sequence see more keys.
    index = tl.arange(0, SLOTS)
    slot = SLOTS - 1 - index
    seq_len, token, tokens, position, seq = look_up(slot, query_start_loc, seq_lens, num_seqs, rounds, BLOCK_Q)
    live = (seq_len >= 0) & (slot < slots)
    keys = tl.minimum(seq_len, max_keys)
    low, high = _span(position, tokens, keys, MASK, BLOCK_N)
    low, high = tl.where(live, low, 0), tl.where(live, high, 1)
    same = seq_len[None, :] == seq_len[:, None]
    before = (seq_len[None, :] > seq_len[:, None]) | (same & (index[None, :] < index[:, None]))
    before &= live[None, :]
    nth = tl.sum(before.to(tl.int32), 1)
    last = live & (position + tokens == seq_len)
    step, kept = _best_cut(
        low, high, live, last, nth, kv_heads, heads, num_sms, entries, places, state_cost, reading, CANDIDATES
    )

    step = tl.where(nth < kept, tl.max(high, 0), step)
    first, parts, full = _parts(low, high, step)
    parts = tl.where(live, parts, 0)
    full = tl.where(live, tl.where(nth < kept, 1, full), 0)
    states = tl.where(parts > 1, parts, 0)
    origin = tl.sum(tl.where(before, states[None, :], 0), 1)
    at_full = tl.sum(tl.where(before, full[None, :], 0), 1)
    at_rest = tl.sum(full, 0) + tl.sum(tl.where(before, (parts - full)[None, :], 0), 1)
    # The blocks to add up, in places of entries that have other fields.
    cut = parts > 1
    reduced = items + (2 + tl.sum(tl.where(before, cut[None, :].to(tl.int32), 0), 1)) * FIELDS
    tl.store(reduced + 10, token, mask=cut)
    tl.store(reduced + 11, tokens, mask=cut)
    tl.store(reduced + 12, parts, mask=cut)
    tl.store(reduced + 13, origin, mask=cut)
    for part in range(tl.max(parts, 0)):
        begin = tl.maximum(low, (first + part) * step)
        end = tl.minimum(high, (first + part + 1) * step)
        in_front = (end - begin == step) | (nth < kept)
        listed = part < parts
        entry = items + (2 + tl.where(in_front, at_full, at_rest)) * FIELDS
        tl.store(entry, token, mask=listed)
        tl.store(entry + 1, tokens, mask=listed)
        tl.store(entry + 2, position, mask=listed)
        tl.store(entry + 3, keys, mask=listed)
        tl.store(entry + 4, seq, mask=listed)
        tl.store(entry + 5, begin, mask=listed)
        tl.store(entry + 6, end, mask=listed)
        tl.store(entry + 7, part, mask=listed)
        tl.store(entry + 8, parts, mask=listed)
        tl.store(entry + 9, origin, mask=listed)
        at_full += tl.where(in_front, 1, 0)
        at_rest += tl.where(in_front, 0, 1)
    tl.store(items, 0)
    tl.store(items + 1, 0)
    tl.store(items + FIELDS, tl.sum(parts, 0))
    tl.store(items + FIELDS + 1, tl.sum(cut.to(tl.int32), 0))


_launch = Launcher(_part_list_kernel)


def launch(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, items: torch.Tensor, params: TileSchedulerParams
) -> None:
    """Fill `items` [2 + entries, 16] int32 for sequences [B] whose query blocks take at most `entries` less those for
    splits."""
    num_seqs, entries, heads = len(seq_lens), len(items) - 2, params.heads
    slots = entries - params.max_partials // heads
    counts = (num_seqs, num_seqs.bit_length() + 1, slots, entries, params.num_kv_heads, heads, params.max_partials)
    arguments = (query_start_loc, seq_lens, items, *counts, params.max_keys, params.num_sms, *_costs(params))
    # Few kernels to compile, of as little code as there can be: it is read from memory and runs once.
    size, warps = next(sizes for sizes in _SIZES if slots <= sizes[0])
    constants = {
        "BLOCK_Q": tokens_per_tile(params.pack),
        "BLOCK_N": keys_per_tile(params.head_dim, params.head_dim_v),
        "MASK": params.mask,
        "SLOTS": size,
        "CANDIDATES": _CANDIDATES,
        "FIELDS": items.shape[1],
    }
    with on_device(items):
        _launch((1,), arguments, constants, num_warps=warps)


def _costs(params: TileSchedulerParams) -> tuple[float, float]:
    """What writing and reading the state of a split takes, in tiles, 0.006 of 64 rows of 128 outputs, and what it
    takes all SMs to read a tile each, of whose rows half may be nobody's."""
    halves = halves_per_tile(params.pack, params.max_query_len)
    state = 0.006 * halves * partial_size(params.head_dim_v or params.head_dim) / partial_size(128)
    return state, 2.1 if halves == 1 else 1.5
