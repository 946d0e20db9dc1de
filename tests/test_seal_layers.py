"""seal_layers: blocks of all layers encoded at once, after the layers' calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from covers import beside
from format_rows import device_of

from pagedattn import (
    Attention,
    CommonAttentionMetadata,
    LayerCache,
    PagedKVCache,
    StepMetadata,
    ops,
    plan_step,
    seal_layers,
)
from pagedattn.layers.seal_layers import _stacked

LAYERS, SIZE, HEADS, DIM = 3, 32, 2, 16
LENS = (30, 126, 7, 60)  # before the decodes: two sequences fill a block, which is behind a window's begin for one
Run = Callable[[list[Attention], list[LayerCache], StepMetadata, list[torch.Tensor]], list[torch.Tensor]]


def caches_of(form: str, apart: bool) -> list[LayerCache]:
    """One cache's layers, or, if `apart`, those of as many caches."""
    shape = (8 * len(LENS), SIZE, HEADS, DIM)
    if apart:
        caches = [PagedKVCache(1, *shape, kv_cache_dtype=form, recent_blocks=shape[0]) for _ in range(LAYERS)]
        return [cache.layer(0) for cache in caches]
    cache = PagedKVCache(LAYERS, *shape, kv_cache_dtype=form, recent_blocks=shape[0] if form != "int8" else None)
    return [cache.layer(index) for index in range(LAYERS)]


def step_of(layers: Sequence[Attention], lens: Sequence[int], new: Sequence[int]) -> StepMetadata:
    columns = torch.arange(8 * len(lens)).view(len(lens), 8).int()
    tables = columns, columns.flip(0)
    common = CommonAttentionMetadata.from_lengths(new, lens, tables[0], block_size=SIZE, recent_table=tables[1])
    return plan_step(layers, common)


def each_alone(
    layers: list[Attention], caches: list[LayerCache], step: StepMetadata, rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [
        layer(one, one[:, :HEADS], one[:, :HEADS] / 2, cache, step)
        for layer, cache, one in zip(layers, caches, rows, strict=True)
    ]


def at_end(
    layers: list[Attention], caches: list[LayerCache], step: StepMetadata, rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    outputs = []
    for layer, cache, one in zip(layers, caches, rows, strict=True):
        written, slots = cache.recent or cache, step.of(layer.plan_key).common.slot_mapping
        stored = {} if written is cache.recent else cache.stored
        ops.reshape_and_cache(one[:, :HEADS], one[:, :HEADS] / 2, written.key, written.value, slots, **stored)
        outputs.append(layer(one, None, None, cache, step))
    assert step.seals_at_end
    seal_layers(layers, caches, step)
    return outputs


@pytest.mark.parametrize(
    ("form", "apart", "launches"),
    [
        ("int4", False, 1),
        ("int4", True, 3),
        ("turboquant4:window=64", False, 1),
        ("int4:skip=1", False, 1),
        ("int8", False, 0),
    ],
)
def test_as_each_layer_alone_before_its_call(
    form: str, apart: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = caches_of(form, apart)
    layers = [
        Attention(2 * HEADS, DIM, HEADS, kv_cache_dtype=cache.format or "auto", block_size=SIZE, backend="TORCH")
        for cache in names
    ]
    sealed, op = [0], ops.seal_blocks

    def count(*args: object, **options: object) -> None:
        sealed[0] += 1
        op(*args, **options)  # type: ignore[arg-type]

    found = []
    for run in (each_alone, at_end):
        random, caches = torch.Generator().manual_seed(1), caches_of(form, apart)
        lens = list(LENS)
        prompt = [torch.randn(sum(lens), 2 * HEADS, DIM, generator=random) for _ in layers]
        each_alone(layers, caches, step_of(layers, lens, lens), prompt)
        outputs: list[torch.Tensor] = []
        monkeypatch.setattr(ops, "seal_blocks", count)
        for _ in range(4):
            lens, sealed[0] = [one + 1 for one in lens], 0
            rows = [torch.randn(len(lens), 2 * HEADS, DIM, generator=random) for _ in layers]
            outputs += run(layers, caches, step_of(layers, lens, [1] * len(lens)), rows)
            assert run is each_alone or sealed[0] == launches
        monkeypatch.setattr(ops, "seal_blocks", op)
        found.append((outputs, [plane for cache in caches for plane in cache.planes]))
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_steps_of_several_tokens_seal_before() -> None:
    layer = Attention(2, DIM, kv_cache_dtype="int4", block_size=SIZE)
    assert step_of([layer], [3, 9], [1, 1]).seals_at_end and not step_of([layer], [3, 9], [1, 2]).seals_at_end


@pytest.mark.cover(by=beside("path"))
@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("form", ["int4", "turboquant_k3v4:window=32"])
def test_one_launch_for_layers(form: str, programs: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more blocks than programs, or fewer; caches of layers as by a call for each."""
    from pagedattn.kernels.cache_write import block_kernel

    monkeypatch.setattr(block_kernel, "_PROGRAMS", programs)
    device, random = device_of(path), torch.Generator().manual_seed(3)
    tables = [torch.randperm(20, generator=random).view(5, 4).int().to(device) for _ in range(2)]
    new, lens = torch.tensor([40, 1, 64, 0, 33]), torch.tensor([100, 96, 64, 64, 65])
    lengths = torch.cat((new.new_zeros(1), new.cumsum(0))).int().to(device), lens.int().to(device)
    rows = torch.randn(2, LAYERS, 20, SIZE, HEADS, DIM, generator=random).to(device)
    stored = []
    for together in (False, True):
        cache = PagedKVCache(LAYERS, 20, SIZE, HEADS, DIM, kv_cache_dtype=form, recent_blocks=1, device=device)
        every = [cache.layer(index) for index in range(LAYERS)]
        in_one = _stacked([replace(one, recent=None) for one in every])
        assert in_one is not None
        for key, value, one in [(*rows, in_one)] if together else zip(*rows, every, strict=True):
            planes = {"k_scale_cache": one.key_scale, "v_scale_cache": one.value_scale}
            options: dict[str, Any] = {"max_query_len": 64, "kv_cache_dtype": form, "path": path, **planes}
            ops.seal_blocks(key, value, tables[0], one.key, one.value, tables[1], *lengths, **options)
        stored.append(cache.slabs)
    assert torch.equal(*stored) and stored[0].any()
