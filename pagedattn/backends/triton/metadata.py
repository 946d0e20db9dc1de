"""What TRITON plans of a step: a workspace for partial results, whether a shared prefix is attended to once, and on
Hopper the prefill kernel's list of work items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...cache.specs import stored_dtype
from ...kernels.decode import cascade
from ...kernels.decode.plan import DecodeConfig, decode_config
from ...kernels.prefill_sm90 import support, tile_schedule
from ...ops.attention_plan import Work, choices, launches
from ...runtime.target import target_of
from ...runtime.workspace import new_workspace
from ...spec import AttentionSpec, GraphLevel
from ...step.metadata import CommonAttentionMetadata
from ..base import AttentionMetadata
from ..op_backend import OpMetadataBuilder


@dataclass(slots=True)
class SharedPrefix:
    """Keys that all decodes read at once, `length` of them, and at most `bound` in a step that uses this again."""

    bound: int
    length: int
    split: torch.Tensor  # of `ops.shared_prefix.fill_split`


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    """A step, and the workspace for partial results of its launches (None where none has any): every layer's call uses
    it in turn.

    Metadata share it with those built on the same stream, and captured ones with each other: what was built on one
    stream must not run at the same time as anything else of it on another, nor two captured steps.
    """

    spec: AttentionSpec
    launches: list[Work]
    workspace: torch.Tensor | None
    items: torch.Tensor | None  # for the sequences that are no decodes; counters in it come back to zero
    prefix: SharedPrefix | None = None  # that decodes read once

    @property
    def shares_prefix(self) -> bool:
        return self.prefix is not None

    def describe(self) -> str:
        parts = [self._describe(work) for work in self.launches]
        return ", ".join(parts) or "nothing to do"

    def _describe(self, work: Work) -> str:
        text = f"{work.kernel} kernel: {work.last - work.first} sequences"
        if work.kernel != "decode":
            refused = _why_not_hopper(self.spec, self.common)
            return f"{text} ({f'the portable one: {refused}' if refused else self._hopper()})"
        *prefix, own = _configs(self.spec, self.common, work, self.prefix)
        if self.prefix is None:
            return f"{text} ({_tiles(own)})"
        return f"{text} ({_tiles(own)}), shared prefix of {self.prefix.length} keys attended once ({_tiles(prefix[0])})"

    def _hopper(self) -> str:
        parts = self.items is not None and tile_schedule.has_parts(self.items)
        return "for Hopper, keys shared out" if parts else "for Hopper"


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
            shared = built.common.replace(shared_prefix_len=common.shared_prefix_len)
            planned, prefix = _plan(self.spec, shared, capture)
            items = self._list(planned, built.common)
            room = self._room(planned, built.common, capture, prefix, items)
            built = TritonMetadata(built.common, self.spec, planned, room, items, prefix)
        elif isinstance(built, TritonMetadata) and built.prefix is not None:
            built.prefix.length = _shareable(built.launches, self.spec, common)
            cascade.set_length(built.prefix.split, built.prefix.length)
        self.device_update(built)
        return built

    def device_update(self, metadata: AttentionMetadata) -> None:
        if not isinstance(metadata, TritonMetadata):
            return
        if metadata.items is not None:
            _fill(metadata.items, metadata)
        prefix, common, block_size = metadata.prefix, metadata.common, self.spec.block_size
        if prefix is not None and block_size is not None:
            tensors = common.query_start_loc, common.seq_lens, common.block_table
            cascade.fill_split(prefix.split, *tensors, block_size)

    def _list(self, planned: list[Work], common: CommonAttentionMetadata) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling():  # the op makes it itself
            return None
        prefill = _of_kernel("prefill", planned)
        if prefill is None or _why_not_hopper(self.spec, common):
            return None
        return tile_schedule.new_items(_listing(self.spec, common), _bounds(common, prefill), common.seq_lens.device)

    def _room(
        self,
        planned: list[Work],
        common: CommonAttentionMetadata,
        capture: bool,
        prefix: SharedPrefix | None,
        items: torch.Tensor | None,
    ) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling():  # the op makes it itself; sizes must not become guards
            return None
        device, decodes = common.seq_lens.device, [work for work in planned if work.kernel == "decode"]
        wanted = [one.workspace for work in decodes for one in _configs(self.spec, common, work, prefix)]
        if items is not None and tile_schedule.has_parts(items):
            wanted.append(_listing(self.spec, common).workspace)
        if not wanted:
            return None
        on_gpu, needed = device.type == "cuda", max(wanted)
        if _is_being_captured(device):  # its zeros are written when this graph is replayed
            return new_workspace(needed, device)
        owner = "captured" if capture else torch.cuda.current_stream(device).cuda_stream if on_gpu else "host"
        room = self._rooms.get(owner)
        if room is None or room.numel() < needed:
            room = self._rooms[owner] = new_workspace(needed, device)
        return room


def _is_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _plan(
    spec: AttentionSpec, common: CommonAttentionMetadata, capture: bool
) -> tuple[list[Work], SharedPrefix | None]:
    """A step's launches, and what its decodes share: for that they have a launch of their own."""
    if common.shared_prefix_len:
        apart = _launches(spec, common, joined=False)
        prefix = _shared_prefix(apart, spec, common, capture)
        if prefix is not None:
            return apart, prefix
    return _launches(spec, common), None


