"""A prefix whose blocks all sequences share, attended once: the arithmetic of it, and the two calls it is made of.

B decodes over a system prompt of L keys read it B times where each attends alone. Here all their rows are packed as the
rows of one sequence of L keys, which every row sees (one launch, not causal, its keys shared out over the device), and
each sequence then attends to the keys of its own (the usual launch, over the rest of the block table), which adds to
the outputs and the LSE that the first launch left. Source: Hydragen (2024), FlashInfer's cascade attention (2024).

What is read, for 64 decodes of 8k + 1k keys, 32 heads over 8 KV heads of 128, bfloat16 (4 KB a key, 4.3 TB/s):
alone 64 * 9k * 4 KB = 2.4 GB, 560 us; shared (8k + 64 * 1k) * 4 KB = 302 MB, 70 us, beside 2 * 1 MB of states. The
prefix's keys pass from L2 to the cores once per 64 packed rows (16 decodes of 4 heads a group), here 4 * 34 MB.

A prefix in a sliding window, or under ALiBi, is not shared: its keys' distances differ from row to row. Of a cache
whose open blocks lie elsewhere, what is before every query's open blocks is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError
from ...spec import Mask
from ..inputs import AttentionInputs
from .plan import DecodeConfig

# Keys and values that must not pass to the cores again, in bytes, for a second launch to pay: 32 MB are 8 us of 4 TB/s,
# where a launch, its uneven end and the states take about 6 (bench/results/h200/shared.json).
SAVED_BYTES = 32 << 20
_HEAD = 3  # elements before the sequences' lengths
PLAIN = Mask(causal=False)  # of rows that see all of a prefix


def whole_blocks(length: int, max_query_len: int, block_size: int, mask: Mask = PLAIN) -> int:
    """How many of `length` shared keys (no sequence is shorter) lie in whole blocks that all new tokens see."""
    first = length - max(max_query_len, 1)  # of the new tokens' positions
    return 0 if first < 0 else mask.first_keys_seen(first) // block_size * block_size


def pays(alone: DecodeConfig, prefix: DecodeConfig, rest: DecodeConfig, key_bytes: int) -> bool:
    """Whether two launches in place of one spare enough loads of keys and values; `key_bytes` of both, of one head.

    Loads from L2 count as much as those from memory: a short prefix stays in L2 in either case.
    """
    return (alone.keys - prefix.keys - rest.keys) * key_bytes >= SAVED_BYTES


def check_length(length: int, block_size: int) -> None:
    """Raise InvalidInputError for a prefix that is no whole number of blocks."""
    if length < 0 or length % block_size:
        raise InvalidInputError("shared_prefix_len", f"whole blocks of {block_size} keys", length)


@dataclass(slots=True)
class CascadeMetadata:
    """A prefix that decodes attend to once: of `length` keys, and at most `max_length` in a step that uses this again.

    tensor: int32, what the two calls read in place of the step's own: begin and end of all rows, the prefix's length,
    then the lengths [B] of what is not shared, and its block table [B, width].
    """

    max_length: int
    length: int
    num_seqs: int
    tensor: torch.Tensor

    @classmethod
    def of(cls, max_length: int, length: int, num_seqs: int, block_table: torch.Tensor) -> CascadeMetadata:
        """For a step whose first num_seqs sequences decode, to be filled."""
        elements = _HEAD + num_seqs * (1 + block_table.shape[1])
        made = cls(max_length, 0, num_seqs, torch.empty(elements, dtype=torch.int32, device=block_table.device))
        made.set_length(length)
        return made

    def set_length(self, length: int) -> None:
        """Say how many keys are shared, whole blocks, before `fill`."""
        self.length = length
        self.tensor[2].fill_(length)

    @property
    def rest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths [B] of what is not shared, and its block table [B, width]."""
        end = _HEAD + self.num_seqs
        return self.tensor[_HEAD:end], self.tensor[end:].view(self.num_seqs, -1)

    @property
    def of_prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_start_loc` [2] and `seq_lens` [1] of the call over the prefix."""
        return self.tensor[:2], self.tensor[2:_HEAD]

    def fill(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int
    ) -> None:
        """Fill the tensor but for the length, all on the device: a CUDA graph that records this follows `set_length`.

        query_start_loc, seq_lens, block_table: of a step that begins with the sequences that decode, one at least.
        """
        count, width, (lens, table) = self.num_seqs, block_table.shape[1], self.rest
        length = self.tensor[2:_HEAD]
        self.tensor[:2].copy_(query_start_loc[: count + 1 : count])
        torch.sub(seq_lens[:count], length, out=lens).clamp_(min=0)  # padding has no keys
        source = torch.arange(width, device=self.tensor.device) + length // block_size
        torch.index_select(block_table[:count], 1, source.clamp(max=width - 1), out=table)
        table.masked_fill_(source >= width, -1)

    def divide(self, inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
        """A call of these sequences as two: over the first keys, of which outputs are not rounded, and over the rest,
        which is added to it."""
        (lens, table), (starts, length), lse = self.rest, self.of_prefix, inputs.lse
        if lse is None:
            lse = inputs.out.new_empty(inputs.out.shape[:2], dtype=torch.float32)
        prior = None
        if inputs.out.dtype != torch.float32:
            prior = torch.empty(inputs.out.shape, dtype=torch.float32, device=lse.device)
        prefix = inputs._replace(
            out=inputs.out if prior is None else prior,
            block_table=None if inputs.block_table is None else inputs.block_table[:1],
            query_start_loc=starts,
            seq_lens=length,
            mask=PLAIN.constants,
            lse=lse,
            num_decodes=0,
            max_query_len=inputs.max_query_len * self.num_seqs,
            max_seq_len=self.max_length,
        )
        # A step that uses these launches again may share less than this one; sinks join the prefix's sums.
        rest = inputs._replace(block_table=table, seq_lens=lens, sinks=None, lse=lse, accumulate=True, prior=prior)
        return prefix, rest
