"""AttentionCall: everything that one attention call is given besides the step's metadata."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InvalidInputError
from .formats.base import LayerCache
from .spec import Scale


class AttentionCall(NamedTuple):
    """What a layer hands to a backend's `AttentionImpl.forward`.

    query: [T, Hq, D]; rows past the last sequence are padding.
    kv_cache: the layer's cache, already written; None for dense attention over packed key and value.
    key, value: new rows [T', Hkv, D] and [T', Hkv, Dv]; what is attended to where kv_cache is None.
    out: [T, Hq, Dv] to write to; None has the backend allocate it.
    lse: [T, Hq] float32 (float64 for a float64 query) to fill with natural logarithms; None where it is not wanted.
    sinks, alibi_slopes: [Hq], exactly where the spec announces them.
    k_scale, v_scale: what stored fp8 elements are multiplied with, of the kind that spec.kv_scale announces: a host
        float, a float32 tensor of one element, or one of [Hkv]; None is 1.

    Of latent attention (`AttentionSpec.latent_dim`) the query is absorbed, [T, Hq, L + R], the cache's value is a view
    of its key, and the output is [T, Hq, L]. `k_scale`, of one element, is that of whole rows.
    """

    query: torch.Tensor
    kv_cache: LayerCache | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is attended to: the cache's views, or packed rows.

        Raises:
            InvalidInputError: there is neither a cache nor keys and values.
        """
        key, value = (self.key, self.value) if self.kv_cache is None else (self.kv_cache.key, self.kv_cache.value)
        if key is None or value is None:
            raise InvalidInputError("key and value", "given where there is no kv_cache", "None")
        return key, value

    def output(self, dim: int) -> torch.Tensor:
        """`out`, or a new [T, Hq, dim] of the query's dtype."""
        return self.query.new_empty(*self.query.shape[:2], dim) if self.out is None else self.out


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the LSE of queries of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
