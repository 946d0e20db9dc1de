"""KV connectors of the real vLLM over caches of our backend, on a CPU (make vllm-test): what they copy is a block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_real
from vllm_real import Model, Tensors, select_ours
from vllm_steps import BLOCK_SIZE

vllm_real.release()

from test_vllm_steps import Conversations, rows_of  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker  # noqa: E402

from pagedattn.integrations.vllm.backend import PagedAttentionBackend  # noqa: E402

NAMES = "model.layers.0.attn", "model.layers.1.attn"
PROMPTS = [37, 20]  # tokens
# Of two sequences: where a prompt is computed, and where it is loaded to.
FIRST = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
SECOND = torch.tensor([[9, 7, 12], [8, 11, 10]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _selected(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield from select_ours(monkeypatch)


def run(model: Model, blocks: torch.Tensor, size: int, seen: dict[str, Conversations], lens: list[int], new: list[int]):
    """A step of every layer, compared with attention over what its conversations have seen; its metadata."""
    metadata, rows = Tensors(model, blocks, size).step(new, lens)
    for name in model.layers:
        query, key, value = rows_of(rows)
        seen[name].check(query, key, value, model.forward(name, metadata, query, key, value), new)
    return metadata


def prompts_then(model: Model, size: int, move: Any) -> None:
    """Compute prompts, have a connector move their blocks, and decode from where they are then."""
    seen = {name: Conversations(2) for name in model.layers}
    move(run(model, FIRST, size, seen, PROMPTS, PROMPTS))
    run(model, SECOND, size, seen, [n + 1 for n in PROMPTS], [1, 1])
    for cache in model.caches.values():
        assert not cache[: size // BLOCK_SIZE].any(), "the null block was written"


def registered(model: Model) -> Any:
    """The caches as vLLM's offloading connector takes them, by its own asserts."""
    found = list[Any]()
    if vllm_real.caches_are_packed():
        spec: Any = SimpleNamespace(replicated_layout=False, get_worker=found.append)
        OffloadingConnectorWorker(spec, model.config, model.cache_config).register_kv_caches(model.caches)
    else:
        spec = SimpleNamespace(kv_cache_config=model.cache_config, get_handlers=lambda one: found.append(one) or ())
        worker = OffloadingConnectorWorker(spec)
        if model.across_layers:
            worker.register_cross_layers_kv_cache(model.cross_layers, PagedAttentionBackend)
        else:
            worker.register_kv_caches(model.caches)
    return found[0]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("size", "pad", "across_layers"), [(16, 0, False), (16, 512, False), (48, 0, False), (16, 0, True), (48, 0, True)]
)
def test_blocks_that_were_offloaded_are_read_where_they_are_loaded_to(
    size: int, pad: int, across_layers: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = size not in PagedAttentionBackend.get_supported_kernel_block_sizes()
    if across_layers and splits and vllm_real.caches_are_packed():
        pytest.skip("this release splits no blocks that hold all layers")
    torch.manual_seed(0)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    model = Model({name: (None, {}) for name in NAMES}, size, layout, across_layers)
    model.allocate(13, pad)
    canonical = registered(model)
    assert len(canonical.tensors) == (1 if across_layers else len(NAMES))

    def move(_: Any) -> None:
        (refs,) = canonical.group_data_refs
        assert {ref.tensor_idx for ref in refs} == {*range(len(canonical.tensors))}
        for ref in refs:
            pages = canonical.tensors[ref.tensor_idx].tensor
            assert pages.dtype == torch.int8 and len(pages) == 13
            stored = pages[FIRST.flatten().long(), : ref.page_size_bytes].clone()
            pages.zero_()
            pages[SECOND.flatten().long(), : ref.page_size_bytes] = stored

    prompts_then(model, size, move)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prompts_that_were_stored_in_files_are_read_where_they_are_loaded_to(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    model = Model({name: (None, {}) for name in NAMES}, layout=layout)
    model.allocate(13)
    model.config.kv_transfer_config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    connector = example_connector.ExampleConnector(model.config, KVConnectorRole.WORKER, model.cache_config)

    def give(table: torch.Tensor, is_store: bool) -> None:
        given = example_connector.ExampleConnectorMetadata()
        for index, (count, row) in enumerate(zip(PROMPTS, table.tolist(), strict=True)):
            # One more than whole blocks, all of which are stored then.
            tokens = [index] * (-(-count // BLOCK_SIZE) * BLOCK_SIZE + 1)
            given.add_request(tokens, row, BLOCK_SIZE, is_store, [])
        connector.bind_connector_metadata(given)

    def move(metadata: Any) -> None:
        give(FIRST, is_store=True)
        for name in NAMES:
            connector.save_kv_layer(name, model.caches[name], metadata[name])
            model.caches[name].zero_()
        assert len([*tmp_path.rglob("*.safetensors")]) == len(NAMES) * len(PROMPTS)
        give(SECOND, is_store=False)
        connector.start_load_kv(SimpleNamespace(attn_metadata=metadata, no_compile_layers=model.context))

    prompts_then(model, BLOCK_SIZE, move)


def test_what_connectors_ask_of_a_backend() -> None:
    """Blocks are outermost: then caches of all layers may lie in one, and K and V of a block are found as halves."""
    from vllm.distributed.kv_transfer.kv_connector import utils

    assert PagedAttentionBackend.supports_kv_connector()
    if vllm_real.caches_are_packed():
        return  # one shape for all backends: nothing more is asked
    assert PagedAttentionBackend.get_required_kv_cache_layout() is None
    assert PagedAttentionBackend.indexes_kv_by_block_stride()
    about: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "block_size": 16, "engine_id": "a", "is_mla": False}
    about |= {"is_mamba": False, "total_num_kv_heads": 2, "attn_backends": [PagedAttentionBackend]}
    topology = utils.TransferTopology(**about)
    assert topology.is_kv_layout_blocks_first and topology.virtually_split_kv_in_blocks and not topology.split_k_and_v
