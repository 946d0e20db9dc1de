"""The TurboQuant formats: codebooks, lengths of stored rows, and what the torch half and the Triton writer store."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from format_rows import device_of, normal

from pagedattn import Attention, BlockPool, CommonAttentionMetadata, PagedKVCache, ops
from pagedattn.formats.hadamard.rotation import block_of, hadamard, signs
from pagedattn.formats.registry import FORMATS
from pagedattn.formats.turboquant.codebook import LEVELS, UNITS
from pagedattn.formats.turboquant.format import LARGEST, TURBOQUANT, TurboQuantRows, root

NAMES = ("turboquant4", "turboquant_k4v3", "turboquant_k3v4", "turboquant3", "turboquant2")
BITS = (4, 3, 2)
DIMS = (1, 3, 8, 40, 64, 72, 96, 128, 256)


def decoded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    form = TurboQuantRows(bits)
    return form.decode(form.encode(rows), rows.shape[-1], torch.float64)


def error(rows: torch.Tensor, bits: int) -> float:
    """Squared, of what comes back, over the rows' squares."""
    return float((decoded(rows, bits) - rows).square().sum() / rows.double().square().sum())


def below(x: float) -> tuple[float, float]:
    """Of the standard normal distribution: density at x, and probability from 0 to x."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi), math.erf(x / math.sqrt(2)) / 2


def means(levels: list[float]) -> list[float]:
    """Of the elements nearest to each positive level."""
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    parts = [below(edge) for edge in edges]
    return [(p[0] - q[0]) / (q[1] - p[1]) for p, q in pairwise(parts)]


def squared_error(levels: list[float]) -> float:
    """Expected of standard normal elements."""
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    total = 1.0
    for level, mean, (low, high) in zip(levels, means(levels), pairwise(edges), strict=True):
        total += 2 * (below(high)[1] - below(low)[1]) * (level * level - 2 * level * mean)
    return total


def test_roots_are_those_of_ieee_on_every_cpu() -> None:
    """torch's vectorised root of float32 has an error of a last place on some."""
    squares = torch.randint(1, 1 << 40, (4096,), generator=torch.Generator().manual_seed(0))
    want = [math.sqrt(number) for number in squares.float().tolist()]  # far closer than a float32's last place
    assert torch.equal(root(squares), torch.tensor(want, dtype=torch.float64).float())


