"""One step of a continuous batch: many sequences in one row, which no layer tells apart but attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import LayerCache, StepMetadata
from ...errors import InvalidInputError
from .attention import AttentionCall, Layers, layer_of
from .latent_rows import run_layer


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step of many sequences in one row, for all layers of a model."""

    layers: Layers
    caches: Sequence[LayerCache] | None
    metadata: StepMetadata

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
        """As `Attends`; `sinks` are those that the layer was built with."""
        layer = layer_of(self.layers, module, call, mask, sinks)
        if len(query) != 1:
            raise InvalidInputError("input_ids", "one row [1, T] with all sequences", f"{len(query)} rows")
        # A float32 residual stream may come with a half-precision cache.
        q, k, v = (x[0].transpose(0, 1).to(layer.spec.dtype) for x in (query, key, value))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        cache = None if self.caches is None else self.caches[call.layer]
        return run_layer(layer, module, q, k, v, cache, self.metadata)[None].to(value.dtype)
