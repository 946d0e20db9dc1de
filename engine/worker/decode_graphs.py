"""DecodeGraphs: whole steps of decodes, from embedding to drawn tokens, captured for a few batch sizes.

A batch runs in the smallest size that holds it; what is left of that size is padding, which writes nowhere. Of some
sizes there is a second step, which reads the keys that all sequences share once. Where there is no GPU a replay is a
plain call, so that buffers, sizes and padding are the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, StepMetadata, ops, plan_step
from pagedattn.errors import UnsupportedError

from ..models.factory import CausalModel
from ..models.fused_ops import fuses
from ..sampling.rows import SampledRows
from ..transfer import transfer
from .decode_inputs import DecodeRows, packed_decodes, write_decodes
from .host_batch import HostBatch
from .persistent_batch import PersistentBatch
from .sync_check import run_without_waiting

_MOST = 512
# Tokens of a shared prefix that are read more than once, from which on a second launch in each layer costs less: their
# keys and values are 32 MB a layer, with 8 heads of 128.
_LEAST_READ_AGAIN = 1 << 13
_LEAST_BYTES = 8 << 20  # of a graph, whatever it shares

logger = logging.getLogger("pagedattn.engine")


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, then steps of 8 up to 256 and of 16 beyond, as far as `max_num_seqs` and 512.

    Products of 2 to 7 rows take cuBLAS longer than those of 8.
    """
    most = min(max_num_seqs, _MOST)
    sizes = [1, *range(8, 257, 8), *range(272, _MOST + 1, 16)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of at most `size` decodes; `replay` reads and writes the buffers of its `DecodeGraphs`."""

    size: int
    metadata: StepMetadata
    common_by_group: list[CommonAttentionMetadata]  # by KV group, tensors of `metadata`
    replay: Callable[[], object]


class DecodeGraphs:
    """Captured steps of one model over one cache, and the buffers that they share."""

    def __init__(
        self,
        model: CausalModel,
        state: PersistentBatch,
        sizes: Sequence[int],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Nothing is captured yet; `replays` counts runs.

        Args:
            sizes: batch sizes, in any order.
        """
        self.sizes = sorted(set(sizes))
        self._model, self._state, self._device = model, state, device
        self._max_model_len = max_model_len
        largest = self.sizes[-1]
        ids, positions, self._tokens = (torch.zeros(largest, dtype=torch.int32, device=device) for _ in range(3))
        padding_rows = torch.full((largest,), state.num_rows, dtype=torch.int32, device=device)
        self._rows = DecodeRows(ids, positions, padding_rows, torch.ones_like(ids))
        vocab = model.config.vocab_size
        self._logits = torch.empty(largest, vocab, dtype=model.logits_dtype, device=device)
        self._steps: dict[int, CapturedStep] = {}
        self._sharing: dict[int, CapturedStep] = {}
        self.replays = 0
        self._draws = fuses(self._logits)

    def capture(self, caches: Sequence[LayerCache]) -> None:
        """Capture all sizes over `caches`, the largest first, in one pool of memory, behind a progress bar.

        A backend that cannot be captured leaves nothing captured, and says so in the log.
        """
        from tqdm import tqdm

        self._capture_all(tqdm(self._wanted(), desc="capturing decode steps", unit="size", disable=None), caches)

    def _wanted(self) -> list[tuple[int, bool]]:
        """Sizes to capture, the largest first, then those with a shared prefix: every fourth, since padding is cheap
        beside what a prefix of several sequences saves."""
        return [*((size, False) for size in self.sizes[::-1]), *((size, True) for size in self.sizes[::-4] if size > 1)]

    def measure(self, caches: Sequence[LayerCache]) -> int:
        """Bytes of device memory that `capture` will take beyond what is in use after this.

        The largest size stays captured until then, over a cache to be thrown away; the others share its memory, and
        each takes what the second largest does, or a little.
        """
        if self._device.type != "cuda":
            return 0
        wanted, largest = self._wanted(), self.sizes[-1]
        self._capture_all([one for one in wanted if one[0] == largest], caches)
        before, _ = torch.cuda.mem_get_info(self._device)
        if self._steps and len(self.sizes) > 1:
            self._capture_one(self.sizes[-2], False, caches)
        after, _ = torch.cuda.mem_get_info(self._device)
        left = [one for one in wanted if one[0] != largest and (self._sharing or not one[1])] if self._steps else []
        return max(before - after, _LEAST_BYTES) * len(left)

    def _capture_all(self, wanted: Iterable[tuple[int, bool]], caches: Sequence[LayerCache]) -> None:
        self._steps.clear()
        self._sharing.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of graphs that are no more
            self._pool = torch.cuda.graph_pool_handle()
        for size, shares in wanted:
            try:
                self._capture_one(size, shares, caches)
            except UnsupportedError as error:
                self._steps.clear()
                self._sharing.clear()
                logger.warning("decode steps run without CUDA graphs: %s", error)
                return

    def serves(self, packed: HostBatch) -> bool:
        """Whether a captured step holds this one."""
        return packed.only_decodes and len(packed.rows) <= self.sizes[-1] and bool(self._steps)

    def run(self, packed: HostBatch) -> tuple[torch.Tensor, torch.Tensor | None, SampledRows]:
        """Logits [n, vocab] and, on a GPU, tokens [n], which are in the device state too; and whose they are.

        All of it is true until the next run.
        """
        state, updates, count = self._state, packed.updates, len(packed.rows)
        shares = self._sharing and max(packed.shared) * (count - 1) >= _LEAST_READ_AGAIN
        steps = self._sharing if shares else self._steps
        size = min(size for size in steps if size >= count)
        step = steps[size]
        if updates.table_changed:
            state.apply(*transfer(updates.parts, self._device))
        sent = packed_decodes(packed, size, state.num_rows, self._device)
        write_decodes(sent, count, state, self._rows.first(size), step.common_by_group)
        plan_step(self._model.attention_layers(), _as_packed(step.common_by_group, packed), into=step.metadata)
        step.replay()
        self.replays += 1
        return self._logits[:count], self._tokens[:count] if self._draws else None, self._rows.sampled(count)

    def _capture_one(self, size: int, shares: bool, caches: Sequence[LayerCache]) -> None:
        """A step with a shared prefix only where a layer's backend makes something of it."""
        metadata = self._plan(size, shares)
        if metadata.shares_prefix == shares:
            (self._sharing if shares else self._steps)[size] = self._capture(size, metadata, caches)

    def _capture(self, size: int, metadata: StepMetadata, caches: Sequence[LayerCache]) -> CapturedStep:
        # Layers of one group may have several formats, and so metadata with tensors of their own.
        groups = range(self._state.num_layer_groups)
        planned = [
            [(key[1], one.common) for key, one in metadata.by_key.items() if key[0] == group] for group in groups
        ]
        common_by_group = [every[0][1] for every in planned]
        # Of a format that encodes whole blocks new tokens go to the second cache, whose table is the last one.
        written = [
            (-1 if spec.has_recent else group, common) for group, every in enumerate(planned) for spec, common in every
        ]
        rows = self._rows.first(size)

        def run() -> None:
            for group, common in written:
                table, block_size = self._state.tables[group], self._state.block_sizes[group]
                where = common.query_start_loc, common.seq_lens, common.slot_mapping
                ops.compute_slot_mapping(table, block_size, *where, rows=rows.state_rows)
            hidden = self._model(rows.ids, rows.positions, caches, metadata)
            self._model.logits(hidden, out=self._logits[:size])
            if self._draws:
                self._draw(rows)

        if self._device.type != "cuda":
            return CapturedStep(size, metadata, common_by_group, run)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels and chooses algorithms, which a capture must not
            run()
            if self._model.may_wait:
                run_without_waiting(run)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return CapturedStep(size, metadata, common_by_group, graph.replay)

    def _draw(self, rows: DecodeRows) -> None:
        from ..sampling.kernels.draw import draw

        size = len(rows.ids)
        tokens = self._tokens[:size]
        draw(self._logits[:size], self._state.params, rows.state_rows, rows.lengths, tokens)
        self._state.last_tokens.index_put_((rows.state_rows,), tokens)

    def _plan(self, size: int, shares: bool) -> StepMetadata:
        """Metadata with buffers of its own for `size` decodes as long as the model allows."""
        device, state = self._device, self._state
        shape = size, state.tables.shape[2]
        has_recent = state.num_layer_groups < len(state.tables)
        common_by_group = {
            group: CommonAttentionMetadata(
                query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
                seq_lens=torch.ones(size, dtype=torch.int32, device=device),
                block_table=torch.zeros(shape, dtype=torch.int32, device=device),
                recent_table=torch.zeros(shape, dtype=torch.int32, device=device) if has_recent else None,
                slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
                num_seqs=size,
                num_tokens=size,
                max_query_len=1,
                max_seq_len=self._max_model_len,
                num_decodes=size,
                shared_prefix_len=block_size if shares else 0,
                block_size=block_size,
            )
            for group, block_size in enumerate(state.block_sizes[: state.num_layer_groups])
        }
        return plan_step(self._model.attention_layers(), common_by_group, capture=device.type == "cuda")


def _as_packed(
    common_by_group: Sequence[CommonAttentionMetadata], packed: HostBatch
) -> dict[int, CommonAttentionMetadata]:
    """Metadata of a step that stands in captured tensors already."""
    count = len(packed.rows)
    facts = {
        "query_start_loc_cpu": torch.arange(count + 1, dtype=torch.int32),
        "seq_lens_cpu": torch.from_numpy(packed.ends),
        "num_seqs": count,
        "num_tokens": count,
        "max_seq_len": int(packed.ends.max()),
        "num_decodes": count,
    }
    return {
        group: common.replace(**facts, shared_prefix_len=shared)
        for group, (common, shared) in enumerate(zip(common_by_group, packed.shared, strict=True))
    }
