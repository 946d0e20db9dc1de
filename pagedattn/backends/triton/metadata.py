"""What TRITON builds of a step: the launch plan that all layers of a kind execute, and the workspace that it uses."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import hopper
from ...kernels.decode import cascade
from ...kernels.mla_decode import plan as mla
from ...kernels.mla_decode.plan import MLADecodePlan, plan_mla_decode
from ...kernels.prefill_sm90 import plan as sm90
from ...kernels.shape import AttentionShape, BatchBounds
from ...ops.attention_plan import decode_query_len, plan_attention
from ...ops.launch_plan import LaunchPlan
from ...runtime.workspace import new_workspace
from ...spec import AttentionSpec, GraphLevel
from ...step.metadata import CommonAttentionMetadata
from ..base import AttentionMetadata
from ..op_backend import OpMetadataBuilder


class TritonMetadataBuilder(OpMetadataBuilder):
    """Owns a workspace per stream, and one for all that is captured; grown when a step needs more. Captured metadata
    keep the one they were captured with.

    Metadata share a workspace with those built on the same stream, and captured ones with each other: what was built on
    one stream must not run at the same time as anything else of it on another, nor two captured steps. Where a compiler
    traces the step, there is no plan: the op makes one.
    """

    graph_level = GraphLevel.ALWAYS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._workspaces: dict[object, torch.Tensor] = {}
        self._shape = shape_of_spec(self.spec)

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        built = super().build(common, into, capture)
        if into is None and self.spec.latent_dim is not None:
            built.mla_plan = self._plan_latent(built.common, capture)
        elif into is None:
            built.plan = self._plan(built.common, common.shared_prefix_len, capture)
        elif built.plan is not None and built.plan.cascade is not None:
            built.plan.cascade.set_length(self._shareable(built.common, common.shared_prefix_len))
        self.device_update(built)
        return built

    def device_update(self, metadata: AttentionMetadata) -> None:
        if metadata.plan is not None:
            common = metadata.common
            metadata.plan.update(common.query_start_loc, common.seq_lens, common.block_table)

    def _plan_latent(self, common: CommonAttentionMetadata, capture: bool) -> MLADecodePlan | None:
        if torch.compiler.is_dynamo_compiling():  # sizes must not become guards
            return None
        device, (shape, bounds) = common.seq_lens.device, self._shape_and_bounds(common)
        plan = plan_mla_decode(shape, bounds, device)
        plan.workspace = self._workspace(plan.config.workspace, device, capture)
        return plan

    def _plan(self, common: CommonAttentionMetadata, shared_prefix_len: int, capture: bool) -> LaunchPlan | None:
        if torch.compiler.is_dynamo_compiling():  # sizes must not become guards
            return None
        device, (shape, bounds) = common.seq_lens.device, self._shape_and_bounds(common)
        size = shape.block_size
        length = self._shareable(common, shared_prefix_len) if shared_prefix_len else 0
        # Whether it pays in the steps that a captured one stands for, its caller knows.
        most = common.max_seq_len // size * size if capture and size else None
        asked = max(length, size or 0) if capture and shared_prefix_len else length
        plan = plan_attention(shape, bounds, device, prefix_len=asked, max_prefix_len=most)
        plan.allocate(device, common.block_table, length)
        plan.workspace = self._workspace(plan.workspace_size, device, capture)
        return plan

    def _shape_and_bounds(self, common: CommonAttentionMetadata) -> tuple[AttentionShape, BatchBounds]:
        """What a plan depends on; of a block size that the spec leaves open, the step's."""
        shape = self._shape
        if shape.block_size is None and shape.paged and common.block_size is not None:
            shape = shape._replace(block_size=common.block_size)
        lens = (common.max_query_len, common.max_seq_len, common.block_table.shape[1] * (shape.block_size or 0))
        count, decodes, prompt_keys = common.seq_lens.shape[0], common.num_decodes, 0
        if common.seq_lens_cpu is not None and 0 < decodes < count:
            prompt_keys = int(common.seq_lens_cpu[decodes:count].max())
        return shape, BatchBounds(common.num_tokens, count, decodes, *lens, prompt_keys)

    def _shareable(self, common: CommonAttentionMetadata, shared_prefix_len: int) -> int:
        """Keys, whole blocks, that each new token of the decodes sees and that all of them share."""
        size = self.spec.block_size
        longest, mask = decode_query_len(common.max_query_len), self.spec.mask
        return cascade.whole_blocks(shared_prefix_len, longest, size, mask) if size and mask.sees_first_keys else 0

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


def shape_of_spec(spec: AttentionSpec) -> AttentionShape:
    """The shape of a layer's calls."""
    heads = (spec.kv_heads, spec.gqa_ratio, spec.head_dim, spec.value_dim)
    features = (spec.mask.constants, spec.has_alibi, spec.uses_cache, spec.deterministic)
    codes = (spec.format.key.codes, spec.format.value.codes) if spec.uses_cache else (None, None)
    size, tile_keys = (spec.block_size, spec.format.key.tile_keys) if spec.uses_cache else (None, None)
    return AttentionShape(spec.dtype, spec.stored_dtype, *heads, *features, size, codes, tile_keys)


def why_not_hopper(spec: AttentionSpec) -> str:
    """Why the Hopper prefill kernel does not serve a layer; "" where it does."""
    return sm90.why_not(shape_of_spec(spec), hopper.why_not_on(spec.capability))


def why_not_hopper_latent(spec: AttentionSpec) -> str:
    """The same of the Hopper kernel for absorbed latent attention; of a block size that the spec leaves open, as if it
    were served."""
    shape = shape_of_spec(spec)
    size = shape.block_size or 64
    return mla.why_not_hopper(shape._replace(block_size=size), hopper.why_not_on(spec.capability))


def _is_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
