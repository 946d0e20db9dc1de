"""A prefix whose blocks all sequences share, attended once: the arithmetic of it, and the two calls it is made of.

B decodes over a system prompt of L keys read it B times where each attends alone. Here all their rows are packed as the
rows of one sequence of L keys, which every row sees (one launch of the decode kernel, not causal, its keys shared out
over the device), and each sequence then attends to the keys of its own (the usual launch, over the rest of the block
table), starting from the state that the first launch left of its rows. That state is an output and its log-sum-exp in
float32; taking it up costs no launch and no rounding. Source: Hydragen (2024), FlashInfer's cascade attention (2024).

What is read, for 64 decodes of 8k + 1k keys, 32 heads over 8 KV heads of 128, bfloat16 (4 KB a key, 4.3 TB/s):
alone 64 * 9k * 4 KB = 2.4 GB, 560 us; shared (8k + 64 * 1k) * 4 KB = 302 MB, 70 us, beside 2 * 1 MB of states. The
prefix's keys pass from L2 to the cores once per 64 packed rows (16 decodes of 4 heads a group), here 4 * 34 MB.

A prefix in a sliding window, or under ALiBi, is not shared: its keys' distances differ from row to row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import InvalidInputError
from ...runtime.op_registry import expect
from ..inputs import VARYING, AttentionInputs
from .plan import DecodeConfig

if TYPE_CHECKING:
    from ...runtime.launcher import Launch

# Keys and values that must not pass to the cores again, in bytes, for a second launch to pay: 32 MB are 8 us of 4 TB/s,
# where a launch, its uneven end and the states take about 6 (bench/results/h200/shared.json).
SAVED_BYTES = 32 << 20
_HEAD = 3  # elements of a split before the sequences' lengths, behind which stands their table
# What the first of the two launches does not take from a layer: it writes a state, in the stored values' own unit.
_NOT_VARYING = {VARYING.index(name) for name in ("out", "lse_out", "v_scale", "out_scale")}


def whole_blocks(length: int, max_query_len: int, block_size: int) -> int:
    """So many of `length` shared keys, at most every sequence's length, are whole blocks that all new tokens see."""
    return max(length - max(max_query_len - 1, 0), 0) // block_size * block_size


def pays(alone: DecodeConfig, prefix: DecodeConfig, rest: DecodeConfig, key_bytes: int) -> bool:
    """Whether two launches in place of one spare enough loads of keys and values; `key_bytes` of both, of one head.

    Loads from L2 count as much as those from memory: a short prefix stays in L2 in either case.
    """
    return (alone.keys - prefix.keys - rest.keys) * key_bytes >= SAVED_BYTES


def new_split(num_seqs: int, width: int, device: torch.device) -> torch.Tensor:
    """What the two calls read in place of a step's own lengths and table, [num_seqs, width], for `fill_split`."""
    return torch.empty(_HEAD + num_seqs * (1 + width), dtype=torch.int32, device=device)


def set_length(split: torch.Tensor, length: int) -> None:
    """Say how many keys are shared, whole blocks, before `fill_split`."""
    split[2].fill_(length)


def fill_split(
    split: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    """Write 0, all rows, every sequence's keys past the shared ones, and the blocks that these lie in.

    All on the device, how many are shared too: a CUDA graph that records this follows `set_length`.

    query_start_loc, seq_lens, block_table: of a step that begins with the sequences of `split`, one at least.
    """
    width = block_table.shape[1]
    lens, table = _rest(split, width)
    count, length = len(lens), split[2:_HEAD]
    split[:2].copy_(query_start_loc[: count + 1 : count])
    torch.sub(seq_lens[:count], length, out=lens).clamp_(min=0)  # padding has no keys
    source = torch.arange(width, device=split.device) + length // block_size
    torch.index_select(block_table[:count], 1, source.clamp(max=width - 1), out=table)
    table.masked_fill_(source >= width, -1)


def divide(inputs: AttentionInputs, length: int, split: torch.Tensor | None) -> tuple[AttentionInputs, ...]:
    """The call over the first keys, which writes float32 states, and that over the rest; or, where the prefix cannot
    be told from the rest, the call as it is.

    length: the most keys of the prefix, where `split` is given, which has its length.
    split: of `fill_split` for these sequences; made here where None.

    Raises:
        InvalidInputError: a length that is no whole number of blocks, or a split for others.
    """
    table, block_size, count = inputs.block_table, inputs.key.shape[1], len(inputs.seq_lens)
    if table is None or inputs.window or inputs.alibi_slopes is not None:
        return (inputs,)
    if length < 0 or length % block_size:
        raise InvalidInputError("shared_prefix_len", f"whole blocks of {block_size} keys", length)
    width = table.shape[1]
    if split is None:
        split = new_split(count, width, table.device)
        set_length(split, length)
        fill_split(split, inputs.query_start_loc, inputs.seq_lens, table, block_size)
    size = _HEAD + count * (1 + width)
    fits = split.dtype == torch.int32 and split.shape == (size,) and split.is_contiguous()
    expect(fits and split.device == table.device, "split", f"int32 [{size}] on {table.device}", split)
    lens, table_of_rest = _rest(split, width)
    state = inputs.query.new_empty(*inputs.query.shape[:2], inputs.value.shape[-1], dtype=torch.float32)
    prefix = inputs._replace(
        block_table=table[:1],
        query_start_loc=split[:2],
        seq_lens=split[2:_HEAD],
        v_scale=None,
        out_scale=1.0,
        out=state,
        lse=state.new_empty(state.shape[:2]),
        causal=False,
        max_query_len=inputs.max_query_len * count,
        max_seq_len=length,
    )
    # A step that uses these launches again may share less than this one.
    rest = inputs._replace(block_table=table_of_rest, seq_lens=lens, sinks=None)  # the prefix's state has the sinks
    return prefix, rest


def _rest(split: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a split: lengths [B] of what is not shared, and its block table [B, width]."""
    count = (len(split) - _HEAD) // (1 + width)
    return split[_HEAD : _HEAD + count], split[_HEAD + count :].view(count, width)


def without_layer_outputs(launch: Launch) -> Launch:
    """The first call's launch, to be made again by other layers: it writes where it did."""
    return launch._replace(varying=[(at, index) for at, index in launch.varying if index not in _NOT_VARYING])
