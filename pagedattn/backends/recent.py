"""Attention over two caches: full blocks as their format encodes them, and recent ones in the model's dtype.

A query at position p reads its own block (p // S), and of a format with a window as many before it as hold the window,
as they came, and the blocks before those as they are encoded, but for the first ones of a format that keeps them. That
depends on nothing but p, so that neither chunks, drafts that are taken back, nor a prefix that is found change a
result. So a step writes its rows to the second cache, encodes the blocks that they fill or put behind the window, and
then attends to both, by two calls or three with a mask each, which add to one output or leave states to be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from .. import ops
from ..call import AttentionCall, lse_dtype
from ..errors import InvalidInputError, UnsupportedError
from ..formats.base import LayerCache
from ..ops.launch_plan import LaunchPlan, RepeatedPlan
from ..spec import AttentionSpec, Scale
from ..step.metadata import CommonAttentionMetadata
from .base import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    check_matches_spec,
    clone_for_capture,
    copy_into_captured,
)

# Of sums in float32; those of longer steps are rounded between the calls, as outputs are, unless a token's bits must
# not depend on its step.
_MOST_BYTES = 64 << 20
_REMEDY = "build the cache by PagedKVCache(..., recent_blocks=) and pass cache.layer(i)"


@dataclass(slots=True, eq=False)
class PartsPlan:
    """The plans of all calls, as a layer asks of one by which its calls are made again."""

    parts: tuple[LaunchPlan, ...]
    calls: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def executions(self) -> tuple[int, ...]:
        return tuple(part.executed for part in self.parts)

    @property
    def num_launches(self) -> int:
        """0 where a part's launches are not all that it does, or states are merged."""
        counts = [part.num_launches for part in self.parts]
        return sum(counts) if all(counts) and _first_of(part.accumulates for part in self.parts) is not None else 0


@dataclass(slots=True)
class RecentMetadata(AttentionMetadata):
    """Of all calls. `common` has the slots of the second cache, where new rows are written.

    calls: over full blocks, over open ones, and over first ones where the format keeps these; None of a step without a
        `recent_table`, which has no cache.
    dense: plans the step for keys that come with the call, which are not stored.
    together: the plans of all calls, where each has one.
    """

    calls: tuple[AttentionMetadata, ...] | None
    dense: Callable[[], AttentionMetadata]
    captured: bool = False
    together: PartsPlan | None = None

    @property
    def repeated(self) -> RepeatedPlan | None:
        return self.together

    @property
    def shares_prefix(self) -> bool:
        return self.calls is not None and any(call.shares_prefix for call in self.calls)

    def describe(self) -> str:
        if self.calls is None:
            return f"no cache: {self.dense().describe()}"
        parts = zip(("full blocks", "open blocks", "first blocks"), self.calls, strict=False)
        return "; ".join(f"{name}: {call.describe()}" for name, call in parts)


class RecentBuilder(AttentionMetadataBuilder):
    """Plans all calls, and says where new rows go."""

    def __init__(
        self, make: Callable[[AttentionSpec], AttentionMetadataBuilder], spec: AttentionSpec, device: torch.device
    ) -> None:
        super().__init__(spec, device)
        self._sealed, *self._recent = (make(part) for part in _parts(spec))
        self._dense = make(_dense(spec))

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        plan_dense = cache(lambda: self._dense.build(common))
        if isinstance(into, RecentMetadata) and into.calls is not None:
            if common.recent_table is None:
                raise _without_table(self.spec)
            copy_into_captured(into.common, common)
            mine = into.common.replace(**{name: getattr(common, name) for name in _BOUNDS})
            self._sealed.build(mine.replace(shared_prefix_len=common.shared_prefix_len), into.calls[0])
            for one, call in zip(self._recent, into.calls[1:], strict=True):
                one.build(_of_recent(mine), call)
            self._update(into, common.slot_mapping)
            return into
        if common.recent_table is None:
            return RecentMetadata(common.replace(slot_mapping=common.slot_mapping[:0]), None, plan_dense, capture)
        mine = clone_for_capture(common) if capture else common
        mine = mine.replace(slot_mapping=torch.empty_like(mine.slot_mapping))
        sealed = self._sealed.build(mine.replace(shared_prefix_len=common.shared_prefix_len), None, capture)
        recent = [one.build(_of_recent(mine), None, capture) for one in self._recent]
        if capture:  # what is written to the one is read by all
            sealed.common = mine.replace(num_decodes=sealed.common.num_decodes)
            for call in recent:
                call.common = _of_recent(sealed.common)
        plans = tuple(one.plan for one in (sealed, *recent) if one.plan is not None)
        together = PartsPlan(plans) if len(plans) == 1 + len(recent) else None
        built = RecentMetadata(mine, (sealed, *recent), plan_dense, capture, together)
        self._update(built, common.slot_mapping)
        return built

    def _update(self, metadata: RecentMetadata, slot_mapping: torch.Tensor) -> None:
        """`device_update`, and no slot for rows that have none in the first cache."""
        self.device_update(metadata)
        slots = metadata.common.slot_mapping
        if slots is not slot_mapping:
            slots[: len(slot_mapping)].masked_fill_(slot_mapping < 0, -1)

    def device_update(self, metadata: AttentionMetadata) -> None:
        """As of every builder. Of rows that are not to be written it knows padding behind the last sequence alone."""
        table, size = metadata.common.recent_table, self.spec.block_size
        if not isinstance(metadata, RecentMetadata) or metadata.calls is None or table is None or size is None:
            return
        common = metadata.common
        ops.compute_slot_mapping(table, size, common.query_start_loc, common.seq_lens, common.slot_mapping)
        for one, call in zip((self._sealed, *self._recent), metadata.calls, strict=True):
            one.device_update(call)


