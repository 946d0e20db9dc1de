"""StepMetadata: one step's metadata for every (KV group, spec) of a model, built once and shared by its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .. import env
from ..backends.base import AttentionMetadata, AttentionMetadataBuilder
from ..errors import InvalidInputError
from ..spec import AttentionSpec
from ..step.bounds import check_bounds
from ..step.metadata import CommonAttentionMetadata

Key = tuple[int, AttentionSpec, str]  # KV group, spec, name of the backend


class PlannedLayer(Protocol):
    """What a layer shows of itself to be planned."""

    @property
    def kv_group(self) -> int: ...

    @property
    def plan_key(self) -> Key: ...

    @property
    def builder(self) -> AttentionMetadataBuilder: ...


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What `Attention.forward` takes: metadata by KV group, spec and backend."""

    by_key: Mapping[Key, AttentionMetadata]
    # By the key object that a layer has, which it keeps: hashing a spec takes 5 us, in every layer's call.
    _by_object: dict[int, tuple[Key, AttentionMetadata]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, key: Key) -> AttentionMetadata:
        """The metadata for one layer's key."""
        by_object = not torch.compiler.is_dynamo_compiling()  # which traces no id() of a tuple before torch 2.13
        known = self._by_object.get(id(key)) if by_object else None
        if known is not None:
            return known[1]
        found = self.by_key.get(key)
        if found is None:
            groups = sorted({key[0] for key in self.by_key})
            raise InvalidInputError(
                "metadata",
                f"planned for KV group {key[0]} and this layer's spec",
                f"a plan of groups {groups}",
                "pass every layer of the model to plan_step",
            )
        if by_object:
            self._by_object[id(key)] = key, found
        return found

    @property
    def shares_prefix(self) -> bool:
        """Whether any layer reads the keys that all sequences share once, as `AttentionMetadata.shares_prefix`."""
        return any(metadata.shares_prefix for metadata in self.by_key.values())

    @property
    def seals_at_end(self) -> bool:
        """Whether blocks that the step fills may be encoded after all layers' calls (`seal_layers`): where no sequence
        has more than one new token, no query reads one encoded, unless it is another sequence's by then; that is so
        only where blocks are shared before the step that fills them."""
        return all(metadata.common.max_query_len <= 1 for metadata in self.by_key.values())

    def describe(self) -> str:
        """Which kernels run, a line per KV group and spec."""
        return "\n".join(f"group {group}: {name}: {m.describe()}" for (group, _, name), m in self.by_key.items())


def plan_step(
    layers: Iterable[PlannedLayer],
    common_by_group: Mapping[int, CommonAttentionMetadata] | CommonAttentionMetadata,
    into: StepMetadata | None = None,
    capture: bool = False,
) -> StepMetadata:
    """Build metadata once for each (KV group, spec) among `layers`.

    Args:
        layers: the model's attention layers.
        common_by_group: one CommonAttentionMetadata per KV group, or one for group 0 alone.
        capture: make static buffers that a CUDA graph may record.
        into: such a plan of the same layers, rewritten in place for a replay.

    A backend may share a workspace between what was planned on one stream, and between captured plans: run those one
    after another.

    Raises:
        InvalidInputError: a layer's KV group is not in `common_by_group`.
        UnsupportedError, CapacityError: the step cannot be captured, or is larger than what was.
    """
    by_group = {0: common_by_group} if isinstance(common_by_group, CommonAttentionMetadata) else common_by_group
    out: dict[Key, AttentionMetadata] = {}
    known: dict[int, Key] = {}  # by identity: layers of one kind mostly have one key object, and a spec is slow to hash
    for layer in layers:
        key = layer.plan_key
        if not torch.compiler.is_dynamo_compiling():
            if id(key) in known:
                continue
            known[id(key)] = key
        if key in out:
            continue
        if layer.kv_group not in by_group:
            raise InvalidInputError("common_by_group", f"an entry for KV group {layer.kv_group}", sorted(by_group))
        old = into.by_key.get(key) if into is not None else None
        if old is None and env.check_level() and not torch.compiler.is_compiling():
            check_bounds(by_group[layer.kv_group])
        out[key] = layer.builder.build(by_group[layer.kv_group], old, capture)
    return StepMetadata(out)
