"""Which kernel serves which sequences of a step: the one place that chooses among kernel families."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..kernels.decode.plan import DECODE_ROWS
from ..kernels.prefill_sm90.tile_schedule import ITEM_ROWS, Bounds, Listing, in_parts, pack_of
from ..kernels.tiles import LONG_KEYS, reach

DECODE_TOKENS = 16  # sequences of at most so many new tokens are decodes
_SHORT = 1024  # keys of a decode that may be one item in any step
_KEYS_PER_SM_ITEM = 2048  # of longer ones, for each that an SM has


class Work(NamedTuple):
    """Sequences first..last of a batch, of at most `longest` new tokens each, for one launch of a kernel."""

    kernel: Literal["decode", "prefill"]
    first: int
    last: int
    longest: int


def launches(
    num_seqs: int,
    num_decodes: int,
    max_query_len: int,
    *,
    paged: bool,
    deterministic: bool,
    joined: bool = False,
    keys_shared_out: bool = False,
) -> list[Work]:
    """The launches that serve a batch: decodes and the rest want other tiles, but where they are `joined`.
    keys_shared_out: the rest goes to the decode kernel too."""
    if deterministic or not paged or joined:
        planned = [Work("prefill", 0, num_seqs, max_query_len)]
    elif max_query_len <= DECODE_TOKENS:
        planned = [Work("decode", 0, num_seqs, max_query_len)]
    else:
        rest = "decode" if keys_shared_out else "prefill"
        planned = [Work("decode", 0, num_decodes, 1), Work(rest, num_decodes, num_seqs, max_query_len)]
    return [one for one in planned if one.longest and one.last > one.first]


def shares_keys_out(num_seqs: int, kv_heads: int, group: int, max_query_len: int, keys: int, num_sms: int) -> bool:
    """Whether the decode kernel is to serve prompts where only the portable one could: where their query blocks are
    fewer than SMs, and see many keys."""
    blocks = num_seqs * kv_heads * -(-max_query_len * group // DECODE_ROWS)
    return blocks <= num_sms and keys >= max(LONG_KEYS, 4 * max_query_len)


def choices(listing: Listing, bounds: Bounds, served: bool) -> dict[str, bool]:
    """How `launches` is to plan a step of several tokens, whose prompts this kernel serves or not; for the op and for
    metadata, which must decide alike."""
    if served:
        return {"joined": takes_all(listing, bounds)}
    rest, keys = bounds.num_seqs - bounds.num_decodes, reach(listing.window, bounds.max_query_len, bounds.max_seq_len)
    facts = (listing.kv_heads, listing.group, bounds.max_query_len, keys, listing.num_sms)
    return {"keys_shared_out": shares_keys_out(rest, *facts)}


def takes_all(listing: Listing, bounds: Bounds) -> bool:
    """Whether this kernel, where it can, serves a whole step, decodes included."""
    return joins(listing, bounds) if bounds.max_query_len > DECODE_TOKENS else takes(listing, bounds)


def joins(listing: Listing, bounds: Bounds) -> bool:
    """Whether the decodes of a step that also has prompts are items among theirs: decodes wait for memory while prompts
    compute. Not where so few are so long that some SMs would be left with one while others are done: a launch of their
    own shares their keys out. Nor for heads that do not fit one item, which would read their keys several times."""
    room = max(_SHORT, _KEYS_PER_SM_ITEM * bounds.num_decodes * listing.kv_heads // listing.num_sms)
    return bounds.num_decodes > 0 and pack_of(listing.group) == listing.group and bounds.max_seq_len <= room


def takes(listing: Listing, bounds: Bounds) -> bool:
    """Whether sequences of a few new tokens each are items of this kernel, not of the one for decodes: where their rows
    fill half of what an item's product computes, and either keys are shared out, or no SM is left with much longer
    ones than others."""
    group, items = listing.group, bounds.num_seqs * listing.kv_heads
    several = bounds.max_query_len > 1 and bounds.max_query_len * group >= ITEM_ROWS // 4 and pack_of(group) == group
    even = items >= listing.num_sms and bounds.max_seq_len <= _KEYS_PER_SM_ITEM * items // listing.num_sms
    # As many tokens as there can be: how many rows a query has must not decide.
    most = bounds._replace(tokens=bounds.num_seqs * bounds.max_query_len)
    return several and (even or in_parts(listing, most))
