"""concat_and_cache_mla: rows of two parts, on every path, against rows written one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.mla_rows.format import join, split
from pagedattn.testing.op_oracles import reshape_and_cache_oracle

P, S = 6, 4
SLOTS = [9, -1, 0, P * S, P * S - 1, 2**63 - 1]


def tensors(
    device: torch.device, latent: int = 12, rope: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Parts that are slices of one projection, as a model has them; a padding row at the end."""
    fused = torch.randn(7, latent + rope, device=device).to(dtype)
    cache = torch.full((P, S, 1, latent + rope), torch.nan, device=device).to(dtype)
    return fused[:, :latent], fused[:, latent:], cache, torch.tensor(SLOTS, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(512, 64), (12, 4), (7, 3), (16, 0)])
def test_rows_are_written_to_their_slots_and_others_are_skipped(
    device, any_path: str, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    latent, k_pe, cache, slots = tensors(device, *sizes, dtype)
    want = reshape_and_cache_oracle(join(latent, k_pe)[: len(slots)].cpu(), cache.cpu(), SLOTS)
    ops.concat_and_cache_mla(latent, k_pe, cache, slots, path=any_path)
    assert torch.equal(cache.cpu().view(torch.uint8), want.view(torch.uint8))
    for part, got in zip((latent, k_pe), split(cache[2, 1, 0], sizes[0]), strict=True):
        assert torch.equal(part[0], got)


def test_a_cache_of_any_strides_and_nothing_around_it(device, any_path: str) -> None:
    latent, k_pe, _, slots = tensors(device)
    room = torch.full((P + 2, 1, 2 * S, 20), 7.0, device=device)
    cache = room[1 : P + 1, :, ::2, 2:18].transpose(1, 2)
    before = room.clone()
    ops.concat_and_cache_mla(latent, k_pe, cache, slots, path=any_path)
    want = reshape_and_cache_oracle(
        join(latent, k_pe)[: len(slots)].cpu(), before[1 : P + 1, :, ::2, 2:18].cpu().transpose(1, 2), SLOTS
    )
    assert torch.equal(cache.cpu(), want)
    cache.fill_(7.0)
    assert torch.equal(room, before)


def bits_of(codes: torch.Tensor) -> torch.Tensor:
    """Of e4m3. Divisions on a GPU give a NaN without a sign, those of a CPU keep it."""
    bits = codes.view(torch.uint8)
    return torch.where(codes.float().isnan(), 0x7F, bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 0.03, torch.tensor([0.03])], ids=["none", "float", "tensor"])
def test_rows_of_e4m3_are_quotients_saturated(device, any_path: str, scale: Any, dtype: torch.dtype) -> None:
    if any_path == "triton" and dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    latent, k_pe, _, slots = tensors(device, 12, 4, dtype)
    latent[0, :4] = torch.tensor([1000.0, -torch.inf, torch.nan, 2.0**-9 * 0.03])
    k_pe[2, 0] = -900.0
    cache = torch.full((P, S, 1, 16), 7.0, device=device).to(torch.float8_e4m3fn)
    want = reshape_and_cache_oracle(
        join(latent, k_pe)[: len(slots)].cpu().float(), cache.cpu(), SLOTS, 1.0 if scale is None else torch.tensor(0.03)
    )
    given = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    ops.concat_and_cache_mla(latent, k_pe, cache, slots, k_scale=given, path=any_path)
    assert torch.equal(bits_of(cache.cpu()), bits_of(want))
    assert cache[2, 1, 0, 0].float() == 448 and bool(cache[2, 1, 0, 2].float().isnan())


def test_nothing_is_written_for_no_slots(device, any_path: str) -> None:
    latent, k_pe, cache, slots = tensors(device)
    ops.concat_and_cache_mla(latent, k_pe, cache, slots[:0], path=any_path)
    ops.concat_and_cache_mla(latent, k_pe, cache[:0], slots, path=any_path)
    assert bool(cache.isnan().all())


REFUSED: dict[str, tuple[int, Any, str]] = {
    "latent of another dtype": (0, torch.zeros(7, 12).half(), "latent must be torch.float32"),
    "too few rows": (1, torch.zeros(3, 4), "k_pe must be at least 6 rows"),
    "parts that are no row": (1, torch.zeros(7, 5), r"rows must be \[P, S, 1, 12 \+ 5\]"),
    "strided parts": (0, torch.zeros(7, 24)[:, ::2], "latent must be .* last stride 1"),
    "two heads": (2, torch.zeros(P, S, 2, 8), "rows must be"),
    "slots": (3, torch.zeros(6), r"slot_mapping must be int64 \[n\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call = list(tensors(torch.device("cpu")))
    at, other, message = REFUSED[name]
    call[at] = other
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        ops.concat_and_cache_mla(*call)


SCALES: dict[str, tuple[Any, str]] = {
    "zero": (0.0, "k_scale must be a positive finite number"),
    "infinite": (float("inf"), "k_scale must be a positive finite number"),
    "two elements": (torch.ones(2), r"k_scale must be float32 \[1\] on cpu"),
    "float64": (torch.ones(1, dtype=torch.float64), r"k_scale must be float32 \[1\] on cpu"),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_do_not_fit_are_refused(name: str) -> None:
    latent, k_pe, cache, slots = tensors(torch.device("cpu"))
    scale, message = SCALES[name]
    stored = torch.zeros(P, S, 1, 16).to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        ops.concat_and_cache_mla(latent, k_pe, stored, slots, k_scale=scale)
    assert not bool(stored.float().any())
    with pytest.raises(InvalidInputError, match=r"^k_scale must be None, as rows are stored as they are"):
        ops.concat_and_cache_mla(latent, k_pe, cache, slots, k_scale=1.0)
    with pytest.raises(InvalidInputError, match=r"^latent must be torch.float8_e5m2"):
        ops.concat_and_cache_mla(latent, k_pe, stored.to(torch.float8_e5m2), slots)


def test_rows_of_bytes_are_not_for_the_extension(device) -> None:
    parts = torch.zeros(1, 512, device=device), torch.zeros(1, 64, device=device)
    rows, slots = torch.zeros(P, S, 1, 656, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match=r"path=.csrc.*use one of auto, triton, torch"):
        ops.concat_and_cache_mla(*parts, rows, slots.to(device), path="csrc")
