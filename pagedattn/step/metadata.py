"""CommonAttentionMetadata: what one step attends to, the same for every backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import index

import numpy as np
import torch

from .. import ops
from ..errors import InvalidInputError

_ALIGN = 4  # int32 elements that make 16 bytes, which kernels load at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonAttentionMetadata:
    """One step of B sequences and T tokens, as tensors and host integers only.

    With a cache, sequence b has `seq_lens[b]` keys (new tokens included), the last of which belong to its own query
    rows `query_start_loc[b] : query_start_loc[b + 1]`. Without one (`kv_cache=None`), keys are packed back to back in
    runs of `seq_lens[b]` rows. Sequences may have no query rows and no keys.
    """

    query_start_loc: torch.Tensor  # [B + 1] int32, device
    seq_lens: torch.Tensor  # [B] int32, device
    block_table: torch.Tensor  # [B, max_blocks] int32, device; entries past a sequence are never followed
    slot_mapping: torch.Tensor  # [n] int64, device; row t of the keys goes to slot t; outside the cache means skip
    query_start_loc_cpu: torch.Tensor | None = None  # [B + 1] int32, exact or None
    seq_lens_cpu: torch.Tensor | None = None  # [B] int32, exact or None, never a bound
    num_seqs: int
    num_tokens: int
    max_query_len: int  # upper bound
    max_seq_len: int  # upper bound
    num_decodes: int = 0  # number of leading sequences that are decodes; 0 is always legal
    # First tokens that all sequences have in the same blocks, those of the first sequence's table row: at most
    # as many as the shortest sequence has, those without tokens aside. 0 is always legal.
    shared_prefix_len: int = 0
    block_size: int | None = None  # of the blocks that the table and the slots mean; None where it was not given
    # [B, max_blocks] int32, device: of the second cache of formats that encode whole blocks (`PagedKVCache.recent`), by
    # the same columns; read from the block of each sequence's first new token on. None: no layer has one.
    recent_table: torch.Tensor | None = None

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int] | np.ndarray | torch.Tensor,
        seq_lens: Sequence[int] | np.ndarray | torch.Tensor,
        block_table: torch.Tensor | None = None,
        *,
        block_size: int = 16,
        device: torch.device | str | None = None,
        num_decodes: int | None = None,
        recent_table: torch.Tensor | None = None,
    ) -> CommonAttentionMetadata:
        """Build everything from lengths and tables that the host knows.

        Args:
            query_lens: new tokens per sequence, integers on the host.
            seq_lens: keys per sequence, new tokens included.
            block_table: [B, max_blocks] int32; None where there is no cache (empty table, nothing is written).
            block_size: the cache's, tokens per block.
            device: where to put the tensors; where the table is if None, the CPU without one.
            num_decodes: leading sequences with one token each; counted where None.
            recent_table: [B, max_blocks] int32, of the cache's `recent`, where it has one.

        Raises:
            InvalidInputError: lengths of different number, negative, or longer than the table; decodes that are none.
        """
        query_lens, seq_lens = _integers("query_lens", query_lens), _integers("seq_lens", seq_lens)
        _check_lengths(query_lens, seq_lens, block_table, block_size)
        if recent_table is not None:
            _check_table("recent_table", recent_table, seq_lens, block_size)
        table = torch.empty(len(seq_lens), 0, dtype=torch.int32, device="cpu") if block_table is None else block_table
        device = table.device if device is None and block_table is not None else torch.device(device or "cpu")
        count, tokens, begin = len(seq_lens), sum(query_lens), -(-(len(seq_lens) + 1) // _ALIGN) * _ALIGN
        # One transfer for both. It waits for nothing: `host` is kept, and not written again.
        packed = [0, *accumulate(query_lens), *[0] * (begin - count - 1), *seq_lens]
        host = torch.tensor(packed, dtype=torch.int32, device="cpu")
        sent, table = host.to(device, non_blocking=True), table.to(device)
        (starts, keys), (starts_dev, keys_dev) = ((x[: count + 1], x[begin:]) for x in (host, sent))
        slots = torch.empty(tokens, dtype=torch.int64, device=device)
        if block_table is None:
            slots.fill_(-1)
        else:
            ops.compute_slot_mapping(table, block_size, starts_dev, keys_dev, slots)
        if num_decodes is None:
            num_decodes = _leading_decodes(query_lens, seq_lens)
        else:
            _check_decodes(query_lens, num_decodes)
        return cls(
            query_start_loc=starts_dev,
            seq_lens=keys_dev,
            block_table=table,
            slot_mapping=slots,
            query_start_loc_cpu=starts,
            seq_lens_cpu=keys,
            num_seqs=count,
            num_tokens=tokens,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            num_decodes=num_decodes,
            block_size=None if block_table is None else block_size,
            recent_table=None if recent_table is None else recent_table.to(device),
        )

    def replace(self, **changes: object) -> CommonAttentionMetadata:
        """A copy with other fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _leading_decodes(query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    if query_lens and min(query_lens) == max(query_lens) == 1 and min(seq_lens) > 1:
        return len(query_lens)
    pairs = zip(query_lens, seq_lens, strict=True)
    return next((i for i, (q, k) in enumerate(pairs) if q != 1 or k < 2), len(query_lens))


def _integers(name: str, lens: Sequence[int] | np.ndarray | torch.Tensor) -> Sequence[int]:
    """Lengths as integers of Python, which is what they mostly are."""
    if isinstance(lens, torch.Tensor) and lens.device.type != "cpu":
        raise InvalidInputError(name, "on the host", f"a tensor on {lens.device}", "pass .tolist(), which waits for it")
    given = lens.tolist() if isinstance(lens, torch.Tensor | np.ndarray) else lens
    try:
        return given if type(sum(given)) is int else [index(n) for n in given]
    except TypeError:
        raise InvalidInputError(name, "integers, one per sequence", lens) from None


def _check_decodes(query_lens: Sequence[int], num_decodes: int) -> None:
    leading = query_lens[:num_decodes]
    if not 0 <= num_decodes <= len(query_lens):
        raise InvalidInputError("num_decodes", f"in 0..{len(query_lens)}, the number of sequences", num_decodes)
    if any(n > 1 for n in leading) or (0 in leading and num_decodes < len(query_lens)):
        raise not_decodes(query_lens, num_decodes)


def not_decodes(query_lens: Iterable[int], num_decodes: int) -> InvalidInputError:
    """The error for `num_decodes` leading sequences of which one has none or several new tokens: it says which."""
    index, new = next((index, new) for index, new in enumerate(query_lens) if new != 1)
    expected = f"at most {index}, the leading sequences with one new token each"
    got = f"{num_decodes}, where sequence {index} has {new}"
    return InvalidInputError("num_decodes", expected, got, "pass 0, or sort decodes first")


def _check_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor | None, block_size: int
) -> None:
    if len(query_lens) != len(seq_lens):
        raise InvalidInputError("seq_lens", f"as many as query_lens ({len(query_lens)})", len(seq_lens))
    if min(query_lens, default=0) < 0 or min(seq_lens, default=0) < 0:
        raise InvalidInputError("query_lens and seq_lens", "non-negative", f"{list(query_lens)} and {list(seq_lens)}")
    if block_table is None:
        return
    if block_size < 1:
        raise InvalidInputError("block_size", "at least 1", block_size)
    _check_table("block_table", block_table, seq_lens, block_size)


def _check_table(name: str, table: torch.Tensor, seq_lens: Sequence[int], block_size: int) -> None:
    if table.dim() != 2 or table.dtype != torch.int32 or len(table) != len(seq_lens):
        got = f"{table.dtype} {list(table.shape)}"
        raise InvalidInputError(name, f"int32 [{len(seq_lens)}, max_blocks]", got)
    if max(seq_lens, default=0) > table.shape[1] * block_size:
        room = f"at most {table.shape[1]} blocks x {block_size} tokens"
        raise InvalidInputError("seq_lens", room, max(seq_lens), f"widen the {name.replace('_', ' ')}")
