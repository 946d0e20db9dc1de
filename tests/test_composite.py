"""Two backends for one layer: what they want of its cache, what of a step's calls is made again, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, LayerCache, PagedKVCache, register_backend
from pagedattn.backends import registry
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.capabilities import Capabilities
from pagedattn.errors import InvalidInputError

TOGETHER = "prefill=TORCH,decode=AGAIN"
CALLS: list[str] = []


class AgainImpl(TorchBackend.impl):
    """Makes every call again that was made with care, as it says."""

    records = True

    def record(self, query: Any, kv_cache: Any, metadata: Any, out: Any, *extras: Any) -> Any:
        CALLS.append("with care")
        self.forward(query, None, None, kv_cache, metadata, out, *extras[:2], None, *extras[2:])

        def again(query: Any, key: Any, value: Any, out: Any, *extras: Any) -> bool:
            CALLS.append("again")
            cache = LayerCache(key, value)
            self.forward(query, None, None, cache, metadata, out, *extras[:2], None, *extras[2:])
            return True

        return again


class Again(TorchBackend):
    """Wants blocks of 32."""

    name = "AGAIN"
    impl = AgainImpl

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), default_block_size=32)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register_backend("AGAIN", f"{__name__}:Again")
    CALLS.clear()


def problem(layer: Attention, query_lens: list[int]) -> tuple[torch.Tensor, LayerCache, CommonAttentionMetadata]:
    size, count = layer.selection.block_size, len(query_lens)
    cache = PagedKVCache(1, 2 * count, size, num_kv_heads=2, head_dim=8)
    cache.slabs.view(torch.float32).normal_()
    table = torch.arange(2 * count, dtype=torch.int32).view(count, 2)
    lens = [size + 3 + i for i in range(count)]
    common = CommonAttentionMetadata.from_lengths(query_lens, lens, table, block_size=size)
    return torch.randn(sum(query_lens), 4, 8), cache.layer(0), common


@pytest.mark.parametrize("text", [TOGETHER, "prefill=AGAIN,decode=TORCH"])
def test_the_larger_of_two_block_sizes_serves_both(text: str) -> None:
    layer = Attention(4, 8, 2, backend=text)
    assert layer.selection.block_size == 32
    query, cache, common = problem(layer, [1, 1, 5])
    assert cache.block_size == 32
    wanted = Attention(4, 8, 2, backend="TORCH")(query, None, None, cache, common)
    assert torch.equal(layer(query, None, None, cache, common), wanted)


@pytest.mark.parametrize(
    ("query_lens", "calls"), [([1, 1, 1], ["with care", "again", "again"]), ([1, 1, 5], []), ([4, 5], [])], ids=str
)
def test_a_step_of_one_backend_alone_is_made_again(query_lens: list[int], calls: list[str]) -> None:
    """A step of both is called with care each time, and each has its rows."""
    layer = Attention(4, 8, 2, backend=TOGETHER)
    query, cache, common = problem(layer, query_lens)
    metadata = layer.build(common)
    for turn in range(3):
        query = query + turn
        wanted = Attention(4, 8, 2, backend="TORCH")(query, None, None, cache, common)
        assert torch.equal(layer(query, None, None, cache, metadata), wanted), turn
    assert calls == CALLS and len(metadata.calls) == bool(calls)


def test_metadata_of_one_backend_are_refused() -> None:
    layer = Attention(4, 8, 2, backend=TOGETHER)
    query, cache, common = problem(layer, [1, 3])
    with pytest.raises(InvalidInputError, match=r"^metadata must be of two backends, got AttentionMetadata; build it"):
        layer(query, None, None, cache, AttentionMetadata(common))
