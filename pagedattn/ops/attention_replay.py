"""AttentionReplay: an attention call made again by a step's other layers, without a look at their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels.inputs import AttentionInputs
from ..runtime.op_registry import load
from .write_replay import scale_values

if TYPE_CHECKING:
    from ..runtime.launcher import Launch


class AttentionReplay:
    """Attention over other queries and another cache, laid out as those of the call that was recorded."""

    __slots__ = ("_replay", "_scale")

    def __init__(self, launches: Sequence[Launch], scale: float) -> None:
        self._replay = load("runtime.launcher").Replay(launches)
        self._scale = scale  # without a host float of k_scale

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> bool:
        """Attend into `out` without an LSE; False, with nothing done, where these are not aligned as the others."""
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        addresses = q | k | v | o
        if sinks is None and alibi_slopes is None and k_scale is None and v_scale is None:
            return self._replay(addresses, (q, k, v, o, None, None, None, None, None, self._scale, 1.0))
        sink, slope = (0 if x is None else x.data_ptr() for x in (sinks, alibi_slopes))
        (k_address, k_number), (v_address, v_number) = scale_values(k_scale), scale_values(v_scale)
        addresses |= sink | slope | k_address | v_address
        values = (q, k, v, o, None, sink, slope, k_address, v_address, self._scale * k_number, v_number)
        return self._replay(addresses, values)


def attention_replay(
    launches: Sequence[Launch | None] | None, inputs: AttentionInputs, scale: float
) -> list[AttentionReplay]:
    """How to make a call again that made these launches; empty where one of them cannot be, or where there are none.

    Packed keys are not replayed: where each sequence's start depends on the lengths' contents.
    """
    if not launches or inputs.block_table is None or inputs.lse is not None:
        return []
    made = [launch for launch in launches if launch is not None and launch.repeatable()]
    return [AttentionReplay(made, scale)] if len(made) == len(launches) else []
