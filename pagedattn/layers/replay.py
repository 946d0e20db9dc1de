"""A layer's call made again by the other layers of a step, without checks and without a look at their tensors.

A layer's checks (PAGEDATTN_CHECK=1) and its launches depend on the step's plan, the layer's spec and the layout of its
tensors, and on nothing else of them. So the launches of a call are recorded and kept in the plan under that layout;
where they are found, what remains is to allocate the output and to launch. That is so only where the plan is all that
attention does (`AttentionMetadata.repeated`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import ops
from ..backends.base import AttentionImpl, AttentionMetadata
from ..call import AttentionCall
from ..formats.base import LayerCache
from ..formats.fp8.format import is_scale
from ..runtime.eager import can_bypass_dispatcher
from ..runtime.op_registry import load
from ..spec import Scale

if TYPE_CHECKING:
    from ..runtime.launcher import Replay

_MOST_CALLS = 64  # of one plan. None is given up for another: a CUDA graph may write to memory that it holds
_Tensor = torch.Tensor


class Recorded(NamedTuple):
    """A call over a cache. write: None where there was no key, or where the backend writes itself each time."""

    write: Replay | None
    attend: Replay
    scale: float  # of the softmax, without a host float of k_scale
    empty: Callable[[torch.Tensor], torch.Tensor]

    def again(self, impl: AttentionImpl, call: AttentionCall, slot_mapping: torch.Tensor) -> torch.Tensor | None:
        """The output, for tensors of the layout under which this call was kept, heads apart or flat; None where it
        takes a call with all checks (which writes the same once more)."""
        query, cache, key, _, out, _, sinks, slopes, k_scale, v_scale = call
        if cache is None:
            return None
        if key is not None:
            if self.write is None:
                _write_kv(impl, call, cache, slot_mapping)
            elif not _write_again(self.write, call, cache, slot_mapping):
                return None
        if out is None:
            out = self.empty(query)
        q, k, v, o = query.data_ptr(), cache.key.data_ptr(), cache.value.data_ptr(), out.data_ptr()
        ks, vs = _second_planes(cache)
        rk, rv = (0, 0) if cache.recent is None else (cache.recent.key.data_ptr(), cache.recent.value.data_ptr())
        aligned, planes = q | k | v | o | ks | vs | rk | rv, (ks, vs, None, None, rk, rv)
        if sinks is None and slopes is None and k_scale is None and v_scale is None:
            values = (q, k, v, o, None, None, None, None, self.scale, 1.0, *planes)
            return out if self.attend(aligned, values) else None
        if not (_is_valid(k_scale) and _is_valid(v_scale)):
            return None
        sink, slope = (0 if x is None else x.data_ptr() for x in (sinks, slopes))
        (k_address, k_number), (v_address, v_number) = _scale_values(k_scale), _scale_values(v_scale)
        values = (q, k, v, o, sink, slope, k_address, v_address, self.scale * k_number, v_number, *planes)
        return out if self.attend(aligned | sink | slope | k_address | v_address, values) else None


def layout_of(kind: object, call: AttentionCall) -> tuple[object, ...] | None:
    """All that a call depends on but its plan; None where torch has to see its ops, or for an `out` of other rank.

    Args:
        kind: one object for all layers of one plan key.
    """
    query, cache, key, value, out, _, sinks, slopes, k_scale, v_scale = call
    layout = getattr(cache, "layout", None)
    if type(query) is not _Tensor or layout is None or not can_bypass_dispatcher():
        return None
    about = [kind, layout, query.shape, query.stride(), query.dtype, query.device]
    for tensor in (key, value, out):
        if tensor is None:
            about.append(None)
        elif type(tensor) is _Tensor:
            about += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        else:
            return None
    if out is not None and out.dim() != query.dim():
        return None
    if not (sinks is None and slopes is None and k_scale is None and v_scale is None):
        for extra in (sinks, slopes, k_scale, v_scale):
            if not isinstance(extra, _Tensor):
                about.append(type(extra))
            elif extra.is_contiguous():
                about += (extra.shape, extra.dtype, extra.device)
            else:
                return None
    return tuple(about)


def run_and_keep(
    impl: AttentionImpl, call: AttentionCall, metadata: AttentionMetadata, given: torch.Tensor, layout: object
) -> torch.Tensor:
    """Write and attend, and keep the launches under the layout where the plan is all that was done. Not for keys that
    are given with a cache that has a second one: they are to be encoded there, which no plan has launches of.

    Args:
        call: with heads apart. given: the query as it came, flat or not.
    """
    plan, cache = metadata.repeated, call.kv_cache
    if plan is None or cache is None:
        raise ValueError("run_and_keep takes a call over a cache and metadata with a plan")
    slots, before = metadata.common.slot_mapping, plan.executions
    with load("runtime.launcher").recording() as made:
        written, count = _write_kv(impl, call, cache, slots), len(made)
        out = impl.forward(call, metadata)
        attends = made[count:]
    once = plan.executions == tuple(count + 1 for count in before)
    given_to = (call.query, cache.key, cache.value, out, call.sinks, call.alibi_slopes, call.k_scale, call.v_scale)
    bases = (*given_to, None, None, cache.key_scale, cache.value_scale, None, None)  # in the order of VARYING
    bases = tuple(x if isinstance(x, _Tensor) else None for x in bases)
    others = () if cache.recent is None else (cache.recent.key, cache.recent.value)
    places = [None if one is None else one.places(bases, others) for one in attends]
    kept = layout in plan.calls or len(plan.calls) >= _MOST_CALLS
    if once and not kept and len(attends) == plan.num_launches and None not in places:
        again = load("runtime.launcher").Replay
        write = again(made[:1]) if written and count == 1 and made[0] is not None and made[0].repeatable() else None
        result = out.flatten(1) if given.dim() == 2 else out
        plan.calls[layout] = Recorded(write, again(attends, places), impl.spec.softmax_scale, _allocates(given, result))
    return out


def split_heads(tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[T, H * D] as [T, H, D]; three dimensions stay as they are."""
    if tensor.dim() == 2 and tensor.shape[1] == heads * dim:
        return tensor.unflatten(1, (heads, dim))
    return tensor


