"""DecodeGraphs: whole steps of decodes, from embedding to drawn tokens, captured for a few batch sizes.

A batch runs in the smallest size that holds it; what is left of that size is padding, which writes nowhere. Where there
is no GPU a replay is a plain call, so that buffers, sizes and padding are the same everywhere.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, StepMetadata, plan_step
from pagedattn.errors import UnsupportedError

from .device_state import DeviceState
from .model_factory import CausalModel
from .step_inputs import StepInputs

_MOST = 512
# Tokens of a shared prefix that a graph may read more than once. On an H200 their keys and values are 15 GB of a 0.6B
# model, 3.5 ms, as long as the launches of an eager step take.
_MOST_READ_AGAIN = 1 << 17
_LEAST_BYTES = 8 << 20  # of a graph, whatever it shares

logger = logging.getLogger("pagedattn.engine")


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 256 and of 16 beyond, as far as `max_num_seqs` and 512."""
    most = min(max_num_seqs, _MOST)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, _MOST + 1, 16)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of at most `size` decodes; `replay` reads and writes the buffers of its `DecodeGraphs`."""

    size: int
    metadata: StepMetadata
    replay: Callable[[], object]


class DecodeGraphs:
    """Captured steps of one model over one cache, and the buffers that they share."""

    def __init__(
        self,
        model: CausalModel,
        state: DeviceState,
        sizes: Sequence[int],
        num_groups: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Nothing is captured yet; `replays` counts runs.

        Args:
            sizes: batch sizes, in any order.
            num_groups: KV groups of the model.
        """
        self.sizes = sorted(set(sizes))
        self._model, self._state, self._device = model, state, device
        self._num_groups, self._max_model_len = num_groups, max_model_len
        largest = self.sizes[-1]
        self._ids, self._positions, self._tokens = (
            torch.zeros(largest, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._rows = torch.full((largest,), state.num_rows, dtype=torch.int32, device=device)
        vocab = model.config.vocab_size
        self._logits = torch.empty(largest, vocab, dtype=model.dtype, device=device)
        self._steps: dict[int, CapturedStep] = {}
        self.replays = 0
        self._draws = device.type == "cuda" and model.dtype != torch.float64

    def capture(self, caches: Sequence[LayerCache]) -> None:
        """Capture all sizes over `caches`, the largest first, in one pool of memory, behind a progress bar.

        A backend that cannot be captured leaves nothing captured, and says so in the log.
        """
        from tqdm import tqdm

        self._capture_all(tqdm(self.sizes[::-1], desc="capturing decode steps", unit="size", disable=None), caches)

    def measure(self, caches: Sequence[LayerCache]) -> int:
        """Bytes of device memory that `capture` will take beyond what is in use after this.

        The largest size stays captured until then, over a cache to be thrown away; the others share its memory, and
        each takes what the second largest does, or a little.
        """
        if self._device.type != "cuda":
            return 0
        self._capture_all(self.sizes[-1:], caches)
        before, _ = torch.cuda.mem_get_info(self._device)
        if self._steps and len(self.sizes) > 1:
            self._steps[self.sizes[-2]] = self._capture(self.sizes[-2], caches)
        after, _ = torch.cuda.mem_get_info(self._device)
        return max(before - after, _LEAST_BYTES) * (len(self.sizes) - 1) if self._steps else 0

    def _capture_all(self, sizes: Iterable[int], caches: Sequence[LayerCache]) -> None:
        self._steps.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of graphs that are no more
            self._pool = torch.cuda.graph_pool_handle()
        for size in sizes:
            try:
                self._steps[size] = self._capture(size, caches)
            except UnsupportedError as error:
                self._steps.clear()
                logger.warning("decode steps run without CUDA graphs: %s", error)
                return

    def serves(self, inputs: StepInputs) -> bool:
        """Whether a captured step holds this one, and should: a graph reads a shared prefix once for each sequence."""
        common = inputs.commons[0]
        count = common.num_seqs
        if common.shared_prefix_len * (count - 1) > _MOST_READ_AGAIN:
            return False
        return inputs.only_decodes and count <= self.sizes[-1] and self._size_for(count) in self._steps

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, vocab] and, on a GPU, tokens [n], which are in the device state too; both until the next run."""
        count = inputs.commons[0].num_seqs
        size = self._size_for(count)
        step = self._steps[size]
        self._ids[:count].copy_(inputs.input_ids)
        self._positions[:count].copy_(inputs.positions)
        self._rows[:count].copy_(inputs.state_rows)
        if count < size:
            self._rows[count:size].fill_(self._state.num_rows)
            self._ids[count:size].zero_()
            self._positions[count:size].zero_()
        plan_step(self._model.attention_layers(), inputs.commons, into=step.metadata)
        step.replay()
        self.replays += 1
        return self._logits[:count], self._tokens[:count] if self._draws else None

    def _size_for(self, count: int) -> int:
        return self.sizes[bisect_left(self.sizes, count)]

    def _capture(self, size: int, caches: Sequence[LayerCache]) -> CapturedStep:
        metadata = self._plan(size)

        def run() -> None:
            hidden = self._model(self._ids[:size], self._positions[:size], caches, metadata)
            self._model.logits(hidden, out=self._logits[:size])
            if self._draws:
                self._draw(size)

        if self._device.type != "cuda":
            return CapturedStep(size, metadata, run)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels and chooses algorithms, which a capture must not
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return CapturedStep(size, metadata, graph.replay)

    def _draw(self, size: int) -> None:
        from .kernels.draw import draw

        rows, tokens = self._rows[:size], self._tokens[:size]
        draw(self._logits[:size], self._state.params, rows, self._positions[:size] + 1, tokens)
        self._state.last_tokens.index_put_((rows,), tokens)

    def _plan(self, size: int) -> StepMetadata:
        """Metadata with buffers of its own for `size` decodes as long as the model allows."""
        device, groups = self._device, self._num_groups
        columns = self._state.tables.shape[2]
        commons = {
            group: CommonAttentionMetadata(
                query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
                seq_lens=torch.ones(size, dtype=torch.int32, device=device),
                block_table=torch.zeros(size, columns, dtype=torch.int32, device=device),
                slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
                num_seqs=size,
                num_tokens=size,
                max_query_len=1,
                max_seq_len=self._max_model_len,
                num_decodes=size,
            )
            for group in range(groups)
        }
        return plan_step(self._model.attention_layers(), commons, capture=device.type == "cuda")
