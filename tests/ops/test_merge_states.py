from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.testing.op_oracles import merge_states_oracle


@pytest.mark.parametrize(("states", "tokens", "heads", "dim"), [(2, 13, 4, 48), (5, 1, 3, 16), (1, 4, 2, 96)])
def test_merge(device, path, states, tokens, heads, dim) -> None:
    outputs, lses = torch.randn(states, tokens, heads, dim), torch.randn(states, tokens, heads) * 30
    lses[torch.rand_like(lses) < 0.3] = -torch.inf
    lses[:, 0, 0] = -torch.inf  # every state empty
    outputs[lses == -torch.inf] = torch.nan  # whose outputs may be anything
    want, want_lse = merge_states_oracle(outputs, lses)
    out, lse = ops.merge_attn_states(outputs.to(device), lses.to(device), path=path)
    assert torch.allclose(out.cpu().double(), want, atol=1e-6, rtol=1e-5)
    assert torch.allclose(lse.cpu().double(), want_lse, atol=1e-5, rtol=1e-6)
    assert not out[0, 0].any() and lse[0, 0] == -torch.inf


def test_states_of_float64(device, path) -> None:
    outputs, lses = torch.randn(3, 5, 2, 24, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    want, want_lse = merge_states_oracle(outputs, lses)
    out, lse = ops.merge_attn_states(outputs.to(device), lses.to(device), path=path)
    assert out.dtype == lse.dtype == torch.float64
    assert torch.allclose(out.cpu(), want, atol=1e-14) and torch.allclose(lse.cpu(), want_lse, atol=1e-14)


def test_strided_states(device, path) -> None:
    outputs = torch.randn(13, 3, 4, 16, device=device).transpose(0, 1)
    lses = torch.randn(4, 13, 3, device=device).permute(2, 1, 0)  # [n, T, H] of a [H, T, n] tensor
    want, want_lse = merge_states_oracle(outputs.cpu(), lses.cpu())
    target = torch.empty(13, 4, 32, device=device)[..., :16]
    out, lse = ops.merge_attn_states(outputs, lses, out=target, path=path)
    assert out.data_ptr() == target.data_ptr()
    assert torch.allclose(out.cpu().double(), want, atol=1e-6)
    assert torch.allclose(lse.cpu().double(), want_lse, atol=1e-5)


def test_merging_in_parts_equals_merging_at_once(device, path) -> None:
    outputs, lses = torch.randn(4, 7, 2, 16, device=device), torch.randn(4, 7, 2, device=device)
    first, second = (ops.merge_attn_states(outputs[i : i + 2], lses[i : i + 2], path=path) for i in (0, 2))
    pairs = torch.stack((first[0], second[0])), torch.stack((first[1], second[1]))
    whole, lse = ops.merge_attn_states(outputs, lses, path=path)
    parts, parts_lse = ops.merge_attn_states(*pairs, path=path)
    assert torch.allclose(whole, parts, atol=1e-6) and torch.allclose(lse, parts_lse, atol=1e-6)


def test_an_out_that_the_kernel_would_write_beside_is_refused(device, path) -> None:
    outputs, lses = torch.zeros(2, 3, 4, 16, device=device), torch.zeros(2, 3, 4, device=device)
    for out in (torch.zeros(3, 4, 32, device=device)[..., ::2], torch.zeros(3, 4, device=device)):
        with pytest.raises(InvalidInputError, match=r"^out must be \[3, 4, 16\], last stride 1"):
            ops.merge_attn_states(outputs, lses, out=out, path=path)


@pytest.mark.parametrize("name", ["lses", "out"])
def test_another_device_is_refused(device, name) -> None:
    given: dict[str, Any] = {"lses": torch.zeros(2, 3, 4, device=device), "out": torch.zeros(3, 4, 16, device=device)}
    given[name] = given[name].to("meta")
    with pytest.raises(InvalidInputError, match=f"^{name} must be on {device}.* as the outputs"):
        ops.merge_attn_states(torch.zeros(2, 3, 4, 16, device=device), **given)


def test_half_precision_lse_is_refused(device) -> None:
    with pytest.raises(InvalidInputError, match="lses must be float32"):
        ops.merge_attn_states(torch.zeros(2, 3, 4, 16, device=device), torch.zeros(2, 3, 4, device=device).half())
