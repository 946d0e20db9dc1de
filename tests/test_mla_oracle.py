"""The oracle of latent attention: both forms are one function, and each part of it counts."""

from __future__ import annotations

import pytest
import torch

from pagedattn import Mask
from pagedattn.testing import attention_oracle, mla_absorbed_oracle, mla_expanded_oracle

HEADS, NOPE, ROPE, LATENT, V = 3, 6, 4, 8, 5
GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


PARTS = (normal(4, HEADS, NOPE), normal(4, HEADS, ROPE), normal(9, LATENT), normal(9, ROPE))
W_UK, W_UV = normal(HEADS, NOPE, LATENT), normal(HEADS, V, LATENT)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=False), Mask(causal=True, sliding_window=3)], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_absorbed_is_expanded(mask: Mask, softcap: float | None) -> None:
    forms = [
        form(*PARTS, W_UK, W_UV, scale=0.3, mask=mask, softcap=softcap)
        for form in (mla_expanded_oracle, mla_absorbed_oracle)
    ]
    for one, other in zip(*forms, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_head_is_attention_with_the_keys_and_values_that_its_matrices_make() -> None:
    q_nope, q_pe, latent, k_pe = PARTS
    out, lse = mla_absorbed_oracle(*PARTS, W_UK, W_UV, scale=0.3)
    for head in range(HEADS):
        key = torch.cat((latent @ W_UK[head].T, k_pe), 1)[:, None]
        value = (latent @ W_UV[head].T)[:, None]
        query = torch.cat((q_nope[:, head], q_pe[:, head]), 1)[:, None]
        want, want_lse = attention_oracle(query, key, value, scale=0.3)
        torch.testing.assert_close(out[:, head], want[:, 0], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(lse[:, head], want_lse[:, 0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("part", range(6))
def test_every_input_changes_the_output(part: int) -> None:
    inputs = [*PARTS, W_UK, W_UV]
    want, _ = mla_absorbed_oracle(*inputs, scale=0.3)
    inputs[part] = inputs[part] + 0.5 * normal(*inputs[part].shape)
    got, _ = mla_absorbed_oracle(*inputs, scale=0.3)
    assert bool(((got - want).abs() > 1e-6).all((1, 2)).any())
