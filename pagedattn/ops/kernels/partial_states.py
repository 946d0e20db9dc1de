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
    """Partial states that a combining program loads at once: what 32 registers a thread hold. With 64, ptxas spilled
    inside the loop over keys."""
    return max(1, min(32, 4096 // elements))


@triton.constexpr_function
def _header(rows):
    """Elements before a state's output: maxima and sums, and what aligns the output to 16 bytes."""
    return max(2 * rows, 4)


@triton.jit
def _state_at(states, program, first, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Where a program's state of an item is that starts in program `first`. It has two places, since it may end in the
    middle of one item and have started in the middle of another."""
    place = 2 * program + tl.where(program == first, 1, 0)
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
def _union(states, first, start, stride, count, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr):
    """The state of `count` programs' partial states together, from program `start` on, every `stride`."""
    POST: tl.constexpr = LOG2E / _unit(PRECISION)
    MANY: tl.constexpr = _at_once(ROWS * BLOCK_DV)
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for done in range(0, count, MANY):
        index = done + tl.arange(0, MANY)
        state = _state_at(states, start + index * stride, first, ROWS, BLOCK_DV)  # [MANY]
        live = index < count
        m = tl.load(state[:, None] + row[None, :], mask=live[:, None], other=0, cache_modifier=".cg")
        l_s = tl.load(state[:, None] + ROWS + row[None, :], mask=live[:, None], other=0, cache_modifier=".cg")
        # [MANY, ROWS, BLOCK_DV]
        a = tl.load(
            state[:, None, None] + _header(ROWS) + place[None, :, :], mask=live[:, None, None], other=0,
            cache_modifier=".cg",
        )  # fmt: skip
        m = tl.where(live[:, None], m.to(tl.float32, bitcast=True), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(m, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2((m - shift[None, :]) * POST)  # [MANY, ROWS]
        alpha = tl.exp2((m_i - shift) * POST)
        l_i = l_i * alpha + tl.sum(l_s.to(tl.float32, bitcast=True) * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(a.to(tl.float32, bitcast=True) * weight[:, :, None], 0)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def combine(
    acc, m_i, l_i, workspace, program, first, last,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, FAN_IN: tl.constexpr, PRECISION: tl.constexpr,
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
    head_state = _state_at(states, head, first, ROWS, BLOCK_DV)
    _publish(_state_at(states, program, first, ROWS, BLOCK_DV), acc, m_i, l_i, BLOCK_M, ROWS, BLOCK_DV)
    members = tl.minimum(size, last + 1 - head)
    complete = _is_last(workspace + 2 * head + tl.where(group == 0, 1, 0), members)
    all_acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    all_m = tl.zeros([ROWS], tl.float32)
    all_l = tl.zeros([ROWS], tl.float32)
    if complete:
        all_acc, all_m, all_l = _union(states, first, head, 1, members, ROWS, BLOCK_DV, PRECISION)
        if groups > 1:
            tl.debug_barrier()  # every thread has read the head's state before it is replaced
            _publish(head_state, all_acc, all_m, all_l, ROWS, ROWS, BLOCK_DV)
            complete = _is_last(workspace + 2 * _PLACES + first, groups)
            if complete:
                all_acc, all_m, all_l = _union(states, first, first, size, groups, ROWS, BLOCK_DV, PRECISION)
    return complete, all_acc, all_m, all_l
