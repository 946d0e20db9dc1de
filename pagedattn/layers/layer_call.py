"""LayerCall: what a step's first layer of a kind did, validated and with care, done again by the other layers.

A layer's checks (PAGEDATTN_CHECK=1) and a backend's choices depend on the metadata, the layer's spec and its tensors'
layout, and on nothing else of them. So a call is kept in the metadata under that layout, and where one is found, what
remains is to allocate the output and to launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formats.base import LayerCache
from ..ops.attention_replay import AttentionReplay
from ..ops.write_replay import WriteReplay
from ..runtime.eager import unwatched
from ..spec import Scale

_MOST_CALLS = 64  # of one metadata; those of a CUDA graph live long
_Tensor = torch.Tensor
Extras = tuple[torch.Tensor | None, torch.Tensor | None, Scale, Scale]  # sinks, slopes, k_scale, v_scale


class LayerCall(NamedTuple):
    """A call over a cache; `write` is None where it had no key."""

    write: WriteReplay | None
    attend: AttentionReplay
    empty: Callable[[torch.Tensor], torch.Tensor]

    def again(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        out: torch.Tensor | None,
        extras: Extras,
    ) -> torch.Tensor | None:
        """The output, for tensors of the layout under which this call was kept; None where it takes a call with care
        (which writes the same once more)."""
        keys, values = kv_cache.key, kv_cache.value
        if self.write is not None and key is not None:
            target = None if value is None else values
            if not self.write(key, value, keys, target, slot_mapping, extras[2], extras[3]):
                return None
        if out is None:
            out = self.empty(query)
        return out if self.attend(query, keys, values, out, *extras) else None


def layout_of(
    kind: object,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: LayerCache,
    out: torch.Tensor | None,
    extras: Extras,
) -> tuple[object, ...] | None:
    """All that a call depends on but its metadata; None where torch has to see its ops, or for an `out` of other rank.

    Args:
        kind: one object for all layers of one plan key.
    """
    cache = kv_cache.layout
    if type(query) is not _Tensor or cache is None or not unwatched():
        return None
    about = [kind, cache, query.shape, query.stride(), query.dtype, query.device]
    for tensor in (key, value, out):
        if tensor is None:
            about.append(None)
        elif type(tensor) is _Tensor:
            about += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        else:
            return None
    if out is not None and out.dim() != query.dim():
        return None
    sinks, slopes, k_scale, v_scale = extras
    if not (sinks is None and slopes is None and k_scale is None and v_scale is None):
        for extra in extras:
            if not isinstance(extra, _Tensor):
                about.append(type(extra))
            elif extra.is_contiguous():
                about += (extra.shape, extra.dtype, extra.device)
            else:
                return None
    return tuple(about)


def keep(
    calls: dict[object, LayerCall],
    layout: tuple[object, ...],
    write: WriteReplay | None,
    attend: AttentionReplay,
    query: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Remember a call under its layout; `out` is what was allocated for, or given with, `query`."""
    sizes, about = (out.shape, out.stride()), {"dtype": out.dtype, "device": out.device}
    like = sizes == (query.shape, query.stride())
    if len(calls) >= _MOST_CALLS:
        calls.clear()
    calls[layout] = LayerCall(
        write, attend, torch.empty_like if like else lambda _: torch.empty_strided(*sizes, **about)
    )