def _write_kv(impl: AttentionImpl, call: AttentionCall, cache: LayerCache, slots: torch.Tensor) -> bool:
    """Whether it was by the op alone, with nothing around its one launch, where it is one."""
    spec, key, value = impl.spec, call.key, call.value
    if key is None:
        return False
    key = split_heads(key, spec.kv_heads, spec.head_dim)
    value = None if value is None else split_heads(value, spec.kv_heads, spec.value_dim)
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    if getattr(impl.write_kv, "__func__", None) is not AttentionImpl.write_kv:
        impl.write_kv(key, value, cache, slots, **scales)
        return False
    target = None if value is None else cache.value
    tensors = (key, cache.key, slots) if value is None else (key, value, cache.key, cache.value, slots)
    # Made again, Triton's launch takes the host a fifth of what the extension's op does, and the device as long as that
    # (bench/results/h200/host_cost.json, op_paths.json).
    repeatable = key.device.type == "cuda" and load("runtime.launch_abi").KNOWN
    path = "triton" if repeatable and not any(x.data_ptr() & 15 for x in tensors) else "auto"
    ops.reshape_and_cache(key, value, cache.key, target, slots, path=path, **scales, **cache.stored)
    return slots.is_contiguous() and key.dtype != torch.float64 and all(x.numel() for x in tensors)


def _write_again(write: Replay, call: AttentionCall, cache: LayerCache, slots: torch.Tensor) -> bool:
    _, _, key, value, _, _, _, _, k_scale, v_scale = call
    if key is None:
        return False
    k, kc, s = key.data_ptr(), cache.key.data_ptr(), slots.data_ptr()
    v, vc = (0, 0) if value is None else (value.data_ptr(), cache.value.data_ptr())
    ks, vs = _second_planes(cache)
    if k_scale is None and v_scale is None:
        return write(k | v | kc | vc | s | ks | vs, (k, v, kc, vc, s, None, None, 1.0, 1.0, ks, vs))
    if not (_is_valid(k_scale) and _is_valid(v_scale)):
        return False
    (k_address, k_number), (v_address, v_number) = _scale_values(k_scale), _scale_values(v_scale)
    values = (k, v, kc, vc, s, k_address, v_address, k_number, v_number, ks, vs)
    return write(k | v | kc | vc | s | k_address | v_address | ks | vs, values)


def _second_planes(cache: LayerCache) -> tuple[int, int]:
    """Addresses of the cache's own scales, 0 where there are none."""
    k, v = cache.key_scale, cache.value_scale
    return 0 if k is None else k.data_ptr(), 0 if v is None else v.data_ptr()


def _scale_values(scale: Scale) -> tuple[int, float]:
    """A scale's address (0 where it is no tensor) and its number (1.0 where it is none)."""
    if isinstance(scale, _Tensor):
        return scale.data_ptr(), 1.0
    return 0, 1.0 if scale is None else float(scale)


def _is_valid(scale: Scale) -> bool:
    return scale is None or isinstance(scale, _Tensor) or is_scale(scale)


def _allocates(query: torch.Tensor, out: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes an output as this one for a query as this one."""
    sizes, about = (out.shape, out.stride()), {"dtype": out.dtype, "device": out.device}
    if sizes == (query.shape, query.stride()):
        return torch.empty_like
    return lambda _: torch.empty_strided(*sizes, **about)
