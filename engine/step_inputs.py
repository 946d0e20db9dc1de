"""StepInputs: what one step feeds the model. The host packs what changed into one buffer and sends it in one transfer;
tokens that nobody has read, slots and the step's tables are made of it on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedattn import CommonAttentionMetadata, ops

from .device_state import DeviceState
from .step import KVGroup, Step

_ALIGN = 32  # int32 elements: every part starts on 128 bytes, as kernels and their compilers like it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step of T tokens, n of whose rows are sampled."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    sampled_rows: torch.Tensor  # [n] int32, rows of the step whose next token is sampled
    state_rows: torch.Tensor  # [n] int32, where the device state has the requests of these
    lengths: torch.Tensor  # [n] int32, tokens of these so far: the position of what is sampled
    commons: dict[int, CommonAttentionMetadata]  # by KV group
    only_decodes: bool  # every row is a decode, and is sampled
    special: bool  # whether a sampled request has penalties, min_tokens or logprobs


class InputPacker:
    """Packs steps for a model whose layers use `groups`, by way of what the device has of their requests."""

    def __init__(self, groups: Sequence[KVGroup], state: DeviceState, device: torch.device) -> None:
        self._block_sizes = [group.block_size for group in groups]
        self._windows = [group.sliding_window for group in groups]
        self._state = state
        self._device = device

    def pack(self, step: Step) -> StepInputs:
        """Everything of `step`. After an error between this and the step's end, the state must `forget`."""
        requests, firsts, sizes, samples = zip(*step.scheduled, strict=True)
        state, count, decodes = self._state, len(requests), step.num_decodes == len(requests)
        starts, counts = np.array(firsts, dtype=np.int32), np.array(sizes, dtype=np.int32)
        ends = starts + counts
        query_start_loc = np.zeros(count + 1, dtype=np.int32)
        counts.cumsum(out=query_start_loc[1:])
        tokens = _tokens(step)
        rows, deltas = state.place(requests, starts, ends)
        sampled = np.flatnonzero(samples).astype(np.int32)
        last_rows = query_start_loc[1:][sampled] - 1
        positions = starts
        if not decodes:
            positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(ends - query_start_loc[1:], counts)
        sent = (tokens, positions, query_start_loc, ends, rows, last_rows, rows[sampled], ends[sampled])
        parts = self._send([*sent, deltas.entries, deltas.blocks, deltas.rows, deltas.params.reshape(-1)])
        ids, positions_dev, starts_dev, seq_lens, rows_dev, last_rows_dev, state_rows, lengths, *changed = parts
        state.apply(*changed)
        if (tokens[: step.num_decodes] < 0).any():
            ids = _known(ids, step.num_decodes, state.last_tokens, rows_dev)
        common = CommonAttentionMetadata(
            query_start_loc=starts_dev,
            seq_lens=seq_lens,
            block_table=state.tables[0, :0],
            slot_mapping=torch.empty(len(self._block_sizes), len(tokens), dtype=torch.int64, device=self._device),
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens_cpu=torch.from_numpy(ends),
            num_seqs=count,
            num_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            num_decodes=step.num_decodes,
        )
        shared = self._shared(rows, int(ends.min())) if decodes else [0] * len(self._block_sizes)
        special = bool(state.special[rows[sampled]].any())
        only_decodes = decodes and len(sampled) == count
        commons = self._by_group(common, rows_dev, shared)
        return StepInputs(ids, positions_dev, last_rows_dev, state_rows, lengths, commons, only_decodes, special)

    def _by_group(
        self, common: CommonAttentionMetadata, rows: torch.Tensor, shared: Sequence[int]
    ) -> dict[int, CommonAttentionMetadata]:
        """The step's metadata of every group, slots and tables made on the device; `common` has room for the slots."""
        tables, slots = self._state.tables, common.slot_mapping
        starts, lens = common.query_start_loc, common.seq_lens
        ops.compute_slot_mapping(tables, self._block_sizes, starts, lens, slots, rows=rows)
        widest = -(-common.max_seq_len // min(self._block_sizes))
        table = tables[:, :, :widest].index_select(1, rows)
        return {
            group: common.replace(block_table=table[group], slot_mapping=slots[group], shared_prefix_len=length)
            for group, length in enumerate(shared)
        }

    def _shared(self, rows: np.ndarray, shortest: int) -> list[int]:
        """Tokens that all sequences have in the same blocks, by group; none where a window has let go of blocks."""
        return [
            0 if window else size * _same_columns(table, rows, shortest // size)
            for table, size, window in zip(self._state.sent, self._block_sizes, self._windows, strict=True)
        ]

    def _send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One transfer for all arrays; returns the device views, each on an aligned start."""
        sizes = [array.size for array in arrays]
        starts = np.cumsum([0] + [-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
        # From torch's pool of pinned memory, which hands a buffer out again when its transfer is done.
        host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        target = host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            target[start : start + array.size] = array
        device = host.to(self._device, non_blocking=True)
        return [device[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _known(ids: torch.Tensor, num_decodes: int, last_tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Input ids whose negative ones are the last tokens of their rows, which the host has not read yet.

    A row whose last token was not drawn (no finite logit) ends before the result of this step is looked at.
    """
    own = last_tokens.index_select(0, rows[:num_decodes]).clamp_(min=0)
    ids[:num_decodes] = torch.where(ids[:num_decodes] < 0, own, ids[:num_decodes])
    return ids


def _tokens(step: Step) -> np.ndarray:
    decodes = [request.token_ids[start] for request, start, _, _ in step.scheduled[: step.num_decodes]]
    rest = step.scheduled[step.num_decodes :]
    chunks = (np.array(request.token_ids[start : start + size], dtype=np.int32) for request, start, size, _ in rest)
    return np.concatenate([np.array(decodes, dtype=np.int32), *chunks])


def _same_columns(table: np.ndarray, rows: np.ndarray, columns: int) -> int:
    """How many leading ones of so many columns are the same in these rows, two at least, of [rows, blocks]."""
    first = table[rows[0], :columns]
    if len(rows) < 2 or not columns or first[0] != table[rows[-1], 0]:  # as a rule nothing is shared
        return 0
    # The first and the last row bound what is compared of all.
    for some in (rows[-1:], rows):
        same = (table[some, : len(first)] == first).all(0)
        first = first[: len(same) if same.all() else int(same.argmin())]
    return len(first)
