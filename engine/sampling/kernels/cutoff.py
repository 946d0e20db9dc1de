"""Triton kernel that finds the smallest score which top_k, top_p and min_p leave of each row of logits.

By bisection of the scores' bits: no sort, exact, and the same in any batch. Bisecting a whole row takes up to 65 passes
over it, so a pass first finds a score below which the cutoff cannot be; what is above is a few thousand scores as a
rule, and these are bisected. A row is read three times: 256 rows of 151,936 in bfloat16 are 78 MB, 54 us at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...pdl import PDLKernel, pdl_wait

# The parameters are those of `packed_params.request_params`. A kernel cannot have an argument `params`: Triton's
# launcher has a local of that name.
_BLOCK = 2048
_CANDIDATES = 4096


@triton.jit
def scores(logits, first, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Logits over temperature, whose inverse this takes; -inf behind the vocabulary."""
    index = first + tl.arange(0, BLOCK)  # [BLOCK] over the vocabulary
    return tl.load(logits + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32) * inverse


@triton.jit
def _order(score):
    """float32 to an integer of the same order; both zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(order):
    """What `_order` made an integer of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_and_mean(logits, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The best score, and the mean of those that are above -inf."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    total, count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        score = scores(logits, first, inverse, VOCAB, BLOCK)
        best = tl.maximum(best, score)
        finite = score > -float("inf")
        total += tl.where(finite, score, 0.0)
        count += finite.to(tl.int32)
    return tl.max(best), tl.sum(total) / tl.maximum(tl.sum(count), 1).to(tl.float32)


@triton.jit
def _count_from(logits, inverse, order, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores are of this order or above."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        inside = first + tl.arange(0, BLOCK) < VOCAB
        above = _order(scores(logits, first, inverse, VOCAB, BLOCK)) >= order
        count += (above & inside).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _mass_above(logits, inverse, best, order, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """exp(score - best), summed over the scores above this order."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        score = scores(logits, first, inverse, VOCAB, BLOCK)
        mass += tl.where(_order(score) > order, tl.exp(score - best), 0.0)
    return tl.sum(mass)


@triton.jit
def _floor(logits, inverse, best, mean, limited, top_k, top_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A score that the cutoff is not below, how many are at least that, and exp(score - best) summed over the row.

    More than there are where no such score was found.
    """
    j = tl.arange(0, 4)
    floors = best - (best - mean) * tl.where(j == 0, 0.15, tl.where(j == 1, 0.3, tl.where(j == 2, 0.5, 0.7)))  # [4]
    count, mass = tl.zeros((4, BLOCK), tl.int32), tl.zeros((4, BLOCK), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        score = scores(logits, first, inverse, VOCAB, BLOCK)
        weight = tl.exp(score - best)
        kept = score[None, :] >= floors[:, None]
        count += kept.to(tl.int32)
        mass += tl.where(kept, weight[None, :], 0.0)
        total += weight
    counts, masses, whole = tl.sum(count, axis=1), tl.sum(mass, axis=1), tl.sum(total)  # [4], [4], all
    holds = tl.where(limited, counts >= top_k, masses >= top_p * whole)
    floor = tl.max(tl.where(holds, floors, -float("inf")))
    return floor, tl.min(tl.where(holds, counts, 2147483647)), whole


@triton.jit
def _collect(logits, inverse, floor, found, SIZE: tl.constexpr, VOCAB: tl.constexpr):
    """The scores from `floor` on to `found` [SIZE], which has room for all; -inf behind them."""
    count = 0
    for first in range(0, VOCAB, SIZE):
        score = scores(logits, first, inverse, VOCAB, SIZE)
        kept = score >= floor
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(found + place, score, mask=kept & (place < SIZE))
        count += tl.sum(kept.to(tl.int32))
    index = tl.arange(0, SIZE)
    tl.store(found + index, tl.full((SIZE,), -float("inf"), tl.float32), mask=index >= count)
    tl.debug_barrier()  # what one thread wrote, others read


@triton.jit
def _search(logits, inverse, lowest, best, whole, limited, top_k, top_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The order of the smallest score that top_k, and top_p of what it left, leave; at least `lowest`."""
    highest = _order(best)
    low = lowest
    if limited:
        high = highest
        for _ in range(32):  # the largest order that top_k scores reach
            middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without a sum that overflows
            enough = _count_from(logits, inverse, middle, VOCAB, BLOCK) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    if top_p < 1:
        mass = whole
        if limited:  # of those that tie for the last place, as many as top_k leaves room for
            ties = top_k - _count_from(logits, inverse, low + 1, VOCAB, BLOCK)
            mass = _mass_above(logits, inverse, best, low, VOCAB, BLOCK) + ties.to(tl.float32) * tl.exp(
                _score(low) - best
            )
        high = highest
        for _ in range(32):  # the smallest order above which there is less than top_p
            middle = (low & high) + ((low ^ high) >> 1)  # rounded down
            inside = _mass_above(logits, inverse, best, middle, VOCAB, BLOCK) < top_p * mass
            high = tl.where(inside, middle, high)
            low = tl.where(inside, low, middle + 1)
        low = high
    return low


@triton.jit
def _cutoff_kernel(
    logits,
    table,
    rows,
    candidates,
    cutoffs,
    stride,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r: the cutoff of row r; -inf where nothing is cut."""
    pdl_wait(PDL)
    at = tl.program_id(0)
    settings = table + tl.load(rows + at).to(tl.int64) * WORDS
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    top_p = tl.load(settings + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(settings + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(settings + 3)
    limited = (top_k > 0) & (top_k < VOCAB)
    cutoff = -float("inf")
    if (temperature > 0) & (limited | (top_p < 1) | (min_p > 0)):
        row = logits + at.to(tl.int64) * stride
        inverse = tl.div_rn(1.0, temperature)
        best, mean = _best_and_mean(row, inverse, VOCAB, BLOCK)
        if limited | (top_p < 1):
            floor, count, whole = _floor(row, inverse, best, mean, limited, top_k, top_p, VOCAB, BLOCK)
            order = _order(floor)
            if count <= SIZE:
                found = candidates + at.to(tl.int64) * SIZE
                _collect(row, inverse, floor, found, SIZE, VOCAB)
                order = _search(found, 1.0, order, best, whole, limited, top_k, top_p, SIZE, SIZE)
            else:
                order = _search(row, inverse, order, best, whole, limited, top_k, top_p, VOCAB, BLOCK)
            cutoff = _score(order)
        cutoff = tl.maximum(cutoff, tl.where(min_p > 0, best + tl.log(tl.maximum(min_p, 1e-30)), cutoff))
    tl.store(cutoffs + at, cutoff)


_cutoff = PDLKernel(_cutoff_kernel)


def cutoffs(logits: torch.Tensor, params: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of each row of logits [n, vocab] over its temperature, the smallest score that may be drawn: [n] float32.

    Args:
        params: [R, PARAMS] int32, as `packed_params.PARAMS` says. rows: [n], which of them each row of logits has.
    """
    count, vocab = logits.shape
    found = torch.empty(count, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(count, _CANDIDATES, dtype=torch.float32, device=logits.device)
    arguments = (logits, params, rows, candidates, found, logits.stride(0))
    constants = {"WORDS": params.shape[1], "SIZE": _CANDIDATES, "VOCAB": vocab, "BLOCK": _BLOCK}
    _cutoff((count,), arguments, constants, num_warps=8)
    return found
