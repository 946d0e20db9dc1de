"""Ids of blocks and slots beside the cache, and far from it: what is not the cache is neither read nor written.

The cache is a view into a larger allocation, whose NaN would reach a result and whose change would be seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import Mask, ops
from pagedattn.errors import InvalidInputError
from pagedattn.kernels.reference import cpu as attention_cpu
from pagedattn.testing import csrc_op

P, S, H, D = 40, 4, 2, 16
SPARE = 2  # blocks on either side of the cache
IDS = [-1, P, P + 1, 2**31 - 1, -(2**31)]
SLOTS = [-1, -S, P * S, P * S + 1, (P + 1) * S, 2**31 - 1, 2**63 - 1]


def guarded(device: torch.device, *inner: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache [P, *inner] of random numbers, and the allocation around it, otherwise NaN."""
    whole = torch.full((P + 2 * SPARE, *(inner or (S, H, D))), torch.nan, device=device).to(dtype)
    cache = whole[SPARE : SPARE + P]
    cache.copy_(torch.randn(cache.shape, device=device))
    return cache, whole


def i32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("bad", IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_gather_kv(device, any_path, bad: int, dtype: torch.dtype) -> None:
    keys, values = (guarded(device, dtype=dtype)[0] for _ in range(2))
    table, lens = i32([[2, bad, 1], [bad, P - 1, bad]], device), i32([0, 11, 23], device)
    gathered = ops.gather_kv(keys, values, table, lens, 23, path=any_path)
    for cache, got in zip((keys, values), gathered, strict=True):
        none = torch.zeros_like(cache[0])
        want = torch.cat([x.view(torch.uint8) for x in (cache[2], none, cache[1, :3], none, cache[P - 1], none)])
        assert got is not None and torch.equal(got.view(torch.uint8), want)


@pytest.mark.parametrize("bad", SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_reshape_and_cache(device, any_path, bad: int, dtype: torch.dtype) -> None:
    (keys, key_room), (values, value_room) = (guarded(device, dtype=dtype) for _ in range(2))
    wanted = [key_room.clone(), value_room.clone()]
    key, value = torch.ones(4, H, D, device=device), torch.full((4, H, D), 2.0, device=device)
    slots = torch.tensor([bad, 0, bad, P * S - 1], device=device)
    ops.reshape_and_cache(key, value, keys, values, slots, path=any_path)
    for want, room, number in zip(wanted, (key_room, value_room), (1.0, 2.0), strict=True):
        want[SPARE, 0] = want[SPARE + P - 1, S - 1] = number
        assert same_bytes(room, want)


@pytest.mark.parametrize("path", ["csrc", "torch"])
@pytest.mark.parametrize("bad", SLOTS)
def test_reshape_and_cache_classic(device, path: str, bad: int) -> None:
    if path == "csrc" and ops.path_of("reshape_and_cache_classic", device) != "csrc":
        pytest.skip("the extension is not built")
    (keys, key_room), (values, value_room) = guarded(device, H, D // 4, S, 4), guarded(device, H, D, S)
    wanted = [key_room.clone(), value_room.clone()]
    key, value = torch.ones(2, H, D, device=device), torch.full((2, H, D), 2.0, device=device)
    ops.reshape_and_cache_classic(key, value, keys, values, torch.tensor([bad, P * S - 1], device=device), path=path)
    wanted[0][SPARE + P - 1, :, :, S - 1], wanted[1][SPARE + P - 1, :, :, S - 1] = 1.0, 2.0
    assert same_bytes(key_room, wanted[0]) and same_bytes(value_room, wanted[1])


@pytest.mark.parametrize("bad", IDS)
def test_slots_of_such_a_block_are_skipped_ones(device, path: str, bad: int) -> None:
    cache, room = guarded(device)
    before, slots = room.clone(), torch.empty(6, dtype=torch.int64, device=device)
    ops.compute_slot_mapping(i32([[bad, bad]], device), S, i32([0, 6], device), i32([6], device), slots, path=path)
    assert bool(((slots < 0) | (slots >= P * S)).all())
    ops.reshape_and_cache(torch.ones(6, H, D, device=device), None, cache, None, slots, path=path)
    assert same_bytes(room, before)


@pytest.mark.parametrize("bad", IDS)
@pytest.mark.parametrize("pair", [(0, None), (None, 0)], ids=["target", "source"])
def test_copies_of_blocks_are_refused(device, any_path, bad: int, pair: tuple[int | None, int | None]) -> None:
    (cache, room), (other, other_room) = guarded(device), guarded(device)
    before = room.clone(), other_room.clone()
    pairs = torch.tensor([[1, 2], [bad if one is None else one for one in pair]])
    with pytest.raises(InvalidInputError, match=rf"^pairs must be .* blocks in \[0, {P}\), got {bad}"):
        ops.copy_blocks([cache], pairs, path=any_path)
    with pytest.raises(InvalidInputError, match=rf"^pairs must be .* blocks in \[0, {P}\), got {bad}"):
        ops.swap_blocks(cache, other, pairs, path=any_path)
    assert same_bytes(room, before[0]) and same_bytes(other_room, before[1])


WAYS: dict[str, dict[str, Any]] = {
    "torch": {"path": "torch"},
    "torch without the extension": {"path": "torch"},
    "torch with masks": {"path": "torch", "lse": True},
    "decode kernel": {"path": "triton"},
    "prefill kernel": {"path": "triton", "deterministic": True},
    "prefill kernel, whole tiles": {"path": "triton", "max_query_len": 400},
    "shared prefix": {"path": "triton", "shared_prefix_len": 16},
}
WHOLE = 18  # blocks that make a tile and more


def tables(bad: int, more: int) -> list[list[int]]:
    """Two sequences that share blocks, one of which is none, as is one of each alone; `more` in front."""
    shared = [*range(10, 10 + more), 2, bad, 0, 1]
    return [[*shared, 3, 4, bad], [*shared, bad, P - 1, 5]]


def lengths(more: int) -> tuple[int, int]:
    return (more + 6) * S + 2, (more + 6) * S + 1


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bad: int, more: int, window: int | None
) -> torch.Tensor:
    """By definition, in float64."""
    rows, (count, total) = [], (len(query) // 2, P * S)
    key, value = (x.cpu().double().flatten(0, 1) for x in (key, value))
    for row, one in enumerate(query.cpu().double()):
        table, last = tables(bad, more)[row // count], lengths(more)[row // count] - count + row % count
        first = 0 if window is None else max(0, last - window + 1)
        slots = [table[at // S] * S + at % S for at in range(first, last + 1)]
        seen = [slot for slot in slots if 0 <= slot < total]
        heads = []
        for head in range(4):
            weights = (key[seen, head // 2] @ one[head] * 0.3).softmax(0)
            heads.append(weights @ value[seen, head // 2])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("bad", IDS)
@pytest.mark.parametrize(("queries", "window"), [(1, None), (3, None), (3, 21)], ids=["one token", "more", "window"])
@pytest.mark.parametrize("way", WAYS)
def test_attention(device, way: str, window: int | None, queries: int, bad: int, monkeypatch) -> None:
    options, more = dict(WAYS[way]), WHOLE if "whole" in way else 0
    if way == "torch without the extension":
        monkeypatch.setattr(attention_cpu, "_has_kernel", lambda inputs: False)
    (key, _), (value, _) = guarded(device), guarded(device)
    query = torch.randn(2 * queries, 4, D, device=device)
    if options.pop("lse", False):
        options["lse"] = torch.empty(query.shape[:2], device=device)
    given: dict[str, Any] = {
        "block_table": i32(tables(bad, more), device),
        "query_start_loc": i32([0, queries, 2 * queries], device),
        "seq_lens": i32(lengths(more), device),
        "max_query_len": queries,
        "max_seq_len": max(lengths(more)),
        "num_decodes": 2 if queries == 1 and "max_query_len" not in options else 0,
        "scale": 0.3,
        "mask": Mask(True, window),
    }
    got = ops.paged_attention(query, key, value, **{**given, **options})
    torch.testing.assert_close(got.cpu().double(), expected(query, key, value, bad, more, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", IDS)
def test_the_extensions_attention_serves_no_such_call(bad: int) -> None:
    if attention_cpu.choose("auto", torch.device("cpu"), "decode_attention") != "csrc":
        pytest.skip("the extension is not built")
    cpu = torch.device("cpu")
    (key, _), (value, _), query = guarded(cpu), guarded(cpu), torch.randn(1, 4, D)
    for table, served in ([2, 1, P - 1], True), ([2, bad, 1], False), ([2, 1, bad], False), ([2, 1, 0, bad], True):
        rest = i32([0], cpu), i32([0], cpu), i32([9], cpu), 0.3, torch.zeros_like(query)
        assert csrc_op("decode_attention")(query, key, value, i32([table], cpu), *rest) == served
