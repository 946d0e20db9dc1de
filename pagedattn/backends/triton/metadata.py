"""What TRITON builds of a step: the launch plan that all layers of a kind execute, and the workspace that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...cache.specs import stored_dtype
from ...kernels.decode import cascade
from ...kernels.prefill_sm90 import plan as sm90
from ...kernels.shape import AttentionShape, BatchBounds
from ...ops.attention_plan import LaunchPlan, decode_query_len, plan_attention
from ...runtime.workspace import new_workspace
from ...spec import AttentionSpec, GraphLevel
from ...step.metadata import CommonAttentionMetadata
from ..base import AttentionMetadata
from ..op_backend import OpMetadataBuilder


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    """A step and its plan; None where a compiler traces the step, whose op then makes one.

    Metadata share a workspace with those built on the same stream, and captured ones with each other: what was built on
    one stream must not run at the same time as anything else of it on another, nor two captured steps.
    """

    plan: LaunchPlan | None

    @property
    def shares_prefix(self) -> bool:
        return self.plan is not None and self.plan.cascade is not None

    def describe(self) -> str:
        return "planned by the op" if self.plan is None else self.plan.describe()


class TritonMetadataBuilder(OpMetadataBuilder):
    """Owns a workspace per stream, and one for all that is captured; grown when a step needs more. Captured metadata
    keep the one they were captured with."""

    graph_level = GraphLevel.ALWAYS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._workspaces: dict[object, torch.Tensor] = {}

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        built = super().build(common, into, capture)
        if into is None:
            built = TritonMetadata(built.common, self._plan(built.common, common.shared_prefix_len, capture))
        elif isinstance(built, TritonMetadata) and built.plan is not None and built.plan.cascade is not None:
            built.plan.cascade.set_length(self._shareable(built.common, common.shared_prefix_len))
        self.device_update(built)
        return built

    def device_update(self, metadata: AttentionMetadata) -> None:
        if isinstance(metadata, TritonMetadata) and metadata.plan is not None:
            common = metadata.common
            metadata.plan.update(common.query_start_loc, common.seq_lens, common.block_table)

    def _plan(self, common: CommonAttentionMetadata, shared_prefix_len: int, capture: bool) -> LaunchPlan | None:
        if torch.compiler.is_dynamo_compiling():  # sizes must not become guards
            return None
        spec, device = self.spec, common.seq_lens.device
        shape, length = shape_of_spec(spec, common.block_size), self._shareable(common, shared_prefix_len)
        # Whether it pays in the steps that a captured one stands for, its caller knows.
        most = common.max_seq_len // spec.block_size * spec.block_size if capture and spec.block_size else None
        plan = plan_attention(shape, _bounds(shape, common), device, prefix_len=length, max_prefix_len=most)
        plan.allocate(device, common.block_table, length)
        plan.workspace = self._workspace(plan.workspace_size, device, capture)
        return plan

    def _shareable(self, common: CommonAttentionMetadata, shared_prefix_len: int) -> int:
        """Keys, whole blocks, that each new token of the decodes sees and that all of them share."""
        size = self.spec.block_size
        return cascade.whole_blocks(shared_prefix_len, decode_query_len(common.max_query_len), size) if size else 0

    def _workspace(self, size: int, device: torch.device, capture: bool) -> torch.Tensor | None:
        if not size:
            return None
        if _is_being_captured(device):  # its zeros are written when this graph is replayed
            return new_workspace(size, device)
        on_gpu = device.type == "cuda"
        owner = "captured" if capture else torch.cuda.current_stream(device).cuda_stream if on_gpu else "host"
        found = self._workspaces.get(owner)
        if found is None or found.numel() < size:
            found = self._workspaces[owner] = new_workspace(size, device)
        return found


def shape_of_spec(spec: AttentionSpec, block_size: int | None = None) -> AttentionShape:
    """The shape of a layer's calls. block_size: of the cache, where the spec does not say."""
    heads = (spec.kv_heads, spec.gqa_ratio, spec.head_dim, spec.value_dim)
    features = (bool(spec.causal), spec.sliding_window or 0, spec.has_alibi, spec.uses_cache, spec.deterministic)
    stored = stored_dtype(spec.kv_cache_dtype, spec.dtype) if spec.uses_cache else spec.dtype
    size = (spec.block_size or block_size) if spec.uses_cache else None
    return AttentionShape(spec.dtype, stored, *heads, *features, size)


def why_not_hopper(spec: AttentionSpec) -> str:
    """Why the Hopper prefill kernel does not serve a layer; "" where it does."""
    return sm90.why_not(shape_of_spec(spec), sm90.why_not_on(spec.capability))


def _is_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _bounds(shape: AttentionShape, common: CommonAttentionMetadata) -> BatchBounds:
    lens = (common.max_query_len, common.max_seq_len)
    max_keys = common.block_table.shape[1] * (shape.block_size or 0)
    return BatchBounds(common.num_tokens, len(common.seq_lens), common.num_decodes, *lens, max_keys)
