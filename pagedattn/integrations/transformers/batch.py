"""One forward of a padded batch: which of its columns are tokens, and the metadata that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ... import CommonAttentionMetadata, LayerCache, StepMetadata, plan_step
from .attention import AttentionCall, Layers, layer_of
from .latent_rows import run_layer, value_dim


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One forward of B rows and S columns, for all layers of a model.

    `tokens` are the places of the T tokens among the B * S columns, in order; None: every column holds a token.
    """

    layers: Layers
    caches: Sequence[LayerCache] | None
    metadata: StepMetadata
    tokens: torch.Tensor | None

    @classmethod
    def of_tokens(
        cls,
        layers: Layers,
        caches: Sequence[LayerCache] | None,
        common: CommonAttentionMetadata,
        real: np.ndarray | None,
    ) -> BatchStep:
        """`real` [B, S] says which columns hold tokens; None: all do."""
        tokens = None
        if real is not None:
            tokens = torch.from_numpy(np.flatnonzero(real)).to(common.seq_lens.device)
        return cls(layers, caches, plan_step((layer for _, layer in layers.values()), common), tokens)

    def attend(
        self,
        module: torch.nn.Module,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `Attends`; `sinks` are those that the layer was built with. What stands at padding is zero."""
        layer = layer_of(self.layers, module, call, mask, sinks)
        rows, columns, dtype = query.shape[0], query.shape[2], layer.spec.dtype
        if self.tokens is not None and not len(self.tokens):  # padding alone; the cache may have no memory yet
            return value.new_zeros(rows, columns, call.num_heads, value_dim(layer))
        q, k, v = (self._packed(x, dtype) for x in (query, key, value))
        cache = None if self.caches is None else self.caches[call.layer]
        out = run_layer(layer, module, q, k, v, cache, self.metadata)
        if self.tokens is not None:
            out = out.new_zeros(rows * columns, *out.shape[1:]).index_copy_(0, self.tokens, out)
        if out.dtype != value.dtype:
            out = out.to(value.dtype)
        return out.view(rows, columns, *out.shape[1:])

    def _packed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, H, S, D] to [T, H, D]."""
        x = x.select(2, 0) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        if self.tokens is not None:
            x = x.index_select(0, self.tokens)
        if x.dtype != dtype:
            x = x.to(dtype)
        return x if x.stride(-1) == 1 else x.contiguous()
