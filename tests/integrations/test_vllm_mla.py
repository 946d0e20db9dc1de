"""Latent attention of the real vLLM by our backend, on a CPU (make vllm-test): its builder and implementation's classes
around the library's absorbed attention."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_real
from vllm_steps import make_common

vllm_real.release()

from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402

from pagedattn.errors import UnsupportedError  # noqa: E402
from pagedattn.integrations.vllm import chosen, kernels  # noqa: E402
from pagedattn.integrations.vllm.backend import PagedAttentionBackend  # noqa: E402
from pagedattn.integrations.vllm.mla import PagedMLABackend  # noqa: E402

HEADS, LATENT, ROPE, SIZE, BLOCKS = 4, 256, 64, 16, 24  # one of the rows that vLLM knows
ROW, SCALE = LATENT + ROPE, 0.05
DIMS = {"q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE}
DIMS |= {"qk_head_dim": 32, "v_head_dim": 16}


class Latent:
    """A layer, its builder and its cache, made by vLLM's classes."""

    def __init__(self, tokens: int = 1, **asked: Any) -> None:
        self.config: Any = VllmConfig(cache_config=CacheConfig(block_size=SIZE), device_config=DeviceConfig("cpu"))
        text = SimpleNamespace(model_type="deepseek_v2", **DIMS)
        self.config.model_config = SimpleNamespace(
            use_mla=True,
            dtype=torch.float32,
            max_model_len=128,
            hf_config=text,
            hf_text_config=text,
            is_moe=False,
            get_num_attention_heads=lambda parallel: HEADS,
            get_head_size=lambda: ROW,
            get_vocab_size=lambda: 8,
        )
        if tokens > 1:
            self.config.speculative_config = SimpleNamespace(num_speculative_tokens=tokens - 1, parallel_drafting=False)
        given: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None} | asked
        given |= {"kv_cache_dtype": "auto", "attn_type": "decoder", "kv_sharing_target_layer_name": None}
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        with set_current_vllm_config(self.config):
            self.impl = PagedMLABackend.get_impl_cls()(
                num_heads=HEADS, head_size=ROW, scale=SCALE, num_kv_heads=1, kv_b_proj=None, **DIMS, **given
            )
            torch.set_default_dtype(before)
            prompts = SimpleNamespace(clone=lambda: None)  # vLLM's, which no decode asks for
            layer = SimpleNamespace(impl=self.impl, kv_cache=torch.tensor([]), prefill_backend=prompts, **DIMS)
            self.config.compilation_config.static_forward_context["a"] = layer
            spec = SimpleNamespace(block_size=SIZE, dtype=torch.float32)
            self.builder: Any = PagedMLABackend.get_builder_cls()(spec, ["a"], self.config, torch.device("cpu"))
        self.rows = torch.randn(BLOCKS, SIZE, ROW)
        self.rows[0] = torch.nan  # the null block

    def attend(self, query: torch.Tensor, metadata: Any, as_parts: bool = False) -> torch.Tensor:
        cache = self.rows[:, None] if vllm_real.caches_are_packed() else self.rows
        given = (query[..., :LATENT], query[..., LATENT:]) if as_parts else query
        out, lse = self.impl.forward_mqa(given, cache, metadata, None)
        assert lse is None
        return out

    def check(self, query: torch.Tensor, out: torch.Tensor, table: torch.Tensor, lens: Sequence[int], new: int) -> None:
        """Compare with attention by its definition: keys are rows, values their latent part."""
        for b, length in enumerate(lens):
            rows = self.rows[table[b].long()].flatten(0, 1)[:length]
            for i in range(new):
                seen = rows[: length - new + 1 + i]
                weights = (query[b * new + i] @ seen.T * SCALE).softmax(-1)
                torch.testing.assert_close(out[b * new + i], weights @ seen[:, :LATENT], atol=2e-5, rtol=1e-4)


def step(new: Sequence[int], lens: Sequence[int], table: torch.Tensor, **more: Any) -> Any:
    return make_common(new, lens, table, block_size=SIZE, **more)


def a_table(count: int) -> torch.Tensor:
    return (torch.randperm(BLOCKS - 1)[: count * 4].reshape(count, 4) + 1).int()


@pytest.mark.parametrize("as_parts", [False, True])
@pytest.mark.parametrize("served", ["TORCH", "TRITON"])
def test_decodes_attend_to_latent_rows(served: str, as_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if served == "TRITON":
        pytest.importorskip("triton")
    monkeypatch.setenv("PAGEDATTN_BACKEND", served)
    torch.manual_seed(0)
    latent, table, lens = Latent(), a_table(3), [1, 40, 63]
    metadata = latent.builder.build(0, step([1] * 3, lens, table))
    assert metadata.num_decodes == 3 and metadata.prefill is None
    query = torch.randn(3, HEADS, ROW)
    latent.check(query, latent.attend(query, metadata, as_parts), table, lens, 1)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_of_a_full_graph_gets_what_was_captured(tokens: int) -> None:
    torch.manual_seed(1)
    latent, table = Latent(tokens), a_table(3)
    room = step([tokens] * 4, [tokens] * 4, torch.zeros(4, 4, dtype=torch.int32), max_seq_len=64)
    captured = latent.builder.build_for_cudagraph_capture(room).decode.planned
    assert captured is latent.builder.build_for_cudagraph_capture(room).decode.planned
    for lens in ([11, 20, 40], [12, 21, 41]):
        now = step([tokens] * 3, lens, table, pad_seqs=1, pad_tokens=tokens)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(room, name).copy_(getattr(now, name))  # as a runner rewrites its persistent tensors
        metadata = latent.builder.build(0, room)
        assert metadata.decode.planned is captured
        query = torch.randn(4 * tokens, HEADS, ROW)
        latent.check(query, latent.attend(query, metadata), table, lens, tokens)
    apart = latent.builder.build(0, step([tokens] * 3, [11, 20, 40], table))
    assert apart.decode.planned is not captured


def test_the_class_is_that_of_the_model_being_built() -> None:
    config: Any = VllmConfig(device_config=DeviceConfig("cpu"))
    assert chosen.Backend is PagedAttentionBackend
    for use_mla, cls in ((True, PagedMLABackend), (False, PagedAttentionBackend)):
        config.model_config = SimpleNamespace(use_mla=use_mla)
        with set_current_vllm_config(config):
            assert chosen.Backend is cls and cls.is_mla() == use_mla
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = chosen.Other


def test_what_is_not_served_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    asked |= {"use_mla": True, "has_sink": False, "use_sparse": False, "use_mm_prefix": False}
    asked |= {"use_per_head_quant_scales": False, "device_capability": None, "attn_type": "decoder"}
    refused = PagedMLABackend.validate_configuration
    assert refused(**asked) == []
    assert "kv_cache_dtype=fp8 (serves rows of latent" in refused(**asked | {"kv_cache_dtype": "fp8"})[0]
    assert refused(**asked | {"kv_cache_dtype": "float16"}) == [
        "a float16 cache needs queries of float16, not bfloat16"
    ]
    assert refused(**asked | {"use_mla": False}) and refused(**asked | {"use_sparse": True})
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    assert kernels.why_not_latent(576, torch.float16, "auto", (9, 0)) is None
    assert "capability" in str(kernels.why_not_latent(576, torch.float16, "auto", (7, 5)))
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TORCH")
    assert PagedMLABackend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    with pytest.raises(UnsupportedError, match="sliding_window"):
        Latent(sliding_window=8)
