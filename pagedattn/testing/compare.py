"""One tolerance for every attention test, derived from the dtype and from what a naive implementation reaches."""

from __future__ import annotations

import torch

_FROBENIUS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}
_LSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}


def assert_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    naive: torch.Tensor,
    *,
    softcap: bool = False,
    condition: torch.Tensor | None = None,
    fp8_queries: bool = False,
    rounded_states: bool = False,
) -> None:
    """Compare rows [T, H, Dv] with the float64 reference by three gates.

    1. max error at most twice (under a soft cap three times) that of `naive`, a naive implementation in the same
       dtype, plus twice the rounding of (reference + 0.3 - 0.3). Source: flash-attention's tests.
    2. relative Frobenius error: float32 1e-6, float16 5e-4, bfloat16 3e-3 (twice that under a soft cap).
    3. the same per row, times 8; a row that should be zero is exactly zero.

    `condition` (`oracle.logit_condition`, of problems with huge logits or long sums): how far each element is off by
    what rounds in its logits, in epsilons of this dtype. So much is no fault, and only what exceeds it goes through the
    gates. `naive` does not show it: it has one order of summation, that of the CPU's library with several partial sums
    at a time, and where it is right by chance, another order need not be. A GPU adds up one product after another.

    `fp8_queries`: the backend rounds queries and probabilities to fp8, as `Capabilities.fp8_queries` says; `naive`
    does so too (`oracle.fp8_oracle`), and gate 2 is twice the relative error of that, gate 3 at least twice that of the
    row: of one with many keys it is several times that of one with few, which may be most of the norm.

    `rounded_states`: the backend rounds what it adds up of parts of the keys (`Capabilities.rounded_states`). Gate 2 is
    for probabilities and outputs, each rounded to half an epsilon at most; three such roundings are sqrt(3/2) of two.

    Raises:
        AssertionError: says which gate, by how much, and where the worst element is.
    """
    dtype, reference, got = actual.dtype, expected.double(), actual.double()
    if not bool(torch.isfinite(got).all()):
        raise AssertionError(f"{name}: {int((~torch.isfinite(got)).sum())} elements are not finite")
    if got.numel() == 0:
        return
    error = (got - reference).abs()
    if condition is not None:
        error = (error - torch.finfo(dtype).eps * condition).clamp_min(0)
    worst = torch.unravel_index(error.argmax(), error.shape)
    where = f"worst at {tuple(int(i) for i in worst)}: got {float(got[worst])}, expected {float(reference[worst])}"
    rounding = ((reference.to(dtype) + 0.3 - 0.3).double() - reference).abs().max()
    allowed = (3 if softcap else 2) * (naive.double() - reference).abs().max() + 2 * rounding
    if dtype == torch.float64:  # the reference has no digits to spare
        allowed += 1e-13 * reference.abs().max()
    if error.max() > allowed:
        raise AssertionError(f"{name}: max error {float(error.max()):.3e} > {float(allowed):.3e}; {where}")
    gate, size = _FROBENIUS[dtype] * (2 if softcap else 1), reference.norm().clamp_min(1e-30)
    if rounded_states:
        gate *= 1.5**0.5
    if fp8_queries:
        gate = max(gate, 2 * float((naive.double() - reference).norm() / size))
    relative = error.norm() / size
    if relative > gate and reference.norm() > 0:
        raise AssertionError(f"{name}: relative error {float(relative):.3e} > {gate:.0e}; {where}")
    norms = reference.norm(dim=-1)
    per_row = error.norm(dim=-1) - 8 * gate * norms
    if fp8_queries:
        per_row = torch.minimum(per_row, error.norm(dim=-1) - 2 * (naive.double() - reference).norm(dim=-1))
    if per_row.max() > 0:
        row = tuple(int(i) for i in torch.unravel_index(per_row.argmax(), per_row.shape))
        raise AssertionError(f"{name}: row {row} is off by {float(error[row].norm()):.3e} of {float(norms[row]):.3e}")


def assert_lse_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    rounded: bool = False,
    off: float = 0.0,
) -> None:
    """LSE [T, H] against the reference; -inf must be -inf in both. `dtype` is that of the inputs.

    `rounded`: the backend says that it sums probabilities rounded to `dtype` (`Capabilities.rounded_lse`), each wrong
    by up to half its epsilon. off: so much of a logit, of which there may be some as large as the LSE, is rounding.
    """
    empty = expected == -torch.inf
    if not torch.equal(actual == -torch.inf, empty):
        raise AssertionError(
            f"{name}: LSE is -inf in {int((actual == -torch.inf).sum())} places, not {int(empty.sum())}"
        )
    error = (actual.double() - expected).masked_fill(empty, 0.0).abs()
    allowed = (_LSE[dtype] + off) * (1 + expected.masked_fill(empty, 0.0).abs())
    if rounded:
        allowed = allowed + torch.finfo(dtype).eps / 2
    if not bool((error <= allowed).all()):
        raise AssertionError(f"{name}: LSE is off by up to {float(error.max()):.3e}")
