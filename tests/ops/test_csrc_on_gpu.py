"""What only a GPU shows of the extension: captured graphs, streams, and a device that is not the current one."""

from __future__ import annotations

import sys

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, ops, plan_step
from pagedattn.runtime import op_registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def built() -> None:
    if op_registry.path_of("copy_blocks", "cuda") != "csrc":
        pytest.skip(op_registry.csrc_status())


def test_a_graph_replays_with_what_its_tensors_hold_then() -> None:
    rows, slots = torch.zeros(5, 2, 64, device="cuda").half(), torch.arange(5, device="cuda")
    plain = torch.zeros(6, 4, 2, 64, device="cuda").half()
    quantised = torch.zeros(6, 4, 2, 64, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(1, device="cuda")
    table, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[0, 1]], [0, 8]))
    host = torch.zeros(6, 4, 2, 64, dtype=torch.float16).pin_memory()

    def step() -> torch.Tensor:
        ops.reshape_and_cache(rows, rows, plain, plain.clone(), slots, path="csrc")
        ops.reshape_and_cache(rows, None, quantised, None, slots, k_scale=scale, path="csrc")
        ops.copy_blocks([plain], torch.tensor([[0, 3], [1, 0], [3, 4]]), path="csrc")
        ops.swap_blocks(plain, host, torch.tensor([[3, 5]]), path="csrc")
        return ops.gather_kv(plain, None, table, lens, 8, path="csrc")[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = step()
    plain.zero_()
    rows.normal_()
    scale.fill_(0.25)
    slots.copy_(torch.tensor([0, 1, -1, 99, 7], device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    want = torch.zeros(6, 4, 2, 64, device="cuda").half()
    want[0, 0], want[0, 1], want[1, 3] = rows[0], rows[1], rows[4]
    want[3], want[4], want[0] = want[0].clone(), want[3].clone(), want[1].clone()
    assert torch.equal(plain, want) and torch.equal(host[5].cuda(), want[3])
    assert torch.equal(gathered, want[:2].flatten(0, 1))
    assert torch.equal(quantised[1, 3].float(), (rows[4].float() / 0.25).clamp(-448, 448).to(quantised.dtype).float())


def test_a_swap_waits_for_its_stream() -> None:
    """A long kernel writes the source on the same stream; what is swapped out is what it wrote."""
    source = torch.zeros(1 << 12, 1 << 15, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 12, 1 << 15, dtype=torch.uint8, pin_memory=True).zero_()
    order = torch.arange(1 << 12)
    for mechanism in (1, 2, 3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                source.add_(1)
            torch.ops.pagedattn_csrc.swap_blocks(source, host, torch.stack((order, order), 1), mechanism)
        stream.synchronize()
        assert bool((host == 20 * mechanism).all())


def test_layers_write_by_tritons_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host makes it again in less time than the extension's op takes; an op alone is the extension's."""
    op = sys.modules["pagedattn.ops.reshape_and_cache"]

    def extension(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(op, "csrc_op", extension)
    layer = Attention(4, 64, 2, block_size=16, backend="TRITON", dtype=torch.half, device="cuda")
    caches = PagedKVCache(2, 70, 16, 2, 64, dtype=torch.half, device="cuda")
    common = CommonAttentionMetadata.from_lengths([1025], [1025], torch.arange(70, dtype=torch.int32).cuda()[None])
    query, key = (torch.randn(1025, heads, 64, device="cuda", dtype=torch.half) for heads in (4, 2))
    step = plan_step([layer], common)
    for index in range(2):
        layer(query, key, key, caches.layer(index), step)
        assert torch.equal(caches.layer(index).key.flatten(0, 1)[:1025], key)
    cache = caches.layer(0)
    with pytest.raises(RuntimeError, match="reshape_and_cache"):
        ops.reshape_and_cache(key, key, cache.key, cache.value, common.slot_mapping)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    rows, slots = torch.randn(3, 2, 64, device="cuda:1"), torch.tensor([3, 9, -1], device="cuda:1")
    cache = torch.zeros(6, 4, 2, 64, device="cuda:1")
    with torch.cuda.device(0):
        ops.reshape_and_cache(rows, None, cache, None, slots, path="csrc")
        ops.copy_blocks([cache], torch.tensor([[0, 4]]), path="csrc")
        assert torch.cuda.current_device() == 0
    assert torch.equal(cache[4, 3], rows[0]) and torch.equal(cache[2, 1], rows[1])
