"""Triton: adds up the partial states of query blocks whose keys were split, as `split_kv` leaves them.

A work unit is 8 rows of a consumer's 64 and 64 columns of their outputs, of all splits of a block: some of them at a
time and in their order, so that the result's bits do not depend on which was done first. A thread has four outputs, and
by itself its row's maximum and sum: nothing passes between threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.target import pdl_option, target_of
from ...runtime.workspace import COUNTERS as _COUNTERS
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from ..softmax import LN2
from .plan import SPLIT_FIELDS, halves_per_tile, head_parts, value_width
from .tile_rows import head_of, token_of

COUNTERS = tl.constexpr(_COUNTERS)
_COLUMNS = 64  # of a work unit
_FEW, _MANY = 4, 16  # splits that are loaded at once, of no more than so many and of more
_PROGRAMS_PER_SM = 4


@triton.jit
def _bits(place, live):
    """What `split_kv.publish` stored as bits, 0 of no state."""
    return tl.load(place, mask=live, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)


@triton.jit
def _sum_states(state, row, at, parts, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Maxima, sums and outputs of the union of `parts` states, every STRIDE from `state` on, of rows `row` whose
    outputs are `at` places behind."""
    m_i = tl.full([128], -float("inf"), tl.float32)
    l_i = tl.zeros([128], tl.float32)
    acc = tl.zeros([128, 4], tl.float32)
    for done in range(0, parts, AT_ONCE):
        ms, sums, outputs = (), (), ()
        for i in tl.static_range(AT_ONCE):
            live = done + i < parts
            one = state + tl.where(live, done + i, 0) * STRIDE
            ms = ms + (tl.where(live, _bits(one + row, live), -float("inf")),)  # noqa: RUF005 - no stars in a kernel
            sums = sums + (_bits(one + 64 + row, live),)  # noqa: RUF005
            outputs = outputs + (_bits((one + at)[:, None] + tl.arange(0, 4)[None, :], live),)  # noqa: RUF005
        # By the maximum of all of them: what depends on the last load is not moved in between, where it would wait for
        # each by itself.
        top = m_i
        for i in tl.static_range(AT_ONCE):
            top = tl.maximum(top, ms[i])
        shift = tl.where(top == -float("inf"), 0.0, top)
        before = tl.exp2(m_i - shift)
        l_i, acc, m_i = l_i * before, acc * before[:, None], top
        for i in tl.static_range(AT_ONCE):
            weight = tl.exp2(ms[i] - shift)
            l_i += sums[i] * weight
            acc += outputs[i] * weight[:, None]
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["heads"])
def _reduce_splits_kernel(
    entries, workspace, out, lse_out, v_scale, heads, out_scale, so_t, so_h, sl_t, s_vscale,
    FIELDS: tl.constexpr, HALVES: tl.constexpr, PACK: tl.constexpr, HEADS: tl.constexpr, PACKS: tl.constexpr,
    WIDTH: tl.constexpr, DIM_V: tl.constexpr, SECTIONS: tl.constexpr, FEW: tl.constexpr,
    MANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    SIZE: tl.constexpr = 64 * (WIDTH + 2)  # of a state
    UNITS: tl.constexpr = SECTIONS * 8 * HALVES  # of a head of a block
    thread = tl.arange(0, 128)
    blocks = tl.load(entries + FIELDS + 1)
    for unit in range(tl.program_id(0), blocks * heads * UNITS, tl.num_programs(0)):
        section = unit % SECTIONS
        eight = unit // SECTIONS % 8
        half = unit // (SECTIONS * 8) % HALVES
        head = unit // UNITS % heads
        entry = entries + (2 + unit // UNITS // heads) * FIELDS + 10
        token = tl.load(entry)
        tokens = tl.load(entry + 1)
        parts = tl.load(entry + 2)
        state = workspace + 3 * COUNTERS + ((tl.load(entry + 3) * heads + head * parts) * 2 + half) * SIZE
        begin = eight % 4 * 16 + eight // 4 * 8
        row = begin + thread // 2 % 8
        packed = half * 64 + row
        exists = (token_of(packed, PACK) < tokens) & (head_of(packed, PACK) < HEADS)
        # Maxima and sums of 64 rows, then 8 outputs of all rows, and the next 8.
        chunk = tl.minimum(section * 8 + thread // 16, WIDTH // 8 - 1)
        at = 128 + chunk * 512 + eight * 64 + thread % 16 * 4
        # None of rows that are nobody's: nothing was left for them.
        parts = tl.where(token_of(half * 64 + begin, PACK) < tokens, parts, 0)
        if parts <= FEW:
            m_i, l_i, acc = _sum_states(state, row, at, parts, 2 * SIZE, FEW)
        else:
            m_i, l_i, acc = _sum_states(state, row, at, parts, 2 * SIZE, MANY)
        at_token = (token + token_of(packed, PACK)).to(tl.int64)
        at_head = head * HEADS + head_of(packed, PACK)
        if lse_out is not None:
            lse = tl.where(l_i == 0, -float("inf"), (m_i + tl.log2(l_i)) * LN2)
            tl.store(
                lse_out + at_token * sl_t + at_head,
                lse,
                mask=exists & (section == 0) & (thread < 16) & (thread % 2 == 0),
            )
        factor = out_scale
        if v_scale is not None:
            factor = factor * tl.load(v_scale + head // PACKS * s_vscale)
        acc = acc * (factor / tl.where(l_i == 0, 1.0, l_i))[:, None]
        dim = section * 64 + thread // 16 * 8 + thread % 2 * 4
        target = (out + at_token * so_t + at_head * so_h + dim)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=(exists & (dim < DIM_V))[:, None])


_launch = Launcher(_reduce_splits_kernel, VARYING)


def constants_of(*, group: int, pack: int, dim_v: int, width: int, halves: int) -> dict[str, Any]:
    """What the kernel is compiled for, but for PDL. width: of the outputs that a state has. halves: of a tile, of 64
    rows each, that have any."""
    return {
        "FIELDS": SPLIT_FIELDS,
        "HALVES": halves,
        "PACK": pack,
        "HEADS": min(pack, group),
        "PACKS": -(-group // pack),
        "WIDTH": width,
        "DIM_V": dim_v,
        "SECTIONS": -(-dim_v // _COLUMNS),
        "FEW": _FEW,
        "MANY": _MANY,
    }


def launch(inputs: AttentionInputs, entries: torch.Tensor, pack: int, workspace: torch.Tensor) -> None:
    """Outputs and `lse` of the blocks of a schedule whose keys were split, behind the launch that left their states in
    the workspace."""
    out, lse, kv_heads, target = inputs.out, inputs.lse, inputs.key.shape[-2], target_of(inputs.out.device)
    constants = constants_of(
        group=inputs.query.shape[1] // kv_heads,
        pack=pack,
        dim_v=out.shape[2],
        width=sum(head_parts(value_width(inputs))),
        halves=halves_per_tile(pack, inputs.max_query_len),
    )
    heads = kv_heads * constants["PACKS"]
    units = (len(entries) - 2) * heads * constants["HALVES"] * 8 * constants["SECTIONS"]
    arguments = (
        *(entries, workspace, out, lse, inputs.v_scale, heads, inputs.out_scale, *out.stride()[:2]),
        *(0 if lse is None else lse.stride(0), scale_stride(inputs.v_scale)),
    )
    constants, programs = constants | {"PDL": target.supports_pdl}, min(_PROGRAMS_PER_SM * target.num_sms, units)
    with on_device(out):
        kept, early = outputs_kept(inputs), pdl_option(target.supports_pdl)
        _launch((programs,), arguments, constants, kept, num_warps=4, **early)
