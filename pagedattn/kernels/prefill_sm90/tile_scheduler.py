"""Triton: the list of a step's prefill work items, made once per step for all layers.

Sequences of more keys come first, and of each its last rows: the GPU is left with short items at the end, and what runs
at one time reads the same keys, so that the L2 serves them. Items of one token, which wait for memory, take turns with
the others, which compute: both run at the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from .plan import FIELDS

_CHUNK = 128
_SEQS = 64


@triton.jit
def look_up(
    slot,
    query_start_loc,
    seq_lens,
    num_seqs,
    steps,
    BLOCK_Q: tl.constexpr,
):
    """Slots number the query blocks of all sequences, with gaps: sequence b's start at start_b // BLOCK_Q + b."""
    origin = tl.load(query_start_loc)
    low = tl.zeros_like(slot)
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high) // 2
        inside = low < high
        first = (tl.load(query_start_loc + middle, mask=inside, other=0) - origin) // BLOCK_Q + middle
        right = inside & (first <= slot)
        high = tl.where(inside & (first > slot), middle, high)
        low = tl.where(right, middle + 1, low)
    seq = tl.maximum(low - 1, 0)
    start = tl.load(query_start_loc + seq)
    q_len = tl.load(query_start_loc + seq + 1) - start
    seq_len = tl.load(seq_lens + seq)
    done = (slot - (start - origin) // BLOCK_Q - seq) * BLOCK_Q
    tokens = tl.minimum(q_len - done, BLOCK_Q)
    position = seq_len - q_len + done
    return tl.where(tokens > 0, seq_len, -1), start + done, tokens, position, seq


@triton.jit(
    do_not_specialize=["num_seqs", "steps", "slots"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def _work_list_kernel(
    query_start_loc, seq_lens, items, num_seqs, steps, slots, BLOCK_Q: tl.constexpr, CHUNK: tl.constexpr,
    SEQS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Each program ranks CHUNK slots, by what SEQS sequences at a time have before them, and writes them to their
    ranks."""
    mine = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    keys, token, tokens, position, seq = look_up(mine, query_start_loc, seq_lens, num_seqs, steps, BLOCK_Q)
    light = tokens == 1
    nth = (token - tl.load(query_start_loc + seq)) // BLOCK_Q  # of its sequence's blocks
    rank = tl.zeros([CHUNK], tl.int32)  # among the items of its kind
    count = 0
    count_light = 0
    for first in range(0, num_seqs, SEQS):
        other = first + tl.arange(0, SEQS)
        live = other < num_seqs
        start = tl.load(query_start_loc + other, mask=live, other=0)
        q_len = tl.load(query_start_loc + other + 1, mask=live, other=0) - start
        theirs = tl.load(seq_lens + other, mask=live, other=0)
        lights = (q_len % BLOCK_Q == 1).to(tl.int32)  # the last one, as two tokens fit a block
        heavies = tl.cdiv(q_len, BLOCK_Q) - lights
        count += tl.sum(lights + heavies, 0)
        count_light += tl.sum(lights, 0)
        alike = tl.where(light[:, None], lights[None, :], heavies[None, :])
        same_keys = theirs[None, :] == keys[:, None]
        before = (theirs[None, :] > keys[:, None]) | (same_keys & (other[None, :] <= seq[:, None]))
        rank += tl.sum(tl.where(before, alike, 0), 1)
    rank -= tl.where(light, 1, nth + 1)  # of its own sequence only those behind it
    if tl.program_id(0) == 0:
        tl.store(items, 0)
        tl.store(items + 1, 0)
        tl.store(items + FIELDS, count)
    # One of each kind in turn, while there are both.
    rank += tl.where(light, tl.minimum(rank + 1, count - count_light), tl.minimum(rank, count_light))
    entry = items + (2 + rank) * FIELDS
    listed = (keys >= 0) & (mine < slots)
    tl.store(entry, token, mask=listed)
    tl.store(entry + 1, tokens, mask=listed)
    tl.store(entry + 2, position, mask=listed)
    tl.store(entry + 3, keys, mask=listed)
    tl.store(entry + 4, seq, mask=listed)


_launch = Launcher(_work_list_kernel)


def launch(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, items: torch.Tensor, block_q: int) -> None:
    """Fill `items` [2 + slots, 8] int32 for sequences [B] whose query blocks take at most `slots` slots."""
    num_seqs, slots = len(seq_lens), len(items) - 2
    arguments = (query_start_loc, seq_lens, items, num_seqs, num_seqs.bit_length() + 1, slots)
    with on_device(items):
        constants = {"BLOCK_Q": block_q, "CHUNK": _CHUNK, "SEQS": _SEQS, "FIELDS": FIELDS}
        _launch((triton.cdiv(slots, _CHUNK),), arguments, constants)