class RecentImpl(AttentionImpl):
    """Runs all calls of a backend, or of two, of which kernels that can add to what the one before left."""

    def __init__(self, make: Callable[[AttentionSpec], AttentionImpl], spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._sealed, self._recent, *self._first = (make(part) for part in _parts(spec))
        self._dense = make(_dense(spec))

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Write to slots of the second cache, which are those of the metadata's `common`."""
        self._recent.write_kv(key, value, _recent_of(kv_cache), slot_mapping)

    def seal(self, kv_cache: LayerCache, metadata: AttentionMetadata) -> None:
        common, recent = metadata.common, _recent_of(kv_cache)
        if common.recent_table is None:
            raise _without_table(self.spec)
        ops.seal_blocks(
            recent.key,
            recent.value,
            common.recent_table,
            kv_cache.key,
            kv_cache.value,
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            max_query_len=common.max_query_len,
            kv_cache_dtype=self.spec.kv_cache_dtype,
            k_scale_cache=kv_cache.key_scale,
            v_scale_cache=kv_cache.value_scale,
        )

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        if not isinstance(metadata, RecentMetadata):
            raise InvalidInputError("metadata", "of two caches", type(metadata).__name__, "build it with the layer")
        if call.kv_cache is None:
            if metadata.captured:
                raise UnsupportedError("capture without a KV cache takes a layer of kv_cache_dtype='auto'; build one")
            return self._dense.forward(call, metadata.dense())
        check_matches_spec(self.spec, call)
        if metadata.calls is None:
            raise _without_table(self.spec)
        dim = self.spec.value_dim
        recent = call._replace(kv_cache=_recent_of(call.kv_cache))
        # A sink joins the denominator once: here with the keys that every query has one of at least, its own.
        calls = [call._replace(sinks=None), recent, *[recent._replace(sinks=None)] * len(self._first)]
        parts = list(zip((self._sealed, self._recent, *self._first), calls, metadata.calls, strict=True))
        first = _first_of(impl.accumulates(step) for impl, _, step in parts)
        return _merge(parts, call, dim) if first is None else _add_up([parts.pop(first), *parts], call, dim)


def _first_of(adding: Iterable[bool]) -> int | None:
    """Which call is to be the first, to whose outputs the others add, as they all must be able to; None of none."""
    able = list(adding)
    return next((at for at in (1, 0) if all((*able[:at], *able[at + 1 :]))), None)


_Part = tuple[AttentionImpl, AttentionCall, AttentionMetadata]


def _add_up(parts: Sequence[_Part], call: AttentionCall, dim: int) -> torch.Tensor:
    """Attend by the first part, and add what the others attend to; in float32, rounded once, where there is room."""
    out, lse = call.output(dim), call.lse
    if lse is None:
        lse = call.query.new_empty(call.query.shape[:2], dtype=lse_dtype(call.query.dtype))
    (impl, first, step), *others, (last, own, own_step) = parts
    prior = None
    if out.dtype != lse.dtype and (impl.spec.deterministic or out.numel() * lse.itemsize <= _MOST_BYTES):
        prior = torch.empty(out.shape, dtype=lse.dtype, device=out.device)
    sums = out if prior is None else prior
    impl.forward(first._replace(out=sums, lse=lse), step)
    for impl, other, step in others:
        impl.accumulate(other._replace(out=sums, lse=lse), step)
    last.accumulate(own._replace(out=out, lse=lse), own_step, prior)
    return out


def _merge(parts: Sequence[_Part], call: AttentionCall, dim: int) -> torch.Tensor:
    """Attend by each part apart, and merge what they leave."""
    states = call.query.new_empty(len(parts), *call.query.shape[:2], dim)
    lses = call.query.new_empty(states.shape[:3], dtype=lse_dtype(call.query.dtype))
    for (impl, one, step), out, lse in zip(parts, states, lses, strict=True):
        impl.forward(one._replace(out=out, lse=lse), step)
    out, lse = ops.merge_attn_states(states, lses, out=call.output(dim))
    if call.lse is not None:
        call.lse.copy_(lse)
    return out


_BOUNDS = ("num_seqs", "num_tokens", "max_query_len", "max_seq_len", "num_decodes")


def _parts(spec: AttentionSpec) -> list[AttentionSpec]:
    """Of the call over full blocks, of that over recent ones, and where the format keeps first ones, of that."""
    size = spec.block_size
    before, first = (None, None) if size is None else (spec.format.recent_blocks(size), spec.format.first_blocks(size))
    given = {"recent_blocks": before or None, "needs_lse": True}
    earlier = spec.replace(earlier_blocks=size, has_sinks=False, **given)
    recent = spec.replace(kv_cache_dtype="auto", own_block=size, **given)
    if not first:
        return [earlier, recent]
    kept = earlier.replace(kv_cache_dtype="auto", to_block=first)
    return [earlier.replace(from_block=first), recent, kept]


def _dense(spec: AttentionSpec) -> AttentionSpec:
    """Of keys that come with the call."""
    return spec.replace(kv_cache_dtype="auto")


def _of_recent(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The same step over the second cache."""
    table = common.block_table if common.recent_table is None else common.recent_table
    return common.replace(block_table=table, recent_table=None, shared_prefix_len=0)


def _without_table(spec: AttentionSpec) -> InvalidInputError:
    expected, remedy = f"given for a cache of kv_cache_dtype={spec.kv_cache_dtype!r}", "pass it to from_lengths"
    return InvalidInputError("recent_table", expected, "None", remedy)


def _recent_of(kv_cache: LayerCache) -> LayerCache:
    if kv_cache.recent is None:
        raise InvalidInputError("kv_cache", f"a cache of {kv_cache.format} with `recent`", "None", _REMEDY)
    return kv_cache.recent
