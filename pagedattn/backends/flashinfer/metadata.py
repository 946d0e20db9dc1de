"""FlashInfer's metadata of a step, and its builder: decodes by one wrapper, the rest by another, each planned once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ...errors import CapacityError, InvalidInputError, UnsupportedError
from ...kernels.packing import offsets
from ...spec import AttentionSpec
from ...step.metadata import CommonAttentionMetadata
from ..base import AttentionMetadata, AttentionMetadataBuilder, Limits, copy_into_captured
from .pages import Lengths, host_lengths, leading_single_tokens, page_lists, without_surplus
from .plan import Part, Slot, given_workspace, shared_workspace

DEFAULT_BLOCK_SIZE = 16


@dataclass(slots=True)
class FlashInferMetadata(AttentionMetadata):
    """The parts of a step by block size, and under None those of attention over packed keys.

    What `build` could not know (another block size than the spec's, or that there is no cache) is planned at first use.
    """

    builder: FlashInferBuilder
    lengths: Lengths
    planned: dict[int | None, tuple[Part, ...]]
    captured: bool = False
    max_pages: int = 0  # what the captured list of pages has room for

    def parts(self, block_size: int | None) -> tuple[Part, ...]:
        """The parts for a cache with blocks of `block_size` tokens, or for none."""
        if block_size not in self.planned:
            if self.captured:
                got = "none" if block_size is None else f"blocks of {block_size}"
                known = "blocks of " + ", ".join(map(str, self.planned))
                raise InvalidInputError("kv_cache", f"{known} tokens, as captured", got, "set spec.block_size")
            if block_size is None:
                self.planned[None] = self.builder.dense_parts(self.lengths)
            else:
                self.planned[block_size] = self.builder.paged_parts(self.common, self.lengths, block_size)
        return self.planned[block_size]

    def describe(self) -> str:
        kinds = ["; ".join(part.describe() for part in parts) for parts in self.planned.values()]
        return "FlashInfer " + ("; or ".join(filter(None, kinds)) or "plans at first use")


class FlashInferBuilder(AttentionMetadataBuilder):
    """Plans with lengths on the host. All builders of a device and stream share a workspace, or use `workspace`.

    One wrapper of a kind holds one plan: metadata of an earlier build stays usable, but is planned again when it is.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        super().__init__(spec, device, limits, workspace)
        where = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        given = None if workspace is None else given_workspace(workspace)
        self._workspace = partial(shared_workspace, where) if given is None else lambda: given
        self._slots: dict[str, Slot] = {}
        self._shared = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.kv_heads,
            "sm_scale": spec.softmax_scale,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.softcap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.stored_dtype,
        }

    @property
    def tensor_cores(self) -> bool:
        """Whether decodes use them: the other kernel knows only small even groups, and is slower for larger ones."""
        return self.spec.gqa_ratio > 2

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> FlashInferMetadata:
        """See the base class. Only batches of one-token decodes (padding behind them) can be captured."""
        lengths = host_lengths(common)
        if into is not None:
            return self._rewrite(common, lengths, into)
        if capture:
            return self._capture(common, lengths)
        metadata = FlashInferMetadata(common, self, lengths, {})
        if self.spec.uses_cache and common.block_table.shape[1]:
            metadata.parts(self.spec.block_size or DEFAULT_BLOCK_SIZE)
        elif not self.spec.uses_cache:
            metadata.parts(None)
        return metadata

    def paged_parts(self, common: CommonAttentionMetadata, lengths: Lengths, block_size: int) -> tuple[Part, ...]:
        """Decodes in front and the rest, each planned; neither where it has no rows. Of latent rows, all as one."""
        queries, keys = lengths
        total = int(queries.sum())
        if self.spec.latent_dim is not None:
            if not total:
                return ()
            plan = self._latent_plan(self.spec.latent_dim, lengths, common.block_table, block_size)
            return (self._part("latent", 0, total, plan["kv_len_arr"], plan),)
        split = leading_single_tokens(queries[: common.num_decodes])
        parts = []
        if split:
            some = Lengths(queries[:split], keys[:split])
            plan = self._decode_plan(some, common.block_table, block_size)
            parts.append(self._part("decode", 0, split, plan["seq_lens"], plan))
        if total > split:
            some = Lengths(queries[split:], keys[split:])
            plan = self._prefill_plan(some, common.block_table[split:], block_size)
            parts.append(self._part("prefill", split, total, plan["seq_lens"], plan))
        return tuple(parts)

    def dense_parts(self, lengths: Lengths) -> tuple[Part, ...]:
        """All sequences over keys packed back to back."""
        rows = int(lengths.queries.sum())
        if not rows:
            return ()
        queries, keys = without_surplus(lengths)[0] if self.spec.causal else lengths
        arguments = {
            "qo_indptr": offsets(queries),
            "kv_indptr": offsets(keys),
            "head_dim_qk": self.spec.head_dim,
            "causal": bool(self.spec.causal),
            **self._shared,
            "kv_data_type": self.spec.dtype,
        }
        return (self._part("dense", 0, rows, keys, arguments),)

    def _part(self, kind: str, first: int, last: int, keys: torch.Tensor, arguments: dict[str, Any]) -> Part:
        if kind not in self._slots:
            self._slots[kind] = Slot(partial(self._make, kind), self._workspace)
        part = Part(kind, self._slots[kind], first, last, len(keys), int(keys.sum()), arguments)
        if part.num_keys:
            part.slot.plan(part)
        return part

    def _make(self, kind: str, buffer: torch.Tensor) -> Any:
        library, layout = import_module("flashinfer"), self.spec.cache_layout
        if kind == "decode":
            return library.BatchDecodeWithPagedKVCacheWrapper(buffer, layout, use_tensor_cores=self.tensor_cores)
        if kind == "latent":
            return library.BatchMLAPagedAttentionWrapper(buffer)
        if kind == "prefill":
            return library.BatchPrefillWithPagedKVCacheWrapper(buffer, layout)
        # Its fa3 kernel loads a neighbour's values into a sequence's last tile, and 0 * NaN is NaN; fa2 loads zeros.
        return library.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD", backend="fa2")

    def _decode_plan(self, lengths: Lengths, table: torch.Tensor, block_size: int) -> dict[str, Any]:
        # The decode kernels take one row per sequence, and are right where it has no key: nothing is cut in two.
        pages = page_lists(lengths, table, block_size, cut_surplus=False, window=self.spec.sliding_window)
        return {
            "indptr": pages.indptr,
            "indices": pages.indices,
            "last_page_len": pages.last_page_len,
            "head_dim": self.spec.head_dim,
            "page_size": block_size,
            "seq_lens": pages.seq_lens,
            **self._shared,
        }

    def _prefill_plan(self, lengths: Lengths, table: torch.Tensor, block_size: int) -> dict[str, Any]:
        causal = bool(self.spec.causal)
        pages = page_lists(lengths, table, block_size, cut_surplus=causal, window=self.spec.sliding_window)
        return {
            "qo_indptr": pages.query_start_loc,
            "paged_kv_indptr": pages.indptr,
            "paged_kv_indices": pages.indices,
            "paged_kv_last_page_len": pages.last_page_len,
            "head_dim_qk": self.spec.head_dim,
            "page_size": block_size,
            "causal": causal,
            "seq_lens": pages.seq_lens,
            "max_token_per_sequence": int(pages.query_start_loc.diff().max()),
            **self._shared,
        }

    def _latent_plan(self, latent_dim: int, lengths: Lengths, table: torch.Tensor, block_size: int) -> dict[str, Any]:
        causal = bool(self.spec.causal)
        pages = page_lists(lengths, table, block_size, cut_surplus=causal, window=None)
        return {
            "qo_indptr": pages.query_start_loc,
            "kv_indptr": pages.indptr,
            "kv_indices": pages.indices,
            "kv_len_arr": pages.seq_lens,
            "num_heads": self.spec.num_heads,
            "head_dim_ckv": latent_dim,
            "head_dim_kpe": self.spec.rope_dim,
            "page_size": block_size,
            "causal": causal,
            "sm_scale": self.spec.softmax_scale,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.dtype,
        }

    def _capture(self, common: CommonAttentionMetadata, lengths: Lengths) -> FlashInferMetadata:
        if self.spec.latent_dim is not None:
            raise UnsupportedError(
                "FLASHINFER captures no latent attention: its schedule is of exact lengths; use TRITON"
            )
        _check_single_tokens(lengths)
        size, table = common.num_seqs, common.block_table
        block_size = self.spec.block_size or DEFAULT_BLOCK_SIZE
        width = self.limits.max_blocks_per_seq if self.limits is not None else table.shape[1]
        integers = partial(torch.zeros, dtype=torch.int32, device=table.device)
        make = partial(
            import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper,
            kv_layout=self.spec.cache_layout,
            use_cuda_graph=True,
            use_tensor_cores=self.tensor_cores,
            paged_kv_indptr_buffer=integers(size + 1),
            paged_kv_indices_buffer=integers(size * width),
            paged_kv_last_page_len_buffer=integers(size),
        )
        static = common.replace(
            query_start_loc=integers(size + 1),
            seq_lens=integers(size),
            block_table=integers(size, width),
            slot_mapping=torch.full_like(common.slot_mapping, -1),
            query_start_loc_cpu=None,
            seq_lens_cpu=None,
            max_query_len=1,
            max_seq_len=width * block_size,
        )
        part = Part("decode", Slot(make, self._workspace), 0, size, size, width * block_size * size, {})
        metadata = FlashInferMetadata(
            static, self, lengths, {block_size: (part,)}, captured=True, max_pages=size * width
        )
        self._rewrite(common, lengths, metadata)
        part.slot.captured = True
        return metadata

    def _rewrite(
        self, common: CommonAttentionMetadata, lengths: Lengths, into: AttentionMetadata
    ) -> FlashInferMetadata:
        if not isinstance(into, FlashInferMetadata) or not into.captured:
            raise InvalidInputError("into", "metadata that this builder made with capture=True", type(into).__name__)
        _check_single_tokens(lengths)
        ((block_size, (part,)),) = into.planned.items()
        _check_room("num_seqs", common.num_seqs, part.last)
        spare = (0, part.last - common.num_seqs)
        padded = Lengths(*(torch.nn.functional.pad(one, spare) for one in lengths))
        arguments = self._decode_plan(padded, common.block_table, block_size or DEFAULT_BLOCK_SIZE)
        _check_room("number of blocks", len(arguments["indices"]), into.max_pages)
        part.arguments = arguments
        part.slot.plan(part)
        into.lengths = lengths
        copy_into_captured(into.common, common)
        return into


def _check_single_tokens(lengths: Lengths) -> None:
    single = leading_single_tokens(lengths.queries)
    if not len(lengths.queries) or bool(lengths.queries[single:].any()):
        raise UnsupportedError(
            f"FLASHINFER captures decodes only: one new token per sequence, padding (no new token) last; got query "
            f"lengths {lengths.queries.tolist()}; run this step without a graph"
        )


def _check_room(name: str, got: int, most: int) -> None:
    if got > most:
        raise CapacityError(f"{name} is {got}, but the captured metadata holds at most {most}; capture a larger step")
