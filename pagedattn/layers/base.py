"""PagedLayer: what attention layers share. Backends are chosen anew when one moves, and steps are planned for it."""

from __future__ import annotations

import torch
from torch import nn

from .. import env
from ..backends.base import AttentionMetadata, AttentionMetadataBuilder
from ..backends.selector import Selection
from ..spec import AttentionSpec
from ..step.bounds import check_bounds
from ..step.metadata import CommonAttentionMetadata
from .plan_step import Key


class PagedLayer(nn.Module):
    """A layer over a paged KV cache. Subclasses choose backends in `_resolve`, and make `builder` on first use."""

    _anchor: torch.Tensor
    _base: AttentionSpec
    _kv_group: int
    _plan_key: Key
    selection: Selection

    def _anchor_to(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        """An empty buffer, which follows .to() and so says which dtype and device the layer now has."""
        self.register_buffer("_anchor", torch.empty(0, dtype=dtype, device=device), persistent=False)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        self._resolve()
        return self

    def _resolve(self) -> None:
        """Choose the backends for the dtype and device that the layer has now."""
        raise NotImplementedError

    def _spec_here(self) -> AttentionSpec:
        """The layer's spec for the dtype and device that it has now."""
        device = self._anchor.device
        return self._base.replace(
            dtype=self._anchor.dtype,
            device_type="cpu" if device.type == "meta" else device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        )

    @property
    def spec(self) -> AttentionSpec:
        """What this layer asks of a backend; of a latent one, the absorbed form."""
        return self.selection.spec

    @property
    def kv_group(self) -> int:
        """Whose block table this layer uses."""
        return self._kv_group

    @property
    def plan_key(self) -> Key:
        """Layers with equal keys share metadata."""
        return self._plan_key

    @property
    def builder(self) -> AttentionMetadataBuilder:
        """The metadata builder, made on first use."""
        raise NotImplementedError

    def build(self, common: CommonAttentionMetadata, capture: bool = False) -> AttentionMetadata:
        """This layer's metadata for a step. For a whole model, `plan_step` builds once per kind of layer."""
        if env.check_level() and not torch.compiler.is_compiling():
            check_bounds(common)
        return self.builder.build(common, None, capture)
