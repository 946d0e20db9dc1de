"""One layer's attention for vLLM: the library's `Attention` over views of vLLM's cache."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.v1.attention.backend import AttentionImpl

from ... import Attention, LayerCache
from ...errors import InvalidInputError, UnsupportedError
from .kernels import FP8, INT8, TYPES, int8_scales_at, serving_backend, stored_as
from .step import StepPlans


class PagedAttentionImpl(AttentionImpl[Any]):
    """Writes the new keys and values, then attends.

    Arguments are vLLM's. Its dtype is torch's default while it builds a model, and heads are those of the rank.

    Raises:
        UnsupportedError: a layer that cannot be served; lists the reasons.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        asked = {name: value for name, value in others.items() if value not in (None, False, -1)}
        if asked:
            raise UnsupportedError(f"pagedattn serves no layer with {asked}; start vLLM with another attention backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attention = Attention(
            num_heads,
            head_size,
            self.num_kv_heads,
            self.scale,
            sliding_window=sliding_window,
            softcap=logits_soft_cap or None,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            attn_type=TYPES[str(getattr(attn_type, "value", attn_type))],
            deterministic=bool(envs.VLLM_BATCH_INVARIANT),
            backend=serving_backend(),
            device="cuda" if torch.cuda.is_available() else "cpu",  # the default may be meta while a model is built
            **stored_as(kv_cache_dtype),
        )
        self._writes = kv_sharing_target_layer_name is None
        self._stored = torch.int8 if kv_cache_dtype == INT8 else FP8.get(kv_cache_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: StepPlans | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend into `output`, whose rows past the step's tokens are left as they are.

        Args:
            query: [T, Hq, D]. key, value: [T', Hkv, D], None where there is nothing to write.
            kv_cache: vLLM's, see `views`. attn_metadata: None in profiling runs, whose output is zeros.
            output: [T, Hq, D].

        Raises:
            UnsupportedError: quantised output.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("pagedattn writes no quantised output; turn vLLM's fusion of it off")
        attention, metadata = self.attention, attn_metadata.of(self.attention)
        if not attention.spec.uses_cache:
            count = metadata.common.num_tokens  # keys are packed: padding rows must not follow them
            if key is None or value is None:
                raise InvalidInputError("key and value", "given where there is no cache", "None")
            attention.forward(query[:count], key[:count], value[:count], None, metadata, output[:count])
            return output
        known = attn_metadata.caches.get(self)
        if known is None or known[0] is not kv_cache:
            known = attn_metadata.caches[self] = kv_cache, views(kv_cache, self.head_size, self._stored)
        if not self._writes:  # keys come, but another layer has written them
            key = value = None
        scales = (layer._k_scale, layer._v_scale) if attention.spec.format.takes_scales else ()
        attention.forward(query, key, value, known[1], metadata, output, *scales)
        return output


def views(kv_cache: torch.Tensor, head_size: int, stored: torch.dtype | None = None) -> LayerCache:
    """Keys and values [P, S, Hkv, D] of vLLM's cache, whatever its strides.

    Args:
        kv_cache: [P, 2, S, Hkv, D] of vLLM 0.24, [P, Hkv, S, 2 * D] of later ones; bytes where `stored` is a
            dtype of 8 bits. Where that is int8, [P, Hkv, S, int8_row_bytes(D)], with scales behind the codes.
    """
    elements = kv_cache if stored is None or kv_cache.dtype == stored else kv_cache.view(stored)
    if elements.dim() == 5:
        return LayerCache(elements[:, 0], elements[:, 1])
    rows = elements.transpose(1, 2)
    codes = rows[..., :head_size], rows[..., head_size : 2 * head_size]
    if stored != torch.int8:
        return LayerCache(*codes)
    first = int8_scales_at(head_size)
    scales = rows[..., first : first + 8].view(torch.float32)
    return LayerCache(*codes, scales[..., :1], scales[..., 1:], "int8")
