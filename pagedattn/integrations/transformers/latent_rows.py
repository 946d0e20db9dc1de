"""Latent attention (MLA) over rows: a module of transformers that hands its rows to attention as they are.

transformers' latent modules keep rows in the cache and expand them to keys and values of every head in a method of
their own, `expand_kv`, right before attention. Where that gives the rows back unchanged, everything else stays the
module's: projections, norms, rotation, scale, gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import Attention, LayerCache, MLAAttention, StepMetadata
from ...errors import UnsupportedError
from .attention import NAME

_METHOD = "expand_kv"


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that expand latent rows."""
    return (module for module in model.modules() if hasattr(type(module), _METHOD))


def keep_rows(model: nn.Module) -> None:
    """Have the latent modules give their rows, latent [B, 1, S, L] and k_pe [B, 1, S, R], for keys and values."""
    for module in latent_modules(model):
        setattr(module, _METHOD, partial(_rows_as_they_are, module))


def expand_rows(model: nn.Module) -> None:
    """Undo `keep_rows`; without effect where nothing is to be undone."""
    for module in latent_modules(model):
        vars(module).pop(_METHOD, None)


def _rows_as_they_are(module: Any, latent: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Other attention, which the model may be set to while it is enabled, knows keys and values only.
    if module.config._attn_implementation == NAME:
        return latent, k_pe
    return type(module).expand_kv(module, latent, k_pe)


def up_projection(module: Any) -> nn.Linear:
    """The layer from whose weight [H * (N + V), L] a module's W_UK and W_UV are views.

    Raises:
        UnsupportedError: it is not the weight of a plain linear layer (an adapter, a quantised one).
    """
    linear = getattr(module, "kv_b_proj", None)
    if type(linear) is not nn.Linear:
        raise UnsupportedError(
            f"kv_b_proj of {type(module).__name__} is a {type(linear).__name__}, whose weight is not the matrix that "
            "rows are multiplied with; where an adapter was added, enable(model) again"
        )
    return linear


def run_layer(
    layer: Attention | MLAAttention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache | None,
    metadata: StepMetadata,
) -> torch.Tensor:
    """query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, Dv] to [T, Hq, Dv]; of a latent layer the key is its latent
    [T, 1, L], the value its k_pe [T, 1, R]."""
    if isinstance(layer, Attention):
        return layer(query, key, value, cache, metadata)
    weights = layer.split_kv_b(up_projection(module).weight)
    parts = query.split((layer.dims.nope, layer.dims.rope), -1)
    return layer(*parts, key[:, 0], value[:, 0], *weights, cache, metadata)


def value_dim(layer: Attention | MLAAttention) -> int:
    """Elements of a head of the layer's output."""
    return layer.spec.value_dim if isinstance(layer, Attention) else layer.dims.value
