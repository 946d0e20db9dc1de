"""PagedCache: what transformers takes for a KV cache, over blocks. Imports transformers; imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import CommonAttentionMetadata
from ...errors import InvalidInputError, UnsupportedError
from .attention import Layers
from .batch import BatchStep
from .columns import Columns
from .rows import BlockStore, Rows

# Tokens that `crop` takes back at least, of formats that encode whole blocks: more than assisted generation drafts.
_TAKEN_BACK = 64
_NOTHING = 0, 1  # number of first columns that are equal, in each group of this number of rows


class _Layer(CacheLayerMixin):
    """A layer of the cache as transformers asks for its length; what it keeps, attention writes and reads."""

    is_croppable = True

    def __init__(self, columns: Columns, attention: Layers) -> None:
        super().__init__()
        self._columns, self._attention = columns, attention

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the cache's own."""
        _refuse_others(self._columns, self._attention)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns.done + query_length, 0

    def get_seq_length(self) -> int:
        return self._columns.done

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17


def _refuse_others(columns: Columns, attention: Layers) -> None:
    """Attention that is not paged would see a forward's own keys alone."""
    if not (columns.running and attention):  # `disable` leaves none: a forward that failed seems to be under way
        raise UnsupportedError(
            "past_key_values is a PagedCache, and the model that runs is not enabled, or no longer: its attention "
            "cannot read blocks; call enable(model) and new_cache(model), or give it another cache or none"
        )


