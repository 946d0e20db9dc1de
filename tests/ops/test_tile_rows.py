"""Which tokens and heads the rows of a tile of the prefill kernel for Hopper are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn.kernels.prefill_sm90 import tile_rows
from pagedattn.kernels.prefill_sm90.plan import by_eights, halves_per_tile, params_of, tokens_per_tile, whole_tokens
from pagedattn.kernels.shape import AttentionShape, BatchBounds

SHAPE = AttentionShape(torch.bfloat16, torch.bfloat16, 8, 5, 128, 128, (1, 0), False, True, False, 16)


@pytest.mark.parametrize(("pack", "tokens", "half"), [(1, 128, 64), (4, 32, 16), (64, 2, 1), (3, 40, 16), (5, 24, 8)])
def test_a_tile_has_each_token_of_each_head_once(pack: int, tokens: int, half: int) -> None:
    """Eight rows at a time by one copy; up to `half` tokens the first 64 rows have all of them."""
    assert (tokens_per_tile(pack), whole_tokens(64, pack)) == (tokens, half)
    assert [halves_per_tile(pack, n) for n in (half, half + 1)] == [1, 2]
    token_of, head_of = tile_rows.token_of.fn, tile_rows.head_of.fn
    places = [(token_of(row, pack), head_of(row, pack)) for row in range(128)]
    used = [place for place in places if place[0] < tokens]
    assert sorted(used) == [(token, head) for token in range(tokens) for head in range(pack)]
    assert all(token >= half for token, _ in places[64:])
    if by_eights(pack):
        copies = [places[at : at + 8] for at in range(0, 128, 8)]
        assert all(one == [(one[0][0] + n, one[0][1]) for n in range(8)] for one in copies)


@pytest.mark.parametrize(
    ("keys", "changes", "pack"),
    [
        *((1024, {}, 5), (1023, {}, 1), (9000, {"head_dim": 64}, 1), (1024, {"head_dim": 96}, 5)),
        *((9000, {"mask": (1, 500)}, 5), (9000, {"group": 4}, 4)),
    ],
)
def test_eight_tokens_of_a_head_follow_each_other_where_keys_are_many(
    keys: int, changes: dict[str, Any], pack: int
) -> None:
    """And heads are no small ones. Neither a window nor prompts' keys matter, which plans of a step may not have in
    common."""
    bounds = BatchBounds(num_tokens=600, num_seqs=4, num_decodes=0, max_query_len=150, max_seq_len=keys)
    for known in (bounds, bounds._replace(max_prompt_keys=300)):
        assert params_of(SHAPE._replace(**changes), known, 132).pack == pack
