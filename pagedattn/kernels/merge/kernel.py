"""Triton: merge n attention states, one program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher


@triton.jit(do_not_specialize=["so_n", "sl_n", "num_states"])
def _merge_states_kernel(
    outputs, lses, out, lse_out, so_n, so_t, so_h, sl_n, sl_t, sl_h, s_t, s_h, num_states, H, STATES: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Weights are computed once for all states; outputs stream through one accumulator."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    state = tl.arange(0, STATES)  # [STATES]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    lse = tl.load(lses + state * sl_n + row * sl_t + head * sl_h, mask=state < num_states, other=-float("inf"))
    peak = tl.max(lse, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(lse - shift), 0)
    acc = tl.zeros([BLOCK_D], lse.dtype)
    for i in range(num_states):
        weight = tl.exp(tl.load(lses + i * sl_n + row * sl_t + head * sl_h) - shift)
        source = outputs + i * tl.cast(so_n, tl.int64) + row * so_t + head * so_h + dim
        value = tl.load(source, mask=dim < DV, other=0.0).to(lse.dtype)
        acc += tl.where(weight > 0, weight * value, 0.0)  # an empty state's output may be anything
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + row * s_t + head * s_h + dim, acc.to(out.dtype.element_ty), mask=dim < DV)
    if lse_out is not None:
        tl.store(lse_out + row * H + head, tl.where(total == 0, -float("inf"), tl.log(total) + shift))


_launch = Launcher(_merge_states_kernel)


def launch(outputs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Shapes as in `merge_attn_states`; `lse` [T, Hq] contiguous, or None where it is not wanted."""
    states, tokens, heads, dim = outputs.shape
    strides = (*outputs.stride()[:3], *lses.stride(), *out.stride()[:2])
    constants = {"STATES": triton.next_power_of_2(states), "DV": dim, "BLOCK_D": triton.next_power_of_2(dim)}
    with on_device(outputs):
        arguments = (outputs, lses, out, lse, *strides, states, heads)
        _launch((tokens, heads), arguments, constants, num_warps=1 if dim <= 128 else 4)