class PagedCache(Cache):
    """The keys and values of a batch in blocks: no padding, and rows share what they have in common until they write.

    Made by `new_cache(model)`, or by `generate` itself. It counts columns as transformers does, padding included. A
    copy (`copy.deepcopy`) shares every block with its original, so that many continuations of one prompt are cheap.
    """

    def __init__(self, layers: Layers, store: BlockStore, windowed: bool) -> None:
        """`windowed`: some layer has a sliding window."""
        self._columns, self._rows = Columns(), Rows(store)
        # Of layers whose format encodes whole blocks: what lies in blocks that are not encoded, and a few more.
        self._recent = None if store.recent is None else Rows(store.recent)
        self._attention, self._store, self._windowed = layers, store, windowed
        self._alike = _NOTHING
        super().__init__(layers=[_Layer(self._columns, layers) for _ in layers])

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks' memory, which all caches of one fixed pool share."""
        return self._store.nbytes

    @property
    def num_blocks_used(self) -> int:
        """Blocks held by this cache and by those that share its memory, but for a second cache's of open blocks."""
        return self._store.num_used

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        return len(self._rows) or -1

    def belongs_to(self, layers: Layers) -> bool:
        """Whether this is a cache of the model whose attention these are."""
        return self._attention is layers

    def expect(
        self,
        lengths: Sequence[int],
        prompts: Sequence[int] = (),
        columns: int = 0,
        together: int = 1,
        copies: int = 0,
    ) -> None:
        """What one generation will hold, so that memory is taken at once and a prompt is stored once for all its rows.

        Args:
            lengths, prompts: tokens of each row in the end, and in the prompt.
            columns: of the prompts, padding included.
            together: the number of consecutive rows that have the same prompt.
            copies: blocks more, for rows that are forked before others are dropped.
        """
        self._alike = columns, together
        shared = [length if row % together else 0 for row, length in enumerate(prompts)]
        self._rows.expect(lengths, shared, copies)

    @property
    def begun(self) -> bool:
        """Whether every row holds a token, so that no padding can follow."""
        return len(self._rows) > 0 and min(self._rows.lengths) > 0

    def begin(self, rows: int, columns: int, mask: np.ndarray | None, unread: bool = False) -> BatchStep:
        """Room for a forward of `rows` x `columns`, and what its attention needs.

        Args:
            mask: [B, columns so far + new] bool, True at tokens; None: all are.
            unread: there is a mask, which can only say that all new columns are tokens.

        Raises:
            InvalidInputError: another number of rows than before, or a mask that does not fit.
            UnsupportedError: padding elsewhere than before a row's tokens.
            CapacityError: too few blocks.

        What went in counts from `end` on; where that never comes, it is forgotten.
        """
        if self._columns.running:
            self.crop(0)  # the last forward failed
        if len(self._rows) not in (0, rows):
            raise InvalidInputError("input_ids", f"{len(self._rows)} rows, as this cache has", rows, "use a new cache")
        before = Columns()
        before.become(self._columns)
        real = self._columns.admit(mask, rows, columns, self._windowed, unread)
        counts = [columns] * rows if real is None else real.sum(1).tolist()
        if not len(self._rows):
            for one in self._every():
                one.start(rows)
        if self._columns.count > self._alike[0]:
            self._alike = _NOTHING
        alike = self._alike[1]
        try:
            self._append(counts, alike)
        except Exception:
            self._columns.become(before)
            raise
        self._columns.running = True
        size, table = self._store.block_size, self._rows.table()
        recent_table = None if self._recent is None else self._recent.table()
        common = CommonAttentionMetadata.from_lengths(
            counts, self._rows.lengths, table, block_size=size, recent_table=recent_table
        )
        if alike > 1:  # the first row of each prompt writes
            writes = np.repeat(np.arange(rows) % alike == 0, counts)
            slots = common.slot_mapping.masked_fill(torch.from_numpy(~writes).to(common.slot_mapping.device), -1)
            common = common.replace(slot_mapping=slots)
        return BatchStep.of_tokens(self._attention, self._store.layer_caches(), common, real)

    def _every(self) -> list[Rows]:
        return [self._rows] if self._recent is None else [self._rows, self._recent]

    def _append(self, counts: list[int], alike: int) -> None:
        """Room for new tokens in both caches, or in none."""
        before = list(self._rows.lengths)
        if self._recent is not None:  # what no later token reads, but for those that may be taken back
            kept = _TAKEN_BACK + self._store.recent_blocks * self._store.block_size
            self._recent.release_before([max(length - kept, 0) for length in before], self._store.first_blocks)
        for done, one in enumerate(self._every()):
            try:
                if alike > 1:
                    one.append_alike(counts, alike)
                else:
                    one.append(counts)
            except Exception:
                if done:
                    self._rows.cut(before)
                raise

    def end(self) -> None:
        """The forward that `begin` made room for is through all layers."""
        self._columns.done, self._columns.running = self._columns.count, False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values as they are: attention stores them, which alone knows where.

        Raises:
            UnsupportedError: no forward of an enabled model is under way.
        """
        _refuse_others(self._columns, self._attention)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included and those of a forward that still runs not."""
        return self._columns.done

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; blocks are shared, and copied when they are written."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows: indices, or a bool per row."""
        chosen = torch.as_tensor(indices)
        self._take((chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows, which share its blocks."""
        self._take([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove columns; a positive number is how many columns are kept."""
        self._alike = _NOTHING
        now, given = self._columns.done, tokens_to_remove
        columns = max(0, min(now, given if given > 0 else now + given))
        lengths = self._columns.lengths(columns, len(self._rows))
        if self._recent is not None and not self._recent.holds(lengths, self._store.recent_blocks):
            others = "" if self._store.recent_blocks else f", or all behind a multiple of {self._store.block_size}"
            raise UnsupportedError(
                f"crop to {columns} of {now} columns: a cache that encodes whole blocks takes back its last "
                f"{_TAKEN_BACK} tokens{others}; make a new cache"
            )
        for one in self._every():
            one.cut(lengths)
        self._columns.cut(columns)

    def reset(self) -> None:
        """Give all blocks up."""
        self._alike = _NOTHING
        for one in self._every():
            one.release()
        self._columns.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        forked = PagedCache(self._attention, self._store, self._windowed)
        forked._columns.become(self._columns)
        forked._rows, forked._alike = self._rows.fork(), self._alike
        forked._recent = None if self._recent is None else self._recent.fork()
        memo[id(self)] = forked
        return forked

    def _take(self, rows: list[int]) -> None:
        self._alike = _NOTHING
        for one in self._every():
            one.take(rows)
        self._columns.take(rows)
