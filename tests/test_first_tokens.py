"""First tokens in the model's dtype, beside what `test_recent_cache.py` says of all formats with two caches."""

from __future__ import annotations

import pytest
import torch
from recent_sequences import KEY, LENGTH, QUERY, SIZE, VALUE, Sequences, by_definition

from pagedattn import CommonAttentionMetadata
from pagedattn.errors import InvalidInputError

STORED = "turboquant2:first=40"


def test_queries_read_first_blocks_as_they_came() -> None:
    """Which the others do not: a key there decides all of some query's attention."""
    found = {name: by_definition(name) for name in ("turboquant2", STORED)}
    same = (found["turboquant2"] - found[STORED]).abs().amax((1, 2)) == 0
    assert same[:SIZE].all() and not same[2 * SIZE :].any()


def test_metadata_say_that_there_are_three_calls() -> None:
    owner = Sequences("TORCH", STORED)
    table = torch.arange(1, 6)[None].int()
    step = CommonAttentionMetadata.from_lengths([1], [LENGTH], table, block_size=SIZE, recent_table=table)
    described = owner.layer.build(step).describe()
    parts = ("full blocks: ", "; open blocks: ", "; first blocks: ")
    assert [part for part in parts if part in described] == [*parts]


def test_first_blocks_of_a_table_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    owner, table = Sequences("TORCH", STORED), torch.arange(1, 6)[None].int()
    rows = [x[LENGTH - 1 : LENGTH] for x in (QUERY, KEY, VALUE)]
    for bad, is_read in ((0, True), (1, True), (2, False), (4, True)):
        recent = table.clone()
        recent[0, bad] = 99
        step = CommonAttentionMetadata.from_lengths([1], [LENGTH], table, block_size=SIZE, recent_table=recent)
        if not is_read:
            owner.layer(*rows, owner.cache.layer(0), step)
            continue
        words = rf"from that of the first new token on, and in the first 2, got 99 at row 0, column {bad}"
        with pytest.raises(InvalidInputError, match=words):
            owner.layer(*rows, owner.cache.layer(0), step)
