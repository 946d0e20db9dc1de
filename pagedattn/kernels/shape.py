"""What a launch plan depends on, as values: the shape of a layer's attention, and the bounds of a step's lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .inputs import AttentionInputs

K8V4 = ("int8", "rotated_int4")  # `AttentionShape.codes` of these formats
INT4 = ("int4_per_channel", "rotated_int4")
FOUR_BIT_VALUES = (K8V4, INT4)  # formats whose values are `rotated_int4`


class AttentionShape(NamedTuple):
    """Heads, dtypes and features that all calls of a plan have in common."""

    dtype: torch.dtype
    stored_dtype: torch.dtype  # of the cache, or of packed keys
    num_kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    head_dim_v: int
    mask: tuple[int, ...]  # `Mask.constants`
    alibi: bool
    paged: bool
    deterministic: bool
    block_size: int | None  # None: unknown, or no cache
    codes: tuple[str | None, str | None] = (None, None)  # of K and V: `RowFormat.codes`
    tile_keys: int | None = None  # `RowFormat.tile_keys`

    def covers(self, other: AttentionShape) -> bool:
        """Whether a plan for this shape serves calls of the other one: it is the same, where this one is known."""
        return self == (other if self.block_size is not None else other._replace(block_size=None))


class BatchBounds(NamedTuple):
    """Upper bounds of a step's sequences, tokens and keys, as the host knows them. The first num_decodes have one token
    each. max_keys: keys that the block table has room for, 0 where unknown. max_prompt_keys: of a sequence that is no
    decode, 0 where max_seq_len is all that is known."""

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_keys: int = 0
    max_prompt_keys: int = 0

    @property
    def prompt_keys(self) -> int:
        """Keys of a sequence that is no decode."""
        return self.max_prompt_keys or self.max_seq_len

    def part(self, first: int, last: int, max_query_len: int) -> BatchBounds:
        """Of sequences first..last alone, whose queries are at most so long."""
        if first == 0 and last == self.num_seqs and max_query_len == self.max_query_len:
            return self
        decodes = min(max(self.num_decodes - first, 0), last - first)
        longest = self.max_seq_len if decodes else self.prompt_keys
        lens = (max_query_len, longest, self.max_keys, self.max_prompt_keys)
        return BatchBounds(self.num_tokens, last - first, decodes, *lens)


def shape_of(inputs: AttentionInputs) -> AttentionShape:
    """The shape of a call."""
    query, key, _, table = inputs[:4]
    paged, kv_heads = table is not None, key.shape[-2]
    heads = (kv_heads, query.shape[1] // kv_heads, query.shape[2], inputs.out.shape[2])
    features = (tuple(inputs.mask), inputs.alibi_slopes is not None, paged, inputs.deterministic)
    codes = (inputs.format.key.codes, inputs.format.value.codes)
    size = key.shape[1] if paged else None
    return AttentionShape(query.dtype, key.dtype, *heads, *features, size, codes, inputs.format.key.tile_keys)


def bounds_of(inputs: AttentionInputs) -> BatchBounds:
    """The bounds of a call's sequences."""
    table, lens = inputs.block_table, (inputs.max_query_len, inputs.max_seq_len)
    max_keys = 0 if table is None else table.shape[1] * inputs.key.shape[1]
    return BatchBounds(len(inputs.query), len(inputs.seq_lens), inputs.num_decodes, *lens, max_keys)
