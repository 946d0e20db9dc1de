"""Mask: both halves against the definition, key by key."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from pagedattn import AttentionSpec, AttentionType, Mask, ops
from pagedattn.errors import InvalidInputError
from pagedattn.spec.mask import ALL_FEATURES, KERNEL_FEATURES

KEYS = 12
MASKS = [
    *(Mask(causal, window) for causal, window in product((True, False), (None, 1, 2, 5, 12, 40))),
    *(Mask(causal, None, own_block=size) for causal, size in product((True, False), (1, 4, 12))),
    *(Mask(causal, 5, own_block=4) for causal in (True, False)),
    *(Mask(True, window, earlier_blocks=size) for window, size in product((None, 6), (1, 4, 12))),
    *(
        Mask(causal, window, own_block=3, recent_blocks=n)
        for causal, window, n in product((True, False), (None, 4), (1, 2))
    ),
    *(Mask(True, window, earlier_blocks=3, recent_blocks=n) for window, n in product((None, 11), (1, 2))),
    *(Mask(True, window, earlier_blocks=2, recent_blocks=1, from_block=2) for window in (None, 9)),
    *(Mask(True, None, earlier_blocks=3, recent_blocks=n, to_block=1) for n in (None, 1)),
    Mask(True, None, earlier_blocks=2, from_block=1, to_block=4),
]


def sees(mask: Mask, query: int, key: int) -> bool:
    """Written out: a query sees no later key where causal, of a window's W keys itself and W - 1 on each side, and of
    blocks its own only, or those before it only, where some before it count as its own, and of these some only."""
    recent = mask.recent_blocks or 0
    if mask.causal and key > query:
        return False
    if mask.own_block is not None:
        first = query - query % mask.own_block
        if key not in range(first - recent * mask.own_block, first + mask.own_block):
            return False
    if mask.earlier_blocks is not None:
        if key >= query - query % mask.earlier_blocks - recent * mask.earlier_blocks:
            return False
        if key // mask.earlier_blocks not in range(mask.from_block or 0, mask.to_block or KEYS):
            return False
    return mask.sliding_window is None or abs(query - key) <= mask.sliding_window - 1


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_is_as_by_definition(mask: Mask) -> None:
    at = torch.arange(KEYS)
    got = mask.visible(at[:, None], at)
    assert got.tolist() == [[sees(mask, query, key) for key in range(KEYS)] for query in range(KEYS)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_may_be_released_is_what_no_later_query_sees(mask: Mask) -> None:
    for position in range(KEYS):
        seen = [key for query in range(position, KEYS) for key in range(KEYS) if sees(mask, query, key)]
        if not seen:  # a block too long to have one before it
            continue
        assert mask.first_key(position) == min(seen)
        for size in (1, 3, 4):
            assert mask.first_needed_block(position, size) == min(seen) // size


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_no_more_keys_are_seen_than_it_says(mask: Mask) -> None:
    for length in range(1, KEYS + 1):
        for queries in range(1, length + 1):
            rows = range(length - queries, length)
            seen = {key for query in rows for key in range(length) if sees(mask, query, key)}
            assert len(seen) <= mask.max_visible_keys(queries, length) <= length
    assert mask.sees_all_before == (not any(mask.constants[1:]))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_first_keys_that_all_later_queries_see(mask: Mask) -> None:
    for position in range(KEYS):
        seen = [all(sees(mask, query, key) for query in range(position, KEYS)) for key in range(KEYS)]
        if mask.sees_first_keys and mask.causal:
            assert seen == [key < mask.first_keys_seen(position) for key in range(KEYS)]
    assert mask.sees_first_keys == ({*mask.features} <= {"earlier_blocks", "recent_blocks"})


def test_constants_say_all_that_kernels_know() -> None:
    assert len({mask.constants for mask in MASKS}) == len(MASKS)
    assert all(Mask.of(mask.constants) == mask for mask in MASKS)
    assert (
        Mask(True, mask_mod=lambda b, h, q, k: k == k).features == ("mask_mod",) and "mask_mod" not in KERNEL_FEATURES
    )
    assert Mask(True, 3).unserved(()) == ("sliding_window",) and not Mask(True, 3).unserved(ALL_FEATURES)


def test_a_spec_says_what_a_mask_leaves_open() -> None:
    given: dict[str, Any] = {"num_heads": 2, "head_dim": 16}
    assert AttentionSpec(**given).mask == Mask(True)
    encoder = AttentionSpec(**given, attn_type=AttentionType.ENCODER, mask=Mask(sliding_window=3))
    assert encoder.mask == Mask(False, 3) and encoder.replace(attn_type=AttentionType.DECODER).mask == Mask(True, 3)
    assert encoder.replace(causal=True).replace(sliding_window=None).mask == Mask(True)


def test_an_op_is_causal_where_its_mask_leaves_that_open() -> None:
    rows, lens = torch.randn(4, 2, 8), torch.tensor([4], dtype=torch.int32)
    tables = (None, torch.tensor([0, 4], dtype=torch.int32), lens)
    run = partial(
        ops.paged_attention, rows, rows, rows, *tables, max_query_len=4, max_seq_len=4, scale=1.0, path="torch"
    )
    assert torch.equal(run(mask=Mask(sliding_window=2)), run(mask=Mask(True, 2)))
    assert torch.equal(run(), run(mask=Mask(True))) and not torch.equal(run(), run(mask=Mask(False)))


@pytest.mark.parametrize(
    "values",
    [
        *({"sliding_window": 0}, {"sliding_window": -1}, {"causal": 2}, {"causal": "yes"}),
        *({"own_block": 0}, {"earlier_blocks": -3}, {"recent_blocks": 2}, {"recent_blocks": 0, "own_block": 4}),
        *({"from_block": 1}, {"to_block": 1, "own_block": 4}, {"to_block": 0, "earlier_blocks": 4}),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, object]) -> None:
    name = next(iter(values))
    with pytest.raises(InvalidInputError, match=f"^{name} must be"):
        Mask(**values)  # type: ignore[arg-type]
