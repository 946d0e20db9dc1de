"""Triton: partial states of an item that several programs share, exchanged through the workspace while a kernel runs.

A state is a running maximum, a running sum and an unnormalised output, of ROWS rows. Whichever program arrives last
adds all of them up, in their order, so that the result's bits do not depend on which that was. No program waits for
another: the programs of a launch need not run at the same time.

Workspace, int32: two counters per program for groups of programs, one for groups of groups, all zero between launches;
then two states per program, floats by their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.workspace import COUNTERS
from ..softmax import LOG2E, log_base

_PLACES = tl.constexpr(COUNTERS)


@triton.constexpr_function
def _header(rows):
    """Elements before a state's output: maxima and sums, and what aligns the output to 16 bytes."""
    return max(2 * rows, 4)


@triton.jit
def _state_at(states, part, program, begins, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Where a program's state of an item is; `begins`: whether the item starts in that program. It has two places,
    since it may end in the middle of one item and have started in the middle of another."""
    place = 2 * (program * PARTS + part) + tl.where(begins, 1, 0)
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
def _reduce_splits(
    states, part, start, begins, count, STRIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr, REDUCTION_UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of `count` programs' partial states together, from program `start` on, every STRIDE; `begins`: whether
    the item starts in the first of them.

    The outputs of REDUCTION_UNROLL states are in flight while their weights are found. Those pass through shared memory
    on their way to the threads, which keeps ptxas from moving loads behind what waits for the first of them; the
    outputs do not, for a thread has the same elements of all states.
    """
    POST: tl.constexpr = LOG2E / log_base(PRECISION)
    SIZE: tl.constexpr = _header(ROWS) + ROWS * BLOCK_DV
    MINUS_INF: tl.constexpr = -(1 << 23)  # its bits
    nth = tl.arange(0, REDUCTION_UNROLL)
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for done in range(0, count, REDUCTION_UNROLL):
        state = _state_at(states, part, start + done * STRIDE, False, PARTS, ROWS, BLOCK_DV)
        state += nth * (STRIDE * 2 * PARTS * SIZE) + tl.where(begins & (done + nth == 0), SIZE, 0)
        live = (done + nth < count)[None, :]
        head = state[None, :] + row[:, None]  # [ROWS, REDUCTION_UNROLL]
        m = tl.load(head, mask=live, other=MINUS_INF, cache_modifier=".cg").to(tl.float32, bitcast=True)
        l_s = tl.load(head + ROWS, mask=live, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
        # [ROWS, REDUCTION_UNROLL, BLOCK_DV], in this order of dimensions: that gives warps rows of their own.
        outputs = state[None, :, None] + (_header(ROWS) + place)[:, None, :]
        a = tl.load(outputs, mask=live[:, :, None], other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
        m_new = tl.maximum(m_i, tl.max(m, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2((m - shift[:, None]) * POST)
        alpha = tl.exp2((m_i - shift) * POST)
        l_i = l_i * alpha + tl.sum(l_s * weight, 1)
        acc = acc * alpha[:, None] + tl.sum(a * weight[:, :, None], 1)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def publish_and_reduce(
    acc, m_i, l_i, workspace, part, program, begins, first, last,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, FAN_IN: tl.constexpr,
    REDUCTION_UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Publish this program's part of an item that programs first..last share, and that `begins` in this one or not.
    Whether it is the one that has all of them, and their union if so, [ROWS].

    More than FAN_IN programs are added up in groups first: one program alone would take long over so much data.
    """
    states = workspace + 3 * _PLACES
    mine = _state_at(states, part, program, begins, PARTS, ROWS, BLOCK_DV)
    _publish(mine, acc, m_i, l_i, BLOCK_M, ROWS, BLOCK_DV)
    group = (program - first) // FAN_IN
    groups = (last - first) // FAN_IN + 1
    head = first + group * FAN_IN
    members = tl.minimum(FAN_IN, last + 1 - head)
    complete = _is_last(workspace + 2 * (head * PARTS + part) + tl.where(group == 0, 1, 0), members)
    all_acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    all_m = tl.zeros([ROWS], tl.float32)
    all_l = tl.zeros([ROWS], tl.float32)
    if complete:
        all_acc, all_m, all_l = _reduce_splits(
            states, part, head, group == 0, members, 1, PARTS, ROWS, BLOCK_DV, REDUCTION_UNROLL, PRECISION
        )
        if groups > 1:
            tl.debug_barrier()  # every thread has read the head's state before it is replaced
            head_state = _state_at(states, part, head, group == 0, PARTS, ROWS, BLOCK_DV)
            _publish(head_state, all_acc, all_m, all_l, ROWS, ROWS, BLOCK_DV)
            complete = _is_last(workspace + 2 * _PLACES + first * PARTS + part, groups)
            if complete:
                all_acc, all_m, all_l = _reduce_splits(
                    states, part, first, True, groups, FAN_IN, PARTS, ROWS, BLOCK_DV, REDUCTION_UNROLL, PRECISION
                )
    return complete, all_acc, all_m, all_l
