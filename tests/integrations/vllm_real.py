"""Attention layers of the real vLLM with caches of its model runner, for tests; what releases do apart is said here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from vllm_steps import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, make_common

BACKEND = "pagedattn.integrations.vllm.backend.PagedAttentionBackend"
MAX_MODEL_LEN, MAX_SEQS = 128, 4


def release() -> tuple[int, int]:
    """Major and minor version of the real vLLM; a package of that name without a configuration is a stand-in.

    Where it cannot be imported the test or module is skipped, and fails if EXPECT_VLLM is set.
    """
    try:
        if find_spec("vllm") is None or find_spec("vllm.config") is None:
            _stop("vLLM is not installed: make vllm-test")
        import vllm.v1.worker.gpu.attn_utils  # noqa: F401
    except ImportError as error:
        _stop(f"vLLM cannot be imported: {error}")
    major, minor, *_ = version("vllm").split(".")
    return int(major), int(minor)


def _stop(reason: str) -> NoReturn:
    if os.environ.get("EXPECT_VLLM"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def caches_are_packed() -> bool:
    """Whether all backends have one shape of caches, keys and values side by side, as of vLLM 0.33."""
    from vllm.v1.attention.backend import AttentionBackend

    return not hasattr(AttentionBackend, "get_kv_cache_shape")


def select_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A platform without a device selects nothing: have it select ours, for layers that ask."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(lambda *_, **__: BACKEND))
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


class Model:
    """Attention layers made by vLLM's own classes, which select the backend, and what a worker makes for them.

    layers: by name, the class of the layer (`Attention` if it is None) and its arguments besides heads.
    across_layers: blocks are outermost and hold all layers, as KV connectors like it.
    """

    def __init__(
        self,
        layers: dict[str, tuple[Any, dict[str, Any]]],
        block_size: int = 16,
        layout: str = "NHD",
        across_layers: bool = False,
        kv_cache_dtype: Any = "auto",
    ) -> None:
        from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention

        cache_config = CacheConfig(block_size=block_size, cache_dtype=kv_cache_dtype)
        self.config: Any = VllmConfig(cache_config=cache_config, device_config=DeviceConfig("cpu"))
        self.config.scheduler_config.max_num_seqs = MAX_SEQS
        self.across_layers = across_layers
        if caches_are_packed():
            inner = {"NHD": "NHC", "HND": "HNC"}[layout]
            self.config.cache_config.kv_cache_layout = ("BL" if across_layers else "LB") + inner
        self.layers: dict[str, Any] = {}
        with set_current_vllm_config(self.config):
            for name, (cls, options) in layers.items():
                given = {"num_kv_heads": NUM_KV_HEADS, "cache_config": self.config.cache_config, "prefix": name}
                layer = (cls or Attention)(NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, **given | options)
                if kv_cache_dtype == "auto":
                    layer.kv_cache_torch_dtype = torch.float32  # float16 where there is no model
                self.layers[name] = layer
        # Of a model's configuration only what the functions below read; layers do without one.
        self.config.model_config = SimpleNamespace(
            use_mla=False,
            max_model_len=MAX_MODEL_LEN,
            hf_config=SimpleNamespace(model_type="llama"),
            get_total_num_kv_heads=lambda: NUM_KV_HEADS,
        )
        self.context: Any = self.config.compilation_config.static_forward_context

    def allocate(self, num_blocks: int, pad: int = 0) -> None:
        """Groups of layers by spec, caches of `num_blocks` blocks of the cache manager, pages padded by `pad` bytes."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.gpu import attn_utils

        by_spec: dict[Any, list[str]] = {}
        for name, spec in attn_utils.get_kv_cache_spec(self.config).items():
            page = {"page_size_padded": spec.page_size_bytes + pad} if pad else {}
            by_spec.setdefault(replace(spec, **page), []).append(name)
        groups = [KVCacheGroupSpec(names, spec) for spec, names in by_spec.items()]
        self.cache_config = KVCacheConfig(num_blocks, self._tensors(groups, num_blocks), groups)
        with set_current_vllm_config(self.config):
            self.groups, self.support, self.kernel_sizes = attn_utils.init_attn_backend(
                self.cache_config, self.config, torch.device("cpu")
            )
            self.caches = self._allocated()

    def _allocated(self) -> dict[str, torch.Tensor]:
        from vllm.v1.worker.gpu.attn_utils import init_kv_cache
        from vllm.v1.worker.utils import bind_kv_cache

        device, groups = torch.device("cpu"), [group for groups in self.groups for group in groups]
        if caches_are_packed():
            return init_kv_cache(
                self.context, self.cache_config, device, self.kernel_sizes, self.config, attn_groups=groups
            )
        if not self.across_layers:
            return init_kv_cache(
                [], self.context, self.cache_config, self.groups, device, "auto", self.kernel_sizes, self.config
            )
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        assert all(group.kv_cache_spec.indexes_kv_by_block_stride for group in groups)
        caches, self.cross_layers, _ = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
            self.cache_config, self.groups, "auto", device, self.kernel_sizes
        )
        bind_kv_cache(caches, self.context, [])
        return caches

    def metadata(
        self, common: Any, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], *, capture: bool = False
    ) -> dict[str, Any]:
        """By layer, what the second model runner builds for a step: `common` of `make_common`, tables and slots of
        each group."""
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        encoder = {"encoder_seq_lens": common.encoder_seq_lens, "encoder_seq_lens_cpu": common.encoder_seq_lens_cpu}
        extra = SimpleNamespace(
            get_extra_common_attn_kwargs=lambda group, count: encoder, get_extra_attn_kwargs=lambda *_: {}
        )
        return build_attn_metadata(
            self.groups, common.num_reqs, common.num_actual_tokens, common.query_start_loc, common.query_start_loc_cpu,
            common.max_query_len, common.seq_lens, common.max_seq_len, tables, slots, self.cache_config,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound, for_cudagraph_capture=capture,
            model_specific_attn_metadata=extra,
        )  # fmt: skip

    def forward(
        self, name: str, metadata: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> torch.Tensor:
        """A layer's output [T, Hq, D], called as vLLM's models do."""
        from vllm.forward_context import set_forward_context

        with set_forward_context(metadata, self.config, num_tokens=len(query)):
            return self.layers[name](query.flatten(1), key, value).view_as(query)

    def table(self, blocks: torch.Tensor, group: int = 0) -> torch.Tensor:
        """A block table [B, W] of the cache manager as the runner hands it to the group: 0.24 hands blocks of the
        kernel, later releases have the group make them."""
        if caches_are_packed():
            return blocks
        parts = self.cache_config.kv_cache_groups[group].kv_cache_spec.block_size // self.kernel_sizes[group]
        return (blocks[..., None] * parts + torch.arange(parts, dtype=blocks.dtype)).flatten(1)

    def _tensors(self, groups: list[Any], num_blocks: int) -> list[Any]:
        """Where layers lie: one after the other, in later releases in one allocation."""
        from vllm.v1.kv_cache_interface import KVCacheTensor

        pages = [group.kv_cache_spec.page_size_bytes for group in groups]
        if not caches_are_packed():
            return [
                KVCacheTensor(size=num_blocks * page, shared_by=[name])
                for group, page in zip(groups, pages, strict=True)
                for name in group.layer_names
            ]
        counts = [len(group.layer_names) for group in groups]
        starts = [0, *itertools.accumulate(num_blocks * n * page for n, page in zip(counts, pages, strict=True))]
        return [
            KVCacheTensor(
                size=starts[-1],
                layers=[*group.layer_names],
                layer_stride=page if self.across_layers else num_blocks * page,
                block_stride=count * page if self.across_layers else page,
                offset=start,
            )
            for group, count, page, start in zip(groups, counts, pages, starts, strict=False)
        ]


class Tensors:
    """What a runner keeps and rewrites from step to step, because graphs have captured where it lies."""

    def __init__(self, model: Model, blocks: torch.Tensor, size: int) -> None:
        self.model, self.blocks, self.size = model, blocks, size
        seqs, tokens = len(blocks), MAX_MODEL_LEN
        self.starts, self.lens = torch.zeros(seqs + 1, dtype=torch.int32), torch.zeros(seqs, dtype=torch.int32)
        self.slots = torch.full((tokens,), -1)
        self.table = model.table(torch.zeros_like(blocks))

    def step(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], pad_seqs: int = 0, capture: bool = False
    ) -> tuple[dict[str, Any], int]:
        """The metadata of a step by layer, and its rows; padding sequences have as many tokens as the longest."""
        count, longest = len(query_lens), max(query_lens)
        made = make_common(
            query_lens, seq_lens, self.blocks[:count], pad_seqs, pad_seqs * longest, block_size=self.size
        )
        for kept, new in (
            (self.starts, made.query_start_loc),
            (self.lens, made.seq_lens),
            (self.slots, made.slot_mapping),
        ):
            kept[: len(new)] = new
        self.table.zero_()[:count] = self.model.table(self.blocks[:count])
        rows = count + pad_seqs
        made = made.replace(
            query_start_loc=self.starts[: rows + 1],
            seq_lens=self.lens[:rows],
            max_seq_len=MAX_MODEL_LEN if capture else max(seq_lens),
        )
        slots = self.slots[: made.num_actual_tokens]
        return self.model.metadata(made, [self.table[:rows]], [slots], capture=capture), made.num_actual_tokens