def _launches(spec: AttentionSpec, common: CommonAttentionMetadata, joined: bool = True) -> list[Work]:
    """joined: whether one launch may serve everything."""
    facts = {"paged": spec.uses_cache, "deterministic": spec.deterministic}
    if joined and spec.uses_cache and common.max_query_len > 1:
        everything = Work("prefill", 0, len(common.seq_lens), common.max_query_len)
        served = not _why_not_hopper(spec, common)
        facts |= choices(_listing(spec, common), _bounds(common, everything), served)
    return launches(len(common.seq_lens), common.num_decodes, common.max_query_len, **facts)


def _of_kernel(kernel: str, planned: list[Work]) -> Work | None:
    return next((work for work in planned if work.kernel == kernel), None)


def _shared_prefix(
    planned: list[Work], spec: AttentionSpec, common: CommonAttentionMetadata, capture: bool
) -> SharedPrefix | None:
    """What the decodes attend to once; None where that does not pay, or cannot be. Whether it pays in the steps that a
    captured one stands for, its caller knows."""
    decode, length = _of_kernel("decode", planned), _shareable(planned, spec, common)
    if not length or decode is None or spec.block_size is None:
        return None
    bound = common.max_seq_len // spec.block_size * spec.block_size if capture else length
    if not bound or not (capture or _pays(spec, common, decode, length)):
        return None
    split = cascade.new_split(decode.last, common.block_table.shape[1], common.seq_lens.device)
    cascade.set_length(split, length)
    return SharedPrefix(bound, length, split)


def _pays(spec: AttentionSpec, common: CommonAttentionMetadata, decode: Work, length: int) -> bool:
    count, longest, most = decode.last - decode.first, decode.longest, common.max_seq_len
    alone, rest = (_config(spec, common, count, longest, keys) for keys in (most, max(most - length, 0)))
    prefix = _config(spec, common, 1, count * longest, length)
    key_bytes = (spec.head_dim + spec.value_dim) * stored_dtype(spec.kv_cache_dtype, spec.dtype).itemsize
    return cascade.pays(alone, prefix, rest, key_bytes)


def _shareable(planned: list[Work], spec: AttentionSpec, common: CommonAttentionMetadata) -> int:
    """Keys, whole blocks, that each new token of the decodes sees and that all of them share."""
    decode = _of_kernel("decode", planned) if common.shared_prefix_len else None
    if decode is None or spec.block_size is None or spec.sliding_window or spec.has_alibi:
        return 0
    if torch.compiler.is_dynamo_compiling():
        return 0
    return cascade.whole_blocks(common.shared_prefix_len, decode.longest, spec.block_size)


def _fill(items: torch.Tensor, metadata: TritonMetadata) -> None:
    prefill, common = _of_kernel("prefill", metadata.launches), metadata.common
    if prefill is not None:
        starts, lens = common.query_start_loc[prefill.first :], common.seq_lens[prefill.first :]
        tile_schedule.list_items(_listing(metadata.spec, common), items, starts, lens)


def _bounds(common: CommonAttentionMetadata, work: Work) -> tile_schedule.Bounds:
    decodes = max(common.num_decodes - work.first, 0)
    return tile_schedule.Bounds(common.num_tokens, work.last - work.first, decodes, work.longest, common.max_seq_len)


def _listing(spec: AttentionSpec, common: CommonAttentionMetadata) -> tile_schedule.Listing:
    block_size = spec.block_size or common.block_size or 0
    heads, max_keys = (spec.kv_heads, spec.gqa_ratio, spec.head_dim), common.block_table.shape[1] * block_size
    num_sms = target_of(common.seq_lens.device).num_sms
    return tile_schedule.Listing(*heads, bool(spec.causal), spec.sliding_window or 0, max_keys, num_sms)


def _why_not_hopper(spec: AttentionSpec, common: CommonAttentionMetadata) -> str:
    return why_not_hopper(spec, support.why_not_here(common.seq_lens.device), common.block_size)


def why_not_hopper(spec: AttentionSpec, here: str, block_size: int | None = None) -> str:
    """Why the prefill kernel for Hopper does not serve a layer, on a device with this reason against it; "" where it
    does, so that its list is made once for all layers. block_size: of the cache, where the spec does not say."""
    stored = stored_dtype(spec.kv_cache_dtype, spec.dtype)
    facts = (spec.dtype, stored, spec.head_dim, spec.value_dim, spec.block_size or block_size, spec.has_alibi)
    if not spec.uses_cache or spec.deterministic:
        return "deterministic" if spec.deterministic else "no paged cache"
    return here or support.why_not_shape(*facts)


def _configs(
    spec: AttentionSpec, common: CommonAttentionMetadata, work: Work, prefix: SharedPrefix | None
) -> list[DecodeConfig]:
    """Of the decode launches that serve `work`: that over a shared prefix in front."""
    count, longest = work.last - work.first, work.longest
    own = _config(spec, common, count, longest, common.max_seq_len, short=prefix is not None)
    return [own] if prefix is None else [_config(spec, common, 1, count * longest, prefix.bound), own]


def _config(
    spec: AttentionSpec,
    common: CommonAttentionMetadata,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    short: bool = False,
) -> DecodeConfig:
    return decode_config(
        num_seqs=num_seqs,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_heads=spec.kv_heads,
        group=spec.gqa_ratio,
        head_dim=spec.head_dim,
        head_dim_v=spec.value_dim,
        itemsize=spec.dtype.itemsize,
        stored_itemsize=spec.dtype.itemsize if spec.kv_cache_dtype == "auto" else 1,
        target=target_of(common.seq_lens.device),
        short=short,
    )


def _tiles(config: DecodeConfig) -> str:
    return f"{config.programs} programs, tiles of {config.tuning.block_n} keys"
