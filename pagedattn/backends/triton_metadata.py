"""What TRITON plans of a step: a workspace for the decode kernel's partial results, whether a shared prefix is attended
to once, and on Hopper the prefill kernel's list of work items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache_spec import stored_dtype
from ..metadata import CommonAttentionMetadata
from ..ops import hopper, shared_prefix
from ..ops.launch import DecodeConfig, Work, decode_config, launches, target_of
from ..ops.paged_attention import new_workspace
from ..spec import AttentionSpec, GraphLevel
from .base import AttentionMetadata
from .op_backend import OpMetadataBuilder


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    """A step, and the workspace of its decode launches (None where it has none): every layer's call uses it in turn.

    Metadata share it with those built on the same stream, and captured ones with each other: what was built on one
    stream must not run at the same time as anything else of it on another, nor two captured steps.
    """

    spec: AttentionSpec
    launches: list[Work]
    workspace: torch.Tensor | None
    items: torch.Tensor | None  # for the sequences that are no decodes; counters in it come back to zero
    shared_prefix: tuple[int, torch.Tensor | None] = (0, None)  # keys that decodes read once, and their split

    def describe(self) -> str:
        parts = [self._describe(work) for work in self.launches]
        return ", ".join(parts) or "nothing to do"

    def _describe(self, work: Work) -> str:
        text = f"{work.kernel} kernel: {work.last - work.first} sequences"
        if work.kernel != "decode":
            refused = _why_not_hopper(self.spec, self.common)
            return f"{text} ({f'the portable one: {refused}' if refused else 'for Hopper'})"
        length, _ = self.shared_prefix
        *prefix, own = _configs(self.spec, self.common, work, length)
        once = f", shared prefix of {length} keys attended once ({_tiles(prefix[0])})" if prefix else ""
        return f"{text} ({_tiles(own)}){once}"


class TritonMetadataBuilder(OpMetadataBuilder):
    """Owns a workspace per stream, and one for all that is captured; grown when a step needs more. Captured metadata
    keep the one they were captured with."""

    graph_level = GraphLevel.ALWAYS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rooms: dict[object, torch.Tensor] = {}

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        built = super().build(common, into, capture)
        if into is None:
            planned = _launches(self.spec, built.common)
            prefix = _shared_prefix(planned, self.spec, built.common)
            room, items = self._room(planned, built.common, capture, prefix[0]), self._list(planned, built.common)
            built = TritonMetadata(built.common, self.spec, planned, room, items, prefix)
        self.device_update(built)
        return built

    def device_update(self, metadata: AttentionMetadata) -> None:
        if not isinstance(metadata, TritonMetadata):
            return
        if metadata.items is not None:
            _fill(metadata.items, metadata)
        length, split = metadata.shared_prefix
        if split is not None:
            shared_prefix.fill_split(split, metadata.common.query_start_loc, metadata.common.seq_lens, length)

    def _list(self, planned: list[Work], common: CommonAttentionMetadata) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling():  # the op makes it itself
            return None
        prefill = _of_kernel("prefill", planned)
        if prefill is None or _why_not_hopper(self.spec, common):
            return None
        num_seqs = prefill.last - prefill.first
        return hopper.new_items(common.num_tokens, num_seqs, self.spec.gqa_ratio, common.seq_lens.device)

    def _room(
        self, planned: list[Work], common: CommonAttentionMetadata, capture: bool, shared: int
    ) -> torch.Tensor | None:
        decode = _of_kernel("decode", planned)
        if decode is None or torch.compiler.is_dynamo_compiling():  # then the op makes it itself
            return None
        device = common.seq_lens.device
        on_gpu = device.type == "cuda"
        needed = max(config.workspace for config in _configs(self.spec, common, decode, shared))
        if _is_being_captured(device):  # its zeros are written when this graph is replayed
            return new_workspace(needed, device)
        owner = "captured" if capture else torch.cuda.current_stream(device).cuda_stream if on_gpu else "host"
        room = self._rooms.get(owner)
        if room is None or room.numel() < needed:
            room = self._rooms[owner] = new_workspace(needed, device)
        return room


def _is_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _launches(spec: AttentionSpec, common: CommonAttentionMetadata) -> list[Work]:
    target = target_of(common.seq_lens.device)
    heads = (common.num_decodes, spec.kv_heads, spec.gqa_ratio)
    joined = hopper.joins(*heads, common.max_seq_len, target.num_sms) and not _why_not_hopper(spec, common)
    facts = {"paged": spec.uses_cache, "deterministic": spec.deterministic, "joined": joined}
    return launches(len(common.seq_lens), common.num_decodes, common.max_query_len, **facts)


def _of_kernel(kernel: str, planned: list[Work]) -> Work | None:
    return next((work for work in planned if work.kernel == kernel), None)


def _shared_prefix(
    planned: list[Work], spec: AttentionSpec, common: CommonAttentionMetadata
) -> tuple[int, torch.Tensor | None]:
    """Keys that the decodes attend to once, and room for their split; 0 where that does not pay, or cannot be."""
    decode = _of_kernel("decode", planned) if common.shared_prefix_len else None
    if decode is None or spec.block_size is None or spec.sliding_window or spec.has_alibi:
        return 0, None
    length = shared_prefix.whole_blocks(common.shared_prefix_len, decode.longest, spec.block_size)
    if not length or torch.compiler.is_dynamo_compiling():
        return 0, None
    (alone,), (prefix, rest) = (_configs(spec, common, decode, shared) for shared in (0, length))
    key_bytes = (spec.head_dim + spec.value_dim) * stored_dtype(spec.kv_cache_dtype, spec.dtype).itemsize
    if not shared_prefix.pays(alone, prefix, rest, key_bytes):
        return 0, None
    return length, shared_prefix.new_split(decode.last, common.seq_lens.device)


def _fill(items: torch.Tensor, metadata: TritonMetadata) -> None:
    prefill, common = _of_kernel("prefill", metadata.launches), metadata.common
    if prefill is not None:
        starts, lens = common.query_start_loc[prefill.first :], common.seq_lens[prefill.first :]
        hopper.list_items(items, starts, lens, metadata.spec.gqa_ratio)


def _why_not_hopper(spec: AttentionSpec, common: CommonAttentionMetadata) -> str:
    return why_not_hopper(spec, hopper.why_not_here(common.seq_lens.device))


def why_not_hopper(spec: AttentionSpec, here: str) -> str:
    """Why the prefill kernel for Hopper does not serve a layer, on a device with this reason against it; "" where it
    does, so that its list is made once for all layers."""
    stored = stored_dtype(spec.kv_cache_dtype, spec.dtype)
    facts = (spec.dtype, stored, spec.head_dim, spec.value_dim, spec.block_size, spec.has_alibi)
    if not spec.uses_cache or spec.deterministic:
        return "deterministic" if spec.deterministic else "no paged cache"
    return here or hopper.why_not_shape(*facts)


def _configs(spec: AttentionSpec, common: CommonAttentionMetadata, work: Work, shared: int) -> list[DecodeConfig]:
    """Of the decode launches that serve `work`, whose sequences share so many keys: that over the prefix in front."""
    shape: dict[str, Any] = {
        "num_kv_heads": spec.kv_heads,
        "group": spec.gqa_ratio,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.value_dim,
        "itemsize": spec.dtype.itemsize,
        "stored_itemsize": spec.dtype.itemsize if spec.kv_cache_dtype == "auto" else 1,
        "target": target_of(common.seq_lens.device),
    }
    count, longest = work.last - work.first, work.longest
    calls = [(count, longest, max(common.max_seq_len - shared, 0))]
    calls[:0] = [(1, count * longest, shared)] if shared else []
    return [
        decode_config(num_seqs=seqs, max_query_len=tokens, max_seq_len=keys, **shape) for seqs, tokens, keys in calls
    ]


def _tiles(config: DecodeConfig) -> str:
    return f"{config.programs} programs, tiles of {config.tuning.block_n} keys"
