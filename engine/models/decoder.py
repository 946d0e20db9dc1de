"""Decoder: one dense decoder family (Qwen3, Qwen2, Llama, Mistral) over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from pagedattn import (
    Attention,
    FullAttentionSpec,
    KVCacheDtype,
    LayerCache,
    PagedKVCache,
    SlidingWindowSpec,
    StepMetadata,
    seal_layers,
)

from .config import ModelConfig
from .fused_ops import turn_and_write, turned
from .layers import GatedMLP, Linear, MergedLinear, RMSNorm
from .rope import RotaryEmbedding
from .tensor_slice import TensorSlice

Place = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of all positions, and the positions of the step's tokens


class SelfAttention(nn.Module):
    """Projections, per-head norms where the family has them, rotation, and attention over the paged cache."""

    def __init__(self, config: ModelConfig, attention: Attention, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        self.kv_heads, self.head_dim, self.eps = kv_heads, dim, config.rms_norm_eps
        self.qkv_proj = MergedLinear(config.hidden_size, sizes, config.qkv_bias, dtype, device)
        self.o_proj = Linear(heads * dim, config.hidden_size, config.output_bias, device, dtype)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.attn = attention

    def forward(self, x: torch.Tensor, place: Place, cache: LayerCache | None, metadata: StepMetadata) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        if cache is None:
            parts = turned(qkv, self.kv_heads, self.head_dim, norms, self.eps, *place)
            return self.o_proj(self.attn(*parts, None, metadata).flatten(1))
        slots = metadata.of(self.attn.plan_key).common.slot_mapping
        written = cache if cache.recent is None else cache.recent
        query = turn_and_write(qkv, norms, self.eps, *place, written, slots, self.attn.kv_scales)
        if written is not cache and not metadata.seals_at_end:
            self.attn.seal(cache, metadata)
        return self.o_proj(self.attn(query, None, None, cache, metadata).flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Attention, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.self_attn = SelfAttention(config, attention, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.mlp = GatedMLP(hidden, config.intermediate_size, config.mlp_bias, dtype, device)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        place: Place,
        cache: LayerCache | None,
        metadata: StepMetadata,
    ) -> torch.Tensor:
        """What the layer before (None: there is none) adds to `residual`, in place, to what this layer adds."""
        normed = self.input_layernorm(residual) if x is None else self.input_layernorm(x, residual)
        x = self.self_attn(normed, place, cache, metadata)
        return self.mlp(self.post_attention_layernorm(x, residual))


class Decoder(nn.Module):
    """A decoder whose weights start on the meta device: `load_weights` fills them.

    Parameters are named as in a checkpoint, without the leading `model.`, except for the merged ones.
    """

    capturable: bool = True
    may_wait: ClassVar[bool] = False
    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        block_size: int,
        backend: str | None = None,
        clean_cache: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype, self.kv_cache_dtypes = dtype, KVCacheDtype.of(kv_cache_dtype).of_layers(config.num_layers)
        # Not `nn.Embedding(...)`: it draws weights, which without storage imports torch._dynamo, for two seconds.
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device="meta")
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
        self._attentions = self._build_attentions(block_size, device, backend, clean_cache)
        self.layers = nn.ModuleList(DecoderLayer(config, attention, dtype, "meta") for attention in self._attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, "meta")
        self.rope = RotaryEmbedding(config.rope, config.head_dim, max_positions, dtype, device)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, "meta", dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache] | None,
        metadata: StepMetadata,
    ) -> torch.Tensor:
        """input_ids and positions [T] to hidden states [T, hidden_size]; the new keys and values go to `caches`."""
        residual, x = self.embed_tokens(input_ids), None
        place = (self.rope.cos_sin, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, residual, place, caches[index] if caches is not None else None, metadata)
        if caches is not None and metadata.seals_at_end:
            seal_layers(self._attentions, caches, metadata)
        return self.norm(x, residual)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [n, hidden_size] to [n, vocab_size] in the model's dtype, written to `out` where it is given."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return torch.mm(hidden, head.weight.t(), out=out)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of what `logits` gives."""
        return self.dtype

    @property
    def kv_heads(self) -> slice:
        """Which of the model's KV heads are here."""
        return slice(None)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def attention_layers(self) -> list[Attention]:
        """The attention of every layer, in order."""
        return list(self._attentions)

    def kv_cache_specs(self, block_size: int) -> list[FullAttentionSpec | SlidingWindowSpec]:
        """What every layer keeps per token, for blocks of `block_size` tokens."""
        shape: dict[str, Any] = {
            "num_kv_heads": self.config.num_kv_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.dtype,
            "block_size": block_size,
        }
        return [
            FullAttentionSpec(**shape, kv_cache_dtype=form)
            if window is None
            else SlidingWindowSpec(**shape, kv_cache_dtype=form, sliding_window=window)
            for window, form in zip(self.config.sliding_windows, self.kv_cache_dtypes, strict=True)
        ]

    def checkpoint_views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors named as the parameters, cut into views named as in a checkpoint."""
        views = {}
        for name, tensor in tensors.items():
            key = name if name.startswith("lm_head.") else f"model.{name}"
            module_name, _, leaf = name.rpartition(".")
            parent, _, kind = key.removesuffix(f".{leaf}").rpartition(".")
            if kind in self.merged:
                sizes = self.get_submodule(module_name).sizes
                parts = zip(self.merged[kind], tensor.split(sizes), strict=True)
                views.update({f"{parent}.{part}.{leaf}": view for part, view in parts})
            else:
                views[key] = tensor
        return views

    def checkpoint_cuts(self) -> Mapping[str, TensorSlice]:
        """Which part of a checkpoint's tensors `checkpoint_views` shows; those not named are shown whole."""
        return {}

    def _build_attentions(
        self, block_size: int, device: torch.device | str, backend: str | None, clean_cache: bool
    ) -> list[Attention]:
        config = self.config
        layout = PagedKVCache.layout_of(self.kv_cache_specs(block_size))
        return [
            Attention(
                config.num_heads,
                config.head_dim,
                config.num_kv_heads,
                scale=config.head_dim**-0.5,
                sliding_window=window,
                kv_cache_dtype=self.kv_cache_dtypes[layer],
                block_size=layout.groups[layout.group_of(layer)].spec.block_size,
                backend=backend,
                dtype=self.dtype,
                device=device,
                clean_cache=clean_cache,
                kv_group=layout.group_of(layer),
            )
            for layer, window in enumerate(config.sliding_windows)
        ]
