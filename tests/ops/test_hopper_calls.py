"""Which calls go to the prefill kernel for Hopper; what it computes on one is in tests/backends/test_hopper.py."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn import PagedKVCache, ops
from pagedattn.errors import InvalidInputError
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill_sm90 import support, tile_schedule
from pagedattn.kernels.prefill_sm90.tile_schedule import Bounds, Listing
from pagedattn.ops import attention_plan

HEADS, KV_HEADS, DIM, BLOCKS, SIZE = 8, 2, 128, 5, 16


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "why_not_here", lambda device: "")


def listing(kv_heads: int, group: int, max_keys: int = 1 << 17, window: int = 0) -> Listing:
    return Listing(kv_heads, group, 128, causal=True, window=window, max_keys=max_keys, num_sms=132)


def joined(num_decodes: int = 64, kv_heads: int = 8, group: int = 4, max_seq_len: int = 4096) -> bool:
    return attention_plan.joins(listing(kv_heads, group), Bounds(2000, num_decodes + 1, num_decodes, 1000, max_seq_len))


def test_decodes_that_join_prompts() -> None:
    assert joined() and joined(128, max_seq_len=3000) and joined(1, max_seq_len=1000)
    assert not joined(0), "no decodes"
    assert not joined(32) and not joined(16, max_seq_len=8000), "two long ones for an SM, and then none"
    assert not joined(group=6), "three items a head, which would read the same keys"


def taken(
    num_seqs: int = 64, group: int = 4, max_query_len: int = 8, max_seq_len: int = 4096, max_keys: int = 1 << 17
) -> bool:
    bounds = Bounds(1, num_seqs, 0, max_query_len, max_seq_len)
    return attention_plan.takes(listing(8, group, max_keys=max_keys), bounds)


def test_several_tokens_that_are_items_of_its_own() -> None:
    assert taken() and taken(17, max_seq_len=2048) and taken(group=16, max_query_len=2)
    assert not taken(max_query_len=7) and not taken(group=32, max_query_len=1), "a quarter of an item, or a decode"
    assert not taken(16, max_seq_len=100), "fewer than SMs, and too short to be cut"
    assert not taken(max_seq_len=8000), "some SMs would be left with a long one, and there are many"
    assert taken(16, max_seq_len=8000) and taken(1, max_seq_len=4096), "few, whose keys are shared out"
    assert not taken(16, max_seq_len=8000, max_keys=0), "parts of tables of unknown size"
    assert not taken(group=6)


def parts(
    tokens: int = 100, num_seqs: int = 1, num_decodes: int = 0, longest: int = 100, keys: int = 8000, **of: int
) -> bool:
    return tile_schedule.in_parts(listing(8, 4, **of), Bounds(tokens, num_seqs, num_decodes, longest, keys))


def test_prompts_whose_keys_are_shared_out() -> None:
    assert parts() and parts(2000, longest=2000) and parts(400, num_seqs=4)
    assert not parts(keys=2000) and not parts(4000, longest=2001), "too short, or as many tokens as keys"
    assert not parts(4000, num_seqs=2, longest=2000) and not parts(100, num_seqs=64), "an item for each SM"
    assert parts(8192), "rows of nobody"
    assert not parts(num_decodes=2), "decodes among them take turns with prompts"
    assert not parts(max_keys=0)
    assert parts(window=2000) and not parts(window=1900), "keys that nobody sees"


def call(**changes: Any) -> AttentionInputs:
    dtype = changes.pop("dtype", torch.bfloat16)
    cache = torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM, dtype=changes.pop("stored", dtype))
    starts, lens = torch.tensor([0, 1, 40], dtype=torch.int32), torch.tensor([30, 60], dtype=torch.int32)
    given = {
        "query": torch.zeros(40, HEADS, DIM, dtype=dtype),
        "key": cache,
        "value": cache.clone(),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "query_start_loc": starts,
        "seq_lens": lens,
        **dict.fromkeys(("sinks", "alibi_slopes", "k_scale", "v_scale", "lse")),
        "out": torch.zeros(40, HEADS, DIM, dtype=dtype),
        **{"scale": 0.1, "out_scale": 1.0, "causal": True, "window": 0, "softcap": 0.0},
        **{"max_query_len": 39, "max_seq_len": 60, "num_decodes": 1, "deterministic": False},
    }
    return AttentionInputs(**{**given, **changes})


def caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values as the library allocates them."""
    pool = PagedKVCache(2, BLOCKS, SIZE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cpu", layout=layout)
    layer = pool.layer(1)
    return layer.key, layer.value


def test_the_usual_call_is_served() -> None:
    assert support.why_not(call()) == ""
    fused = torch.zeros(40, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    assert support.why_not(call(query=fused[:, :HEADS])) == ""


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_our_own_caches_are_served(layout: str) -> None:
    key, value = caches(layout)
    assert support.why_not(call(key=key, value=value)) == ""


REFUSED = {
    "no paged cache": {"block_table": None},
    "deterministic": {"deterministic": True},
    "an empty cache": {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
    "a scale that is not positive": {"scale": -0.1},
    "queries of torch.float32": {"dtype": torch.float32},
    "over a cache of torch.float8_e4m3fn": {"stored": torch.float8_e4m3fn},
    "head dims 128 and 64": {"value": torch.zeros(BLOCKS, SIZE, KV_HEADS, 64, dtype=torch.bfloat16)},
    "blocks of 48": dict.fromkeys(("key", "value"), torch.zeros(BLOCKS, 48, KV_HEADS, DIM, dtype=torch.bfloat16)),
    "blocks of 8": dict.fromkeys(("key", "value"), torch.zeros(BLOCKS, 8, KV_HEADS, DIM, dtype=torch.bfloat16)),
    "scales of a cache that is not fp8": {"v_scale": torch.ones(2)},
    "scales of": {"out_scale": 2.0},
    "ALiBi": {"alibi_slopes": torch.zeros(HEADS)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_refused_with_a_reason(reason: str) -> None:
    assert reason in support.why_not(call(**REFUSED[reason]))


def strided(*stride: int) -> torch.Tensor:
    size = 1 + sum((n - 1) * step for n, step in zip((BLOCKS, SIZE, KV_HEADS, DIM), stride, strict=True))
    return torch.zeros(size, dtype=torch.bfloat16).as_strided((BLOCKS, SIZE, KV_HEADS, DIM), stride)


@pytest.mark.parametrize(
    ("stride", "served"),
    [
        ((SIZE * 256, 256, 128, 1), True),
        ((2 * SIZE * 256, 256, 128, 1), True),  # keys and values of a block beside each other
        ((SIZE * 256 + 128, 256, 128, 1), False),  # blocks not a whole number of slots apart
        ((SIZE * 256, 128, SIZE * 128, 1), True),  # HND
        ((SIZE * 384, 128, SIZE * 128 + 64, 1), False),
        ((SIZE * 260, 260, 130, 1), False),  # rows that do not begin at 16 bytes
        ((0, 256, 128, 1), False),  # an expanded cache
    ],
)
def test_strides(stride: tuple[int, ...], served: bool) -> None:
    assert (support.why_not(call(key=strided(*stride))) == "") == served


@pytest.mark.parametrize(
    ("group", "pack", "tokens"),
    [(1, 1, 128), (4, 4, 32), (5, 1, 128), (6, 2, 64), (8, 8, 16), (96, 32, 4), (128, 64, 2)],
)
def test_heads_of_an_item(group: int, pack: int, tokens: int) -> None:
    assert tile_schedule.pack_of(group) == pack and tile_schedule.tokens_of(group) == tokens


def test_prompts_go_there_and_decodes_do_not(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed batch: the list is of the sequences that are no decodes, and covers their rows alone."""
    pytest.importorskip("triton")
    seen: dict[str, Any] = {}
    module = import_module("pagedattn.ops.paged_attention")
    real = module.kernels

    def kernels(name: str) -> Any:
        if name == "prefill_hopper":
            return SimpleNamespace(
                launch=lambda inputs, items, room: seen.update(inputs=inputs, items=items, room=room)
            )
        return SimpleNamespace(launch=lambda *args: seen.update({name: args})) if name == "decode" else real(name)

    monkeypatch.setattr(module, "kernels", kernels)
    tensors = [x.to(device) for x in call(dtype=torch.float16)[:6] if x is not None]
    ops.paged_attention(*tensors, max_query_len=39, max_seq_len=6000, scale=0.1, num_decodes=1, path="triton")
    assert "decode" in seen
    assert seen["inputs"].seq_lens.tolist() == [60] and seen["inputs"].query_start_loc.tolist() == [1, 40]
    entries = seen["items"][2 : 2 + int(seen["items"][1, 0]), :5].tolist()
    assert entries == [[33, 7, 53, 60, 0], [1, 32, 21, 60, 0]]
    seen.clear()
    starts, lens = tensors[4:]
    of = tile_schedule.Listing(KV_HEADS, HEADS // KV_HEADS, DIM, True, 0, 64, 132)
    mine = tile_schedule.new_items(of, Bounds(40, 1, 0, 39, 60), device)
    tile_schedule.list_items(of, mine, starts[1:], lens[1:])
    ops.paged_attention(
        *tensors, max_query_len=39, max_seq_len=6000, scale=0.1, num_decodes=1, items=mine, path="triton"
    )
    assert seen["items"] is mine and seen["room"] is None
    cut = tile_schedule.new_items(of, Bounds(40, 1, 0, 39, 6000), device)
    room = torch.zeros(of.workspace, dtype=torch.int32, device=device)
    given = {"items": cut, "workspace": room, "path": "triton"}
    ops.paged_attention(*tensors, max_query_len=39, max_seq_len=6000, scale=0.1, num_decodes=1, **given)
    assert seen["items"] is cut and seen["room"] is room
    with pytest.raises(InvalidInputError, match="workspace"):
        given["workspace"] = room[:10000]
        ops.paged_attention(*tensors, max_query_len=39, max_seq_len=6000, scale=0.1, num_decodes=1, **given)


def test_calls_whose_metadata_planned_otherwise(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata do not know every block size, nor which strides TMA follows."""
    pytest.importorskip("triton")
    seen: list[tuple[str, Any]] = []
    module = import_module("pagedattn.ops.paged_attention")

    def kernels(name: str) -> Any:
        def launch(*args: Any) -> None:
            seen.append((name, args[2]))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(module, "kernels", kernels)
    cache, few = torch.zeros(200, SIZE, KV_HEADS, DIM, dtype=torch.float16, device=device), [0, 16]
    starts, lens = (torch.tensor(n, dtype=torch.int32, device=device) for n in (few, [3000]))
    table, wide = torch.zeros(1, 200, dtype=torch.int32, device=device), torch.zeros(16, HEADS, 132, device=device)

    def run(query: torch.Tensor, **given: torch.Tensor) -> tuple[str, Any]:
        """The kernel launched, and its workspace."""
        bounds = {"max_query_len": 16, "max_seq_len": 3000, "scale": 0.1, "path": "triton"}
        ops.paged_attention(query.half(), cache, cache, table, starts, lens, **bounds, **given)  # type: ignore[arg-type]
        return seen.pop()

    of = tile_schedule.Listing(KV_HEADS, HEADS // KV_HEADS, DIM, True, 0, 3200, 132)
    items = tile_schedule.new_items(of, Bounds(16, 1, 0, 16, 3000), device)
    room = torch.zeros(of.workspace, dtype=torch.int32, device=device)
    query = wide[..., :DIM].contiguous()
    assert run(query, items=items, workspace=room) == ("prefill_hopper", room)
    name, own = run(query, workspace=room)
    assert (name, own is room) == ("decode", True), "a list was made that no other layer can use"
    assert run(query)[0] == "prefill_hopper"
    monkeypatch.setattr(support, "why_not", lambda inputs: "strides that TMA cannot follow")
    name, own = run(query, items=items, workspace=room[:10])
    assert name == "decode" and own is not None and own.numel() > 10
