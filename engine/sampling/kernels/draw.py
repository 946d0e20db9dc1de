"""Triton kernels that draw one token from each row of logits, by the row's own parameters, which lie on the device.

A greedy row costs one pass over its logits and no noise; a row that samples the whole distribution one pass too (the
argmax of logits plus Gumbel noise is a sample). Where top_k, top_p or min_p cut, `cutoff` says what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...pdl import PDLKernel, pdl_wait
from .cutoff import cutoffs, scores

_BLOCK = 2048
_PROGRAMS = 528  # four for each of 132 SMs


@triton.jit
def _next_state(state):
    """A step of splitmix64 (Steele et al. 2014)."""
    x = state + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _mixed(x):
    """A bijection of uint32, each output bit depending on each input bit. Constants: C. Wellons, hash prospector."""
    x = (x ^ (x >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x735A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    """NATIVE: by the GPU's own instruction, right to 2**-22 of x near 1, instead of twenty of them."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _gumbel(index, key, NATIVE: tl.constexpr):
    """Gumbel noise over log(2), but for a constant, of 31 bits that hash the row's key and the token id."""
    hashed = _mixed(index.to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32) ^ key)
    uniform = (hashed & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-31) + 2.0**-32
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # -log2(1 - uniform), whose relative error counts: by its series where it is small.
    series = (
        uniform * (1.0 + uniform * (0.5 + uniform * (1 / 3 + uniform * (0.25 + uniform * 0.2)))) * 1.4426950408889634
    )
    return -_log2(tl.where(uniform < 0.0625, series, -_log2(1.0 - uniform, NATIVE)), NATIVE)


@triton.jit
def _draw_kernel(
    logits,
    table,
    rows,
    lengths,
    smallest,
    best_out,
    token_out,
    stride,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): the best token of a part of the vocabulary; the first of equals."""
    pdl_wait(PDL)
    at = tl.program_id(0)
    part = tl.program_id(1)
    settings = table + tl.load(rows + at).to(tl.int64) * WORDS
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    low, high = tl.load(settings + 4).to(tl.uint32, bitcast=True), tl.load(settings + 5).to(tl.uint32, bitcast=True)
    state = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    key = (_next_state(state ^ tl.load(lengths + at).to(tl.uint64)) >> 32).to(tl.uint32)
    cutoff = tl.load(smallest + at)
    inverse = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
    row = logits + at.to(tl.int64) * stride
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    token = tl.full((BLOCK,), 0, tl.int32)
    for first in range(part * CHUNK, tl.minimum(part * CHUNK + CHUNK, VOCAB), BLOCK):
        index = first + tl.arange(0, BLOCK)  # [BLOCK] over the vocabulary
        score = scores(row, first, inverse, VOCAB, BLOCK)
        broken = score != score
        if temperature > 0:
            score = tl.where(score < cutoff, -float("inf"), score * 1.4426950408889634) + _gumbel(index, key, NATIVE)
        score = tl.where(broken, float("inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, index, token)
    top = tl.max(best)
    out = at * tl.num_programs(1) + part
    tl.store(best_out + out, top)
    tl.store(token_out + out, tl.min(tl.where(best == top, token, VOCAB)))


@triton.jit
def _choose_kernel(best, token, tokens, PARTS: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr):
    """The best of a row's parts; -1 where no score is finite, or one is NaN or infinite."""
    pdl_wait(PDL)
    at = tl.program_id(0)
    part = tl.arange(0, N)  # [N] over parts
    score = tl.load(best + at * PARTS + part, mask=part < PARTS, other=-float("inf"))
    top = tl.max(score)
    chosen = tl.min(tl.where(score == top, tl.load(token + at * PARTS + part, mask=part < PARTS, other=0), 2147483647))
    tl.store(tokens + at, tl.where(tl.abs(top) < float("inf"), chosen, -1))


_draw, _choose = map(PDLKernel, (_draw_kernel, _choose_kernel))


def draw(
    logits: torch.Tensor, params: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Draw a token from each row of logits into `tokens`; allocates what a CUDA graph can replay.

    Reads the logits once: 256 rows of 151,936 in bfloat16 are 78 MB, 18 us at 4.3 TB/s.

    Args:
        logits: [n, vocab] floats. params: [R, PARAMS] int32, as `packed_params.PARAMS` says. rows: [n], which each has.
        lengths: [n] int32, position of the token to be drawn. tokens: [n] int32, -1 where no logit is finite.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    each = triton.cdiv(blocks, max(1, min(64, _PROGRAMS // max(1, count))))
    parts = triton.cdiv(blocks, each)
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    token = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    sizes, width = {"VOCAB": vocab, "BLOCK": _BLOCK}, triton.next_power_of_2(parts)
    arguments = (logits, params, rows, lengths, cutoffs(logits, params, rows), best, token, logits.stride(0))
    constants = {"WORDS": params.shape[1], "CHUNK": each * _BLOCK, **sizes, "NATIVE": logits.is_cuda}
    _draw((count, parts), arguments, constants, num_warps=8)
    _choose((count,), (best, token, tokens), {"PARTS": parts, "N": width}, num_warps=1)
