"""A default device other than the CPU changes nothing of what is for the host: `meta` stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedattn import Attention, BlockTable, CommonAttentionMetadata, PagedKVCache, ops
from pagedattn.kernels.reference import cpu

PAIRS = [(1, 2), (2, 3)]
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture
def meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(1, 8, 16, KV_HEADS, DIM, device="cpu")


TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
ROWS, KEYS = torch.randn(5, HEADS, DIM), torch.randn(5, KV_HEADS, DIM)


@pytest.mark.parametrize("level", ["1", "2"])
@pytest.mark.parametrize("lengths", [([4, 1], [4, 20]), ([1, 1], [3, 4])], ids=["prompt", "decodes"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"alibi_slopes": [1.0, 2.0, 3.0, 4.0]}], ids=str)
@pytest.mark.parametrize("kernel", [True, False], ids=["extension", "torch"])
@pytest.mark.usefixtures("meta")
def test_a_step_on_the_cpu(
    kernel: bool,
    options: dict[str, Any],
    lengths: tuple[list[int], list[int]],
    level: str,
    cache: PagedKVCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", level)
    if not kernel:
        monkeypatch.setattr(cpu, "_has_kernel", lambda inputs: False)
    layer = Attention(HEADS, DIM, KV_HEADS, device="cpu", dtype=torch.float32, backend="TORCH", **options)
    step = CommonAttentionMetadata.from_lengths(*lengths, TABLE)
    tokens = sum(lengths[0])
    out = layer(ROWS[:tokens], KEYS[:tokens], KEYS[:tokens], cache.layer(0), step)
    assert out.device.type == "cpu" and bool(out.isfinite().all())


@pytest.mark.usefixtures("meta")
def test_lengths_without_a_table() -> None:
    assert CommonAttentionMetadata.from_lengths([3], [3]).seq_lens.tolist() == [3]


@pytest.mark.usefixtures("meta")
def test_blocks(cache: PagedKVCache) -> None:
    cache.slabs[:] = cache.slabs.new_tensor(range(8))[:, None]
    cache.copy_blocks(PAIRS)
    assert cache.slabs[0, :4, 0].tolist() == [0, 1, 1, 2]
    ops.swap_blocks(cache.slabs[0], target := cache.slabs[0].clone(), torch.tensor([[7, 0]], device="cpu"))
    assert int(target[0, 0]) == 7
    cache.zero_blocks([7])
    assert int(cache.slabs[0, 7].max()) == 0


@pytest.mark.usefixtures("meta")
def test_a_table() -> None:
    table = BlockTable(2, 2, device="cpu")
    table.add_row(1, [5, 6])
    assert table.commit().tolist() == [[0, 0], [5, 6]]


def test_slopes_of_a_layer_that_is_built_without_memory() -> None:
    with torch.device("meta"):
        layer = Attention(2, 16, alibi_slopes=[0.5, 0.25])
    layer.to_empty(device="cpu")
    assert layer._slopes is not None and layer._slopes.tolist() == [0.5, 0.25]


@pytest.mark.usefixtures("meta")
def test_scales_of_a_checkpoint() -> None:
    layer = Attention(HEADS, DIM, KV_HEADS, kv_cache_dtype="fp8", device="cpu", dtype=torch.float32, backend="TORCH")
    one, per_head = torch.tensor(0.5, device="cpu"), torch.tensor([0.5, 0.25], device="cpu")
    layer.load_state_dict({"k_scale": one, "v_scale": per_head})
    assert layer.state_dict()["k_scale"].tolist() == [0.5, 0.5]
    layer.load_state_dict({"k_scale": one, "v_scale": one})
    assert layer.state_dict()["k_scale"].item() == 0.5
