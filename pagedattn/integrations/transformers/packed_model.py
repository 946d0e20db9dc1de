"""PackedModel: a transformers decoder that takes the rows of a continuous batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import (
    Attention,
    FullAttentionSpec,
    KVCacheDtype,
    LayerCache,
    MLAAttention,
    MLASpec,
    PagedKVCache,
    SlidingWindowSpec,
    StepMetadata,
)
from .attention import register as register_attention
from .hand_on import probe_handing_on
from .head import decoder_of, without_decoder
from .latent_probe import find_latent
from .latent_rows import expand_rows
from .layers import cache_spec, keeps_rows, make_attention, with_formats
from .modalities import attention_of
from .packed_step import ForwardContext
from .probe import Recorder
from .refusals import check_model, check_signature, refuse


class PackedModel:
    """A causal language model whose forward takes one row of tokens of many sequences, as a continuous batch is.

    Each layer's attention is a `pagedattn.Attention`, or an `MLAAttention` where it keeps latent rows; heads, scale,
    window, soft cap and sinks are those of the layer's own call. transformers builds no mask and keeps no cache.

    Attributes:
        model: the transformers model, with `attn_implementation="pagedattn"` and in eval mode from now on.
        dtype: of queries, keys and values.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int | None = None,
        backend: str | None = None,
        max_model_len: int | None = None,
        clean_cache: bool = False,
        kv_cache_dtype: str | KVCacheDtype = "auto",
        latent: bool | None = None,
    ) -> None:
        """Wrap a loaded model; runs it on two tokens to learn what its layers ask for.

        Args:
            model: a `PreTrainedModel` with a language model head, weights in place, on its device.
            block_size: tokens per block of the widest KV group; others get a multiple, see `PagedKVCache.from_specs`.
                None: 16, of formats with larger blocks (`int4`, TurboQuant) 32.
            backend: attention backend by name; None chooses.
            max_model_len: longest sequence that will be run; None is the model's own limit.
            clean_cache: blocks are zeroed when handed out (`PagedKVCache.zero_blocks`), which some backends need.
            kv_cache_dtype: format of the cache, as of `Attention`, or as `int8:skip=0,-1`.
            latent: latent attention (MLA) keeps rows, as of `enable`.

        Raises:
            UnsupportedError: transformers is missing, or the model cannot be right over a paged cache; says why.
        """
        stored = KVCacheDtype.of_model(kv_cache_dtype)
        size = stored.block_size(block_size)
        register_attention()
        check_model(model)
        refuse(type(model), model.config, max_model_len)
        self.model = model.eval()
        self.dtype: torch.dtype = model.dtype
        self._body = decoder_of(model)
        check_signature(self._body)
        self._head = without_decoder(model, self._body)
        before = attention_of(model)
        try:
            with torch.inference_mode():
                learnt, _ = probe_handing_on(model, self._split)
                learnt = find_latent(model, learnt, latent is True) if keeps_rows(latent, stored) else learnt
                self._learnt = with_formats(model, learnt, stored)
        except Exception:
            expand_rows(model)
            model.set_attn_implementation(before)
            raise
        calls = [layer.call for layer, _ in self._learnt]
        self._layers = {
            call.layer: (call, attention)
            for call, attention in zip(calls, self._attentions(size, backend, clean_cache), strict=True)
        }

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache] | None,
        metadata: StepMetadata,
    ) -> torch.Tensor:
        """input_ids and positions [T] to hidden states [T, hidden_size]; the new keys and values go to `caches`."""
        return self._run(input_ids, positions, ForwardContext(self._layers, caches, metadata))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] to [n, vocab_size] in the model's dtype, with what the model does to its logits."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def attention_layers(self) -> list[Attention | MLAAttention]:
        """The attention of every layer, in order."""
        return [attention for _, attention in self._layers.values()]

    def kv_cache_specs(self, block_size: int) -> list[FullAttentionSpec | SlidingWindowSpec | MLASpec]:
        """What every layer keeps per token, for blocks of `block_size` tokens."""
        return [cache_spec(layer, self.dtype, block_size, name) for layer, name in self._learnt]

    def _attentions(self, block_size: int, backend: str | None, clean_cache: bool) -> list[Attention | MLAAttention]:
        layout = PagedKVCache.layout_of(self.kv_cache_specs(block_size))
        return [
            make_attention(
                layer,
                self.model,
                name,
                block_size=layout.groups[layout.group_of(index)].spec.block_size,
                backend=backend,
                clean_cache=clean_cache,
                kv_group=layout.group_of(index),
            )
            for index, (layer, name) in enumerate(self._learnt)
        ]

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor, step: ForwardContext | Recorder) -> torch.Tensor:
        ids, where = input_ids.long()[None], positions.long()[None]
        return self._body(input_ids=ids, position_ids=where, use_cache=False, paged_step=step)[0][0]

    def _split(self, input_ids: torch.Tensor, positions: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        return self.logits(self._run(input_ids, positions, recorder))

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size
