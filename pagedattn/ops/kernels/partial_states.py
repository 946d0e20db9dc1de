"""Triton: partial states of an item that several programs share, exchanged through the workspace while a kernel runs.

A state is a running maximum, a running sum and an unnormalised output, of ROWS rows. Whichever program arrives last
adds all of them up, in their order, so that the result's bits do not depend on who that was. Nobody waits for anybody:
the programs of a launch need not run at the same time.

Workspace, int32: two counters per program for groups of programs, one for groups of groups, all zero between launches;
then two states per program, floats by their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import COUNTERS
from .attention import LOG2E, _unit

_PLACES = tl.constexpr(COUNTERS)


@triton.constexpr_function
def _at_once(elements):
    """Partial states whose loads are in flight together: what 32 registers a thread hold. With 64, ptxas spilled inside
    the loop over keys."""
    return max(1, min(16, 4096 // elements))


@triton.constexpr_function
def _header(rows):
    """Elements before a state's output: maxima and sums, and what aligns the output to 16 bytes."""
    return max(2 * rows, 4)


@triton.jit
def _state_at(states, part, program, first, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Where a program's state of an item is that starts in program `first`. It has two places, since it may end in the
    middle of one item and have started in the middle of another."""
    place = 2 * (program * PARTS + part) + tl.where(program == first, 1, 0)
    return states + place.to(tl.int64) * (_header(ROWS) + ROWS * BLOCK_DV)


@triton.jit
def _publish(state, acc, m_i, l_i, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write a state of BLOCK_M rows, of which ROWS are in use, for another program to read."""
    row = tl.arange(0, BLOCK_M)
    kept = row < ROWS
    tl.store(state + row, m_i.to(tl.int32, bitcast=True), mask=kept)
    tl.store(state + ROWS + row, l_i.to(tl.int32, bitcast=True), mask=kept)
    place = row[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    tl.store(state + _header(ROWS) + place, acc.to(tl.int32, bitcast=True), mask=kept[:, None])


@triton.jit
def _is_last(counter, arrivals):
    """Count this program's arrival; the last one leaves the counter as it was found."""
    tl.debug_barrier()  # every thread's stores before the count that publishes them
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _union(
    states, part, first, start, stride, count,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of `count` programs' partial states together, from program `start` on, every `stride`.

    A thread adds up the same elements of all states, so that nothing but their loads takes time."""
    POST: tl.constexpr = LOG2E / _unit(PRECISION)
    MANY: tl.constexpr = _at_once(ROWS * BLOCK_DV)
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for done in range(0, count, MANY):
        for i in tl.static_range(MANY):
            live = done + i < count
            state = _state_at(states, part, start + (done + i) * stride, first, PARTS, ROWS, BLOCK_DV)
            m = tl.load(state + row, mask=live, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
            l_s = tl.load(state + ROWS + row, mask=live, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
            a = tl.load(state + _header(ROWS) + place, mask=live, other=0, cache_modifier=".cg")
            m_new = tl.maximum(m_i, tl.where(live, m, -float("inf")))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            weight = tl.where(live, tl.exp2((m - shift) * POST), 0.0)
            alpha = tl.exp2((m_i - shift) * POST)
            l_i = l_i * alpha + l_s * weight
            acc = acc * alpha[:, None] + a.to(tl.float32, bitcast=True) * weight[:, None]
            m_i = m_new
    return acc, m_i, l_i


@triton.jit
def combine(
    acc, m_i, l_i, workspace, part, program, first, last,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, FAN_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Publish this program's part of an item that programs first..last share. Whether it is the one that has all of
    them, and their union if so, [ROWS].

    More than FAN_IN programs are added up in groups first: one program alone would take long over so much data.
    """
    states = workspace + 3 * _PLACES
    parts = last + 1 - first
    size = tl.cdiv(parts, tl.cdiv(parts, FAN_IN))  # groups of about as many each
    group = (program - first) // size
    head = first + group * size
    groups = tl.cdiv(parts, size)
    head_state = _state_at(states, part, head, first, PARTS, ROWS, BLOCK_DV)
    mine = _state_at(states, part, program, first, PARTS, ROWS, BLOCK_DV)
    _publish(mine, acc, m_i, l_i, BLOCK_M, ROWS, BLOCK_DV)
    members = tl.minimum(size, last + 1 - head)
    complete = _is_last(workspace + 2 * (head * PARTS + part) + tl.where(group == 0, 1, 0), members)
    all_acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    all_m = tl.zeros([ROWS], tl.float32)
    all_l = tl.zeros([ROWS], tl.float32)
    if complete:
        all_acc, all_m, all_l = _union(states, part, first, head, 1, members, PARTS, ROWS, BLOCK_DV, PRECISION)
        if groups > 1:
            tl.debug_barrier()  # every thread has read the head's state before it is replaced
            _publish(head_state, all_acc, all_m, all_l, ROWS, ROWS, BLOCK_DV)
            complete = _is_last(workspace + 2 * _PLACES + first * PARTS + part, groups)
            if complete:
                all_acc, all_m, all_l = _union(
                    states, part, first, first, size, groups, PARTS, ROWS, BLOCK_DV, PRECISION
                )
    return complete, all_acc, all_m, all_l
