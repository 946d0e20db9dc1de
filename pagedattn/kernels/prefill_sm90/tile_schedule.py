"""The list of a step's work items for the prefill kernel for Hopper: query blocks, or parts of their keys where there
are too few of those for all SMs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime.op_registry import expect, load
from ...runtime.target import target_of
from ...runtime.workspace import COUNTERS
from ..inputs import AttentionInputs
from ..tiles import LONG_KEYS, reach

ITEM_ROWS = 128  # packed query rows of an item
FIELDS = 8  # int32 per entry of a list; the first's counters hand out items, the second says how many there are
PART_FIELDS = 16  # of a list whose items may be parts
_PER_SM = 4  # items for an SM at most, of which some may be parts: of more, all SMs have about as many
_BLOCKS = 256  # query blocks at most, which one program looks at all together


class Bounds(NamedTuple):
    """What the host knows of the sequences that are listed: at most so many tokens and keys. num_decodes: how many of
    them have one token, in front of others."""

    tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int


class Listing(NamedTuple):
    """What a list depends on besides a step's lengths. max_keys: that tables have room for, 0 where unknown."""

    kv_heads: int
    group: int
    head_dim: int
    causal: bool
    window: int
    max_keys: int
    num_sms: int

    @property
    def heads(self) -> int:
        """Packs of query heads: an entry is an item of each."""
        return self.kv_heads * self.group // pack_of(self.group)

    @property
    def places(self) -> int:
        """Parts that leave a state, of all heads together, at most."""
        return min(2 * self.num_sms, 3 * COUNTERS // 4)  # each has four counters

    @property
    def workspace(self) -> int:
        """int32 elements of a workspace for those states: counters, then two halves of each."""
        return 3 * COUNTERS + 2 * self.places * state_of(self.head_dim)


def listing_of(inputs: AttentionInputs) -> Listing:
    """Of a call over a paged cache."""
    query, key, _, table = inputs[:4]
    heads = (key.shape[2], query.shape[1] // key.shape[2], query.shape[2])
    room = 0 if table is None else table.shape[1] * key.shape[1]
    return Listing(*heads, inputs.causal, inputs.window, room, target_of(query.device).num_sms)


def bounds_of(inputs: AttentionInputs) -> Bounds:
    """Of a call's sequences."""
    lens = (inputs.max_query_len, inputs.max_seq_len)
    return Bounds(len(inputs.query), len(inputs.seq_lens), inputs.num_decodes, *lens)


def pack_of(group: int) -> int:
    """Query heads of a group in one item: a power of two that divides it, 64 at most."""
    return min(group & -group, 64)


def tokens_of(group: int) -> int:
    """Query tokens of an item."""
    return ITEM_ROWS // pack_of(group)


def tile_of(head_dim: int) -> int:
    """Keys of a tile."""
    return 128 if head_dim <= 128 else 64


def state_of(head_dim: int) -> int:
    """Elements of the state of half an item: maxima, sums, outputs."""
    return ITEM_ROWS // 2 * (head_dim + 2)


def blocks_of(listing: Listing, bounds: Bounds) -> int:
    """Query blocks at most. A query may have rows of nobody."""
    tokens = min(bounds.tokens, bounds.num_seqs * bounds.max_query_len)
    return tokens // tokens_of(listing.group) + bounds.num_seqs


def has_parts(items: torch.Tensor) -> bool:
    """Whether items of a list may be parts."""
    return items.shape[1] == PART_FIELDS


def in_parts(listing: Listing, bounds: Bounds) -> bool:
    """Whether items may be parts of query blocks: where the blocks are so few that SMs would be idle, and their keys so
    many that it matters. Which are, the device decides. Decodes among prompts take turns with those instead."""
    if not listing.max_keys or bounds.num_decodes:
        return False
    keys = reach(listing.window, bounds.max_query_len, bounds.max_seq_len)
    few = blocks_of(listing, bounds) <= min(_BLOCKS, _PER_SM * listing.num_sms // listing.heads)
    return few and keys >= max(LONG_KEYS, 4 * bounds.max_query_len)


def new_items(listing: Listing, bounds: Bounds, device: torch.device) -> torch.Tensor:
    """Room for a list, int32 [2 + items at most, FIELDS or PART_FIELDS]: counters, number, items."""
    entries, fields = 2 + blocks_of(listing, bounds), FIELDS
    if in_parts(listing, bounds):
        entries, fields = entries + listing.places // listing.heads, PART_FIELDS
    return torch.empty(entries, fields, dtype=torch.int32, device=device)


def list_items(listing: Listing, items: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Fill `items` for sequences [B] on the device; no length is read by the host."""
    if has_parts(items):
        load("kernels.prefill_sm90.split_kv_scheduler").launch(query_start_loc, seq_lens, items, listing)
    else:
        load("kernels.prefill_sm90.tile_scheduler").launch(query_start_loc, seq_lens, items, tokens_of(listing.group))


def items_of(inputs: AttentionInputs, given: torch.Tensor | None) -> torch.Tensor:
    """The list that a step's metadata bring, or one for this call."""
    query = inputs.query
    if given is not None:
        fits = given.dtype == torch.int32 and given.is_contiguous() and given.dim() == 2
        fits = fits and given.shape[1] in (FIELDS, PART_FIELDS) and given.device == query.device
        expect(fits, "items", f"int32 [n, {FIELDS} or {PART_FIELDS}] of tile_schedule.new_items", given)
        return given
    listing = listing_of(inputs)
    items = new_items(listing, bounds_of(inputs), query.device)
    list_items(listing, items, inputs.query_start_loc, inputs.seq_lens)
    return items
