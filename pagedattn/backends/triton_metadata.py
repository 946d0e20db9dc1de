"""What TRITON plans of a step: nothing but the workspace that its decode kernel leaves partial results in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..metadata import CommonAttentionMetadata
from ..ops.launch import DecodeConfig, Launch, decode_config, launches, target_of
from ..ops.paged_attention import new_workspace
from ..spec import AttentionSpec, GraphLevel
from .base import AttentionMetadata
from .op_backend import OpMetadataBuilder


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    """A step, and the workspace of its decode launches (None where it has none): every layer's call uses it in turn.

    Metadata of one builder share a workspace, so that they are used on one stream at a time.
    """

    spec: AttentionSpec
    workspace: torch.Tensor | None

    def describe(self) -> str:
        parts = [self._describe(launch) for launch in _launches(self.spec, self.common)]
        return ", ".join(parts) or "nothing to do"

    def _describe(self, launch: Launch) -> str:
        what = f"{launch.last - launch.first} sequences"
        if not launch.decode:
            return f"prefill kernel: {what}"
        config = _config(self.spec, self.common, launch)
        shape = f"{config.programs} programs, tiles of {config.tuning.block_n} keys"
        return f"decode kernel: {what} ({shape})"


class TritonMetadataBuilder(OpMetadataBuilder):
    """Owns one workspace, grown when a step needs more; captured metadata keep the one they were captured with."""

    graph_level = GraphLevel.ALWAYS
    _room: torch.Tensor | None = None

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        built = super().build(common, into, capture)
        return built if into is not None else TritonMetadata(built.common, self.spec, self._room_for(built.common))

    def _room_for(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        decodes = [one for one in _launches(self.spec, common) if one.decode]
        if not decodes:
            return None
        needed = max(_config(self.spec, common, one).workspace for one in decodes)
        if self._room is None or self._room.numel() < needed:
            self._room = new_workspace(needed, common.seq_lens.device)
        return self._room


def _launches(spec: AttentionSpec, common: CommonAttentionMetadata) -> list[Launch]:
    facts = {"paged": spec.uses_cache, "deterministic": spec.deterministic}
    return launches(len(common.seq_lens), common.num_decodes, common.max_query_len, **facts)


def _config(spec: AttentionSpec, common: CommonAttentionMetadata, launch: Launch) -> DecodeConfig:
    shape: dict[str, Any] = {
        "num_kv_heads": spec.kv_heads,
        "group": spec.gqa_ratio,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.value_dim,
        "itemsize": spec.dtype.itemsize,
        "stored_itemsize": spec.dtype.itemsize if spec.kv_cache_dtype == "auto" else 1,
        "target": target_of(common.seq_lens.device),
    }
    bounds = {"max_query_len": launch.longest, "max_seq_len": common.max_seq_len}
    return decode_config(num_seqs=launch.last - launch.first, **shape, **bounds)