@pytest.mark.parametrize(("bits", "optimum"), [(2, 0.117482), (3, 0.034548), (4, 0.009501)])
def test_codebooks_are_as_good_as_those_of_least_error(bits: int, optimum: float) -> None:
    best = [3 * (at + 0.5) / (1 << bits - 1) for at in range(1 << bits - 1)]
    for _ in range(3000):
        best = means(best)
    assert squared_error(best) == pytest.approx(optimum, rel=1e-4)
    levels = LEVELS[bits]
    assert levels == tuple(-level for level in reversed(levels)) and levels[-1] <= 127
    found = [level / UNITS[bits] for level in levels[len(levels) // 2 :]]
    assert squared_error(best) <= squared_error(found) < 1.0012 * squared_error(best)
    assert max(abs(a - b) for a, b in zip(found, best, strict=True)) < 0.02


@pytest.mark.parametrize(("bits", "least", "most"), [(4, 0.0090, 0.0094), (3, 0.0330, 0.0345), (2, 0.117, 0.122)])
def test_normal_rows_have_the_error_of_the_codebook(bits: int, least: float, most: float) -> None:
    """By length, not by least squares: at 2 bits that is 2 (1 - sqrt(1 - 0.116)), 0.119."""
    assert least < error(normal(4000, 1, 128), bits) < most


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_codes_are_the_nearest_levels_and_lengths_are_kept(dim: int, bits: int) -> None:
    rows, form, levels = normal(50, 1, dim), TurboQuantRows(bits), torch.tensor(LEVELS[bits]).double()
    packed, factor = form.encode(rows)
    assert factor.dtype == torch.float16
    assert [packed.shape[-1], 1] == [plane.width for plane in form.planes(dim, torch.float16)]
    turned = hadamard(rows.double() * signs(dim, rows.device)) * block_of(dim) ** -0.5
    scaled = turned / turned.square().mean(-1, keepdim=True).sqrt() * UNITS[bits]
    distance = (scaled[..., None] - levels).abs()
    found = form.decode((packed, torch.ones_like(factor)), dim, torch.float64)
    found = hadamard(found * signs(dim, rows.device)) * block_of(dim) ** -0.5
    chosen = (found[..., None] - levels).abs()
    assert chosen.amin(-1).max() < 1e-6, "decoded to what is no level"
    nearest, other = distance.topk(2, largest=False).values.unbind(-1)
    sure = other - nearest > 0.05  # elements are rounded to 12 binary digits
    assert torch.equal(chosen.argmin(-1)[sure], distance.argmin(-1)[sure]) and sure.float().mean() > 0.9
    torch.testing.assert_close(decoded(rows, bits).norm(dim=-1), rows.double().norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_are_far_from_normal(bits: int) -> None:
    spike = torch.zeros(1, 1, 128)
    spike[..., 5] = 7.0
    limit = {4: 0.03, 3: 0.09, 2: 0.25}[bits]
    for rows in (torch.full((1, 1, 128), 3.0), normal(1, 1, 128) * 1e4, normal(1, 1, 128) * 1e-2):
        assert error(rows, bits) < limit
    # All elements are of one size then, and signs alone would do.
    assert error(spike, bits) < 1e-6


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_of_what_is_not_finite_and_beyond_float16(bits: int) -> None:
    rows = normal(6, 2, 64)
    rows[0, 0], rows[1, 1, 3], rows[2, 0, 60], rows[3, 1, 0] = 0.0, math.nan, math.inf, -math.inf
    rows[4] *= 1e30
    rows[5] *= 1e-20
    back = decoded(rows, bits)
    assert not back[0, 0].any() and not back[5].any()
    spoiled = torch.zeros(6, 2, dtype=torch.bool)
    spoiled[1, 1] = spoiled[2, 0] = spoiled[3, 1] = True
    assert torch.equal(back.isnan().any(-1), spoiled) and torch.equal(back.isnan().all(-1), spoiled)
    assert back[4].isfinite().all(), "cut off, as fp8 is"
    assert float(back[4].abs().max()) <= LARGEST * LEVELS[bits][-1] * 8
    cosine = torch.nn.functional.cosine_similarity(back[4], rows[4].double(), dim=-1)
    assert cosine.min() > 0.85


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dim", "value_dim", "heads", "layout"),
    [(128, 128, 3, "NHD"), (12, 72, 2, "HND"), (64, 7, 1, "HND"), (8, 1, 2, "NHD"), (40, 33, 2, "NHD")],
)
def test_rows_are_written_bit_by_bit_as_encoded(
    path: str, name: str, dim: int, value_dim: int, heads: int, layout: str
) -> None:
    device = device_of(path)
    shape: dict[str, Any] = {"head_dim_v": value_dim, "kv_cache_dtype": name, "layout": layout, "device": device}
    cache = PagedKVCache(1, 4, 4, heads, dim, **shape).layer(0)
    key, value = normal(6, heads, dim), normal(6, heads, value_dim, seed=1)
    value[1] *= 1e30
    key[3] *= 1e-6
    value[3, 0], value[4, 0, 0], value[5] = 0.0, math.nan, value[5] * 1e-20
    slots = torch.tensor([7, 2, -1, 15, 14, 3])
    new = key.to(device), value.to(device)
    ops.reshape_and_cache(*new, cache.key, cache.value, slots.to(device), path=path, **cache.stored)
    kept = slots >= 0
    for rows, form, codes, scales in (
        (key, FORMATS[name].key, cache.key, cache.key_scale),
        (value, FORMATS[name].value, cache.value, cache.value_scale),
    ):
        assert scales is not None
        for plane, found in zip((codes, scales), form.encode(rows[kept]), strict=True):
            wanted = torch.zeros(16, *found.shape[1:], dtype=found.dtype)
            wanted[slots[kept]] = found
            assert torch.equal(plane.flatten(0, 1).cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(("name", "bits"), list(zip(NAMES, (4.125, 3.625, 3.625, 3.125, 2.125), strict=True)))
def test_what_an_element_takes(name: str, bits: float) -> None:
    cache = PagedKVCache(1, 2, 16, 4, 128, kv_cache_dtype=name)
    assert cache.bytes_per_block * 8 == 16 * 4 * 2 * 128 * bits


def test_keys_and_values_have_the_bits_that_a_name_says() -> None:
    found = [(form.name, form.key, form.value) for form in TURBOQUANT]
    bits = [(name, key.bits, value.bits) for name, key, value in found if isinstance(key, TurboQuantRows)]  # type: ignore[union-attr]
    assert bits == list(zip(NAMES, (4, 4, 3, 3, 2), (4, 3, 4, 3, 2), strict=True))
    for form in TURBOQUANT:
        assert form.key.kernels.rotate is not None and form.key.kernels.rotate is not form.value.kernels.rotate
        for rows in (form.key, form.value):
            assert isinstance(rows, TurboQuantRows) and rows.codes == f"turboquant{rows.bits}"


@pytest.mark.parametrize("backend", ["TORCH", "TRITON"])
@pytest.mark.parametrize("name", ["turboquant4", "turboquant3"])
def test_blocks_that_were_moved_shared_or_forked_are_read_as_they_were(backend: str, name: str) -> None:
    heads, dim, size, length = 2, 24, 4, 14
    device = device_of(backend.lower())
    layer = Attention(4, dim, heads, kv_cache_dtype=name, block_size=size, backend=backend, device=device)
    cache, pool = PagedKVCache(1, 24, size, heads, dim, kv_cache_dtype=name, device=device), BlockPool(24)
    shapes = ((length, heads, dim), (length, heads, dim), (1, 4, dim))
    key, value, query = (normal(*shape, seed=seed).to(device) for seed, shape in enumerate(shapes))

    def attend(table: list[int], first: int = length, last: int = length) -> torch.Tensor:
        """Of the last token's query, once tokens first..last were written."""
        new, rows = (1, (None, None)) if first == last else (last - first, (key[first:last], value[first:last]))
        blocks = torch.tensor([table]).int().to(device)
        common = CommonAttentionMetadata.from_lengths([new], [last], blocks, block_size=size)
        return layer(query.expand(new, -1, -1).contiguous(), *rows, cache.layer(0), layer.build(common))[-1]

    blocks = pool.allocate(4)
    attend(blocks, 0)
    wanted = attend(blocks)
    copied, away, host = pool.allocate(4), pool.allocate(4), torch.zeros(4, cache.bytes_per_block, dtype=torch.uint8)
    cache.copy_blocks(list(zip(blocks, copied, strict=True)))
    back = torch.arange(4)
    ops.swap_blocks(cache.slabs[0], host, torch.stack((torch.tensor(blocks), back), 1))
    ops.swap_blocks(host, cache.slabs[0], torch.stack((back, torch.tensor(away)), 1))
    assert torch.equal(attend(copied), wanted) and torch.equal(attend(away), wanted)
    node = None
    for at, block in enumerate(blocks[:3]):
        node = pool.commit(block, node, bytes([at]))
    pool.touch(blocks[:3])
    hit = [*blocks[:3], *pool.allocate(1)]
    attend(hit, 12)
    assert torch.equal(attend(hit), wanted)
    fork, pairs = pool.fork(blocks, has_open_block=True)
    cache.copy_blocks(pairs)
    key[13] = 3.0
    attend(fork, 13)
    assert pairs and not torch.equal(attend(fork), wanted) and torch.equal(attend(blocks), wanted)
