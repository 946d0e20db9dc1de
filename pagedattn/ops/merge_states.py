"""merge_attn_states: combine attention over disjoint sets of keys, exactly, by their log-sum-exps."""

from __future__ import annotations

import torch

from ..runtime.op_registry import choose, expect, load, register


def merge_attn_states(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    path: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of n disjoint sets of keys. Source: FlashAttention 2, section 3.1.1 (online softmax).

    A state with LSE -inf is empty and weighs nothing, whatever its output holds. All states empty gives the empty
    state: output 0, LSE -inf.

    Args:
        outputs: [n, T, Hq, Dv], last dimension contiguous, other strides free.
        lses: [n, T, Hq] float32, natural log, strides free.
        out: [T, Hq, Dv] to write to, last dimension contiguous; `dtype` (default: outputs') says which type to make
            where None.

    Returns:
        output [T, Hq, Dv] and LSE [T, Hq] float32.

    Raises:
        InvalidInputError: shapes, strides or devices that do not fit each other, LSE not float32.
    """
    expect(outputs.dim() == 4 and outputs.stride(3) == 1, "outputs", "[n, T, Hq, Dv], last stride 1", outputs)
    fits = lses.dtype == torch.float32 and lses.shape == outputs.shape[:3]
    fits = fits or (lses.dtype == outputs.dtype == torch.float64 and lses.shape == outputs.shape[:3])
    expect(fits, "lses", f"float32 {list(outputs.shape[:3])}", lses)
    merged = torch.empty(outputs.shape[1:], dtype=dtype or outputs.dtype, device=outputs.device) if out is None else out
    fits = merged.shape == outputs.shape[1:] and (merged.stride(2) == 1 or merged.shape[2] < 2)
    expect(fits, "out", f"{list(outputs.shape[1:])}, last stride 1", merged)
    for name, tensor in (("lses", lses), ("out", merged)):
        expect(tensor.device == outputs.device, name, f"on {outputs.device} as the outputs", tensor)
    lse = torch.empty(lses.shape[1:], dtype=lses.dtype, device=lses.device)
    _op(outputs, lses, merged, lse, path)
    return merged, lse


def _run(outputs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, path: str) -> None:
    if out.numel() == 0:
        return
    if choose(path, outputs.device, "merge_attn_states") == "triton":
        load("kernels.merge.kernel").launch(outputs, lses, out, lse)
        return
    peak = lses.amax(0)
    weight = (lses - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
    total = weight.sum(0)
    share = weight / total.masked_fill(total == 0, 1.0)
    kept = torch.where((weight > 0)[..., None], outputs, 0)
    out.copy_((kept.to(share.dtype) * share[..., None]).sum(0))
    lse.copy_(total.log() + peak.masked_fill(peak == -torch.inf, 0.0))


def _fake(outputs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, path: str) -> None:
    return None


_op = register(
    "merge_attn_states(Tensor outputs, Tensor lses, Tensor(a!) out, Tensor(b!) lse, str path) -> ()", _run, _fake
)
