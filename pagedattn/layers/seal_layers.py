"""seal_layers: encode the blocks that a step filled in all layers at once, after the layers' calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import torch

from ..formats.base import LayerCache
from .attention import Attention
from .plan_step import StepMetadata


def seal_layers(layers: Sequence[Attention], caches: Sequence[LayerCache], metadata: StepMetadata) -> None:
    """Encode the blocks that a step's rows filled in all layers, after the layers' calls; `metadata.seals_at_end` says
    of which steps it may be done so late.

    One launch for layers whose caches lie at equal distances, as those of a PagedKVCache do, else one for each. Nothing
    of caches whose format stores each token.

    Args:
        layers, caches: the model's attention layers, which were called without keys as `Attention.seal` says, and what
            each was called with.
    """
    if torch.compiler.is_dynamo_compiling():  # which traces neither ids nor addresses
        for layer, cache in zip(layers, caches, strict=True):
            if cache.recent is not None:
                layer.seal(cache, metadata)
        return
    kinds: dict[int, list[tuple[Attention, LayerCache]]] = {}
    for layer, cache in zip(layers, caches, strict=True):
        if cache.recent is not None:
            kinds.setdefault(id(metadata.of(layer.plan_key)), []).append((layer, cache))
    for kind in kinds.values():
        together = _stacked([cache for _, cache in kind])
        for layer, cache in kind if together is None else [(kind[0][0], together)]:
            layer.seal(cache, metadata)


def _stacked(caches: Sequence[LayerCache]) -> LayerCache | None:
    """Caches as one, whose planes [L, P, S, Hkv, n] are views of theirs; None of caches that are not alike, or not at
    equal distances in one allocation."""
    first, parts = caches[0], dict[str, object]()
    if first.layout is None or any(cache.layout is not first.layout for cache in caches):
        return None
    for field in fields(first):
        part = getattr(first, field.name)
        if isinstance(part, torch.Tensor):
            parts[field.name] = _in_one([getattr(cache, field.name) for cache in caches])
        elif isinstance(part, LayerCache):
            parts[field.name] = _stacked([cache.recent for cache in caches if cache.recent is not None])
    return None if None in parts.values() else replace(first, **parts)


def _in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of tensors of one shape, dtype and strides."""
    first, starts = tensors[0], [tensor.data_ptr() for tensor in tensors]
    distances = {end - start for start, end in pairwise(starts)} or {0}
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    distance, rest = divmod(min(distances), first.element_size())
    if len(distances) > 1 or len(storages) > 1 or distance < 0 or rest:
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))
