"""Rows of blocks: who holds what after copies, reorderings and cuts; and memory that grows under them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hf_more_models import batch, generate, model_of

import pagedattn.integrations.transformers as hf
from pagedattn import FullAttentionSpec
from pagedattn.errors import CapacityError
from pagedattn.integrations.transformers.columns import Columns
from pagedattn.integrations.transformers.rows import BlockStore, Rows

SIZE = 4
SPEC = FullAttentionSpec(num_kv_heads=1, head_dim=2, block_size=SIZE)
WIDE = FullAttentionSpec(num_kv_heads=2, head_dim=2, block_size=SIZE)


class Written:
    """Rows whose tokens are also kept in lists; what lies in the blocks must be what the lists say."""

    def __init__(self, store: BlockStore, rows: Rows | None = None, tokens: list[list[float]] | None = None) -> None:
        self.rows = rows or Rows(store)
        self.tokens = tokens or []

    def append(self, counts: list[int], first: float) -> None:
        before = list(self.rows.lengths)
        self.rows.append(counts)
        table = self.rows.table()
        for row, (length, count) in enumerate(zip(before, counts, strict=True)):
            for i in range(count):
                block, at = table[row, (length + i) // SIZE], (length + i) % SIZE
                first += 1
                self.tokens[row].append(first)
                for cache in self.rows.store.caches:
                    cache.key[block, at] = first
                    cache.value[block, at] = -first

    def check(self) -> None:
        if not self.tokens:
            return
        table = self.rows.table()
        assert self.rows.lengths == [len(tokens) for tokens in self.tokens]
        for row, tokens in enumerate(self.tokens):
            for i, token in enumerate(tokens):
                for cache in self.rows.store.caches:
                    assert bool((cache.key[table[row, i // SIZE], i % SIZE] == token).all())
                    assert bool((cache.value[table[row, i // SIZE], i % SIZE] == -token).all())


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    """Two caches over one store, and their copies: appended to, reordered, repeated, cut and dropped at random."""
    rng = random.Random(seed)
    store = BlockStore([SPEC, WIDE, SPEC], None if seed % 2 else 400, torch.device("cpu"))
    alive = [Written(store), Written(store)]
    for one in alive:
        one.rows.start(3)
        one.tokens = [[], [], []]
    copied = grown = 0
    for step in range(60):
        one = rng.choice(alive)
        count, used, size = len(one.rows), store.num_used, store.nbytes
        kind = rng.choice(("append", "append", "append", "take", "cut", "fork", "drop"))
        if kind == "append":
            counts = [rng.choice((0, 1, 1, 3, 6)) for _ in range(count)]
            new = sum(-(-(len(t) + n) // SIZE) - -(-len(t) // SIZE) for t, n in zip(one.tokens, counts, strict=True))
            one.append(counts, step * 1000)
            copied += store.num_used - used - new > 0
        elif kind == "take":
            chosen = [rng.randrange(count) for _ in range(rng.choice((count, 3, 4)))]
            one.rows.take(chosen)
            one.tokens = [list(one.tokens[row]) for row in chosen]
        elif kind == "cut":
            lengths = [rng.randint(max(0, len(tokens) - 5), len(tokens)) for tokens in one.tokens]
            one.rows.cut(lengths)
            one.tokens = [tokens[:length] for tokens, length in zip(one.tokens, lengths, strict=True)]
        elif kind == "fork" and len(alive) < 5:
            alive.append(Written(store, one.rows.fork(), [list(tokens) for tokens in one.tokens]))
            assert store.num_used == used
        elif kind == "drop" and len(alive) > 2:
            alive.remove(one)
            del one
        grown += store.nbytes > size > 0
        for other in alive:
            other.check()
    assert copied > 0 and (grown > 0) == bool(seed % 2)
    held = {block for one in alive for blocks in one.rows._blocks for block in blocks}
    assert store.num_used == len(held)
    del one, other
    alive.clear()
    assert store.num_used == 0


def test_the_last_holder_of_a_block_keeps_it() -> None:
    store = BlockStore([SPEC], 20, torch.device("cpu"))
    rows = Rows(store)
    rows.start(1)
    rows.append([6])
    rows.take([0, 0, 0])
    assert store.num_used == 2
    rows.append([1, 1, 1])
    assert store.num_used == 1 + 3, "three open blocks, one of them the first"
    rows.append([1, 1, 1])
    assert store.num_used == 1 + 3
    rows.cut([4, 4, 4])
    assert store.num_used == 1
    rows.append([1, 0, 1])
    assert store.num_used == 3


@pytest.mark.parametrize("cut", ["original", "fork"])
def test_a_full_block_that_is_cut_open_is_copied(cut: str) -> None:
    """Where both hold it, whichever of them is cut and goes on."""
    store = BlockStore([SPEC], 20, torch.device("cpu"))
    original = Written(store)
    original.rows.start(1)
    original.tokens = [[]]
    original.append([8], 0)
    forked = Written(store, original.rows.fork(), [list(original.tokens[0])])
    writer = original if cut == "original" else forked
    writer.rows.cut([7])
    writer.tokens[0].pop()
    writer.append([1], 100)
    original.check()
    forked.check()
    assert store.num_used == 3


def test_blocks_for_which_there_is_no_memory_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore([SPEC], None, torch.device("cpu"))
    rows = Rows(store)
    rows.start(1)
    rows.append([SIZE])

    def full(num_blocks: int) -> None:
        raise CapacityError(f"{num_blocks} blocks")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_take_memory", full)
        with pytest.raises(CapacityError):
            rows.append([40])
    assert store.num_used == 1 and rows.lengths == [SIZE]
    rows.append([40])
    assert store.num_used == 11


def test_too_few_blocks_change_nothing() -> None:
    store = BlockStore([SPEC], 4, torch.device("cpu"))
    rows = Rows(store)
    rows.start(2)
    rows.append([5, 3])
    with pytest.raises(CapacityError):
        rows.append([1, 2])
    assert rows.lengths == [5, 3] and store.num_used == 3
    rows.append([3, 1])


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_memory_follows_the_tokens_and_not_the_padding(name: str) -> None:
    """A ragged batch against the default cache; memory that was expected is taken once, and grows where it was not."""
    model, inputs = model_of(name, sliding_window=200), batch(40, 3, 3, 3)
    options: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 8, "do_sample": False}
    options |= {"eos_token_id": None}
    default = model.generate(**inputs, **options).past_key_values
    padded = sum(x.nbytes for layer in default.layers for x in (layer.keys, layer.values))
    hf.enable(model, block_size=4)
    out = model.generate(**inputs, **options)
    blocks = -(-47 // 4) + 3 * -(-10 // 4)
    per_block = padded // (4 * 47) * 4
    assert out.past_key_values.num_blocks_used == blocks
    assert out.past_key_values.nbytes == (blocks + 1) * per_block
    assert out.past_key_values.nbytes < 0.6 * padded
    cache = hf.new_cache(model)
    sizes = set()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in range(4):
        ids = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, max_new_tokens=9)
        mask = torch.cat((mask, mask.new_ones(4, 9)), 1)
        sizes.add(cache.nbytes)
    assert 2 <= len(sizes) <= 4 and ids.shape[1] == 40 + 36


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(
    "way", [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4}], ids=["samples", "beams"]
)
def test_a_prompt_is_stored_once_for_all_its_rows(way: dict[str, Any], chunk: int | None) -> None:
    model, inputs = model_of("mistral"), batch(40, 21)
    options: dict[str, Any] = {**way, "return_dict_in_generate": True, "max_new_tokens": 8, "eos_token_id": None}
    torch.manual_seed(0)
    wanted = model.generate(**inputs, **options).sequences
    hf.enable(model, block_size=4)
    torch.manual_seed(0)
    out = model.generate(**inputs, **options, prefill_chunk_size=chunk)
    assert torch.equal(out.sequences, wanted)
    cache, beams = out.past_key_values, "num_beams" in way
    alone = 4 * (-(-47 // 4) + -(-28 // 4))
    together = alone - 3 * (40 // 4 + 21 // 4)
    assert cache.num_blocks_used <= together < 0.5 * alone
    assert beams or cache.num_blocks_used == together
    per_block = cache.nbytes // (together + 1 + 8 * beams)
    assert cache.nbytes == per_block * (together + 1 + 8 * beams), "memory was taken once"
    cache.crop(30)
    different = torch.arange(8)[:, None] + 5
    mask = torch.cat((inputs["attention_mask"][:, :30].repeat_interleave(4, 0), torch.ones_like(different)), 1)
    ids = torch.cat((inputs["input_ids"][:, :30].repeat_interleave(4, 0), different), 1)
    again = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache)
    assert torch.equal(again, generate(model, {"input_ids": ids, "attention_mask": mask}))


def test_rows_may_be_repeated_and_chosen() -> None:
    model, inputs = model_of("mistral"), batch(9, 4)
    hf.enable(model, block_size=4, num_blocks=40)
    alone = generate(model, inputs)
    cache = hf.new_cache(model)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], position_ids=(mask.cumsum(1) - 1)[:, :8], past_key_values=cache)
    used = cache.num_blocks_used
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4 and cache.num_blocks_used == used
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.batch_select_indices(torch.tensor([True, True]))
    assert cache.batch_size == 2 and cache.num_blocks_used == used
    got = generate(model, {"input_ids": ids[[1, 0]], "attention_mask": mask[[1, 0]]}, past_key_values=cache)
    assert torch.equal(got, alone[[1, 0]])
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.num_blocks_used == -(-(9 + 11) // 4)
    cache.crop(-15)
    assert cache.get_seq_length() == 5 and cache.num_blocks_used == 2
    cache.crop(3)
    assert cache.get_seq_length() == 3 and cache.num_blocks_used == 1
    cache.crop(0)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("way", ["select", "reorder", "crop"])
@torch.no_grad()
def test_no_mask_is_needed_once_the_padding_is_gone(way: str) -> None:
    model, inputs = model_of("llama"), batch(9, 9 if way == "crop" else 4)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    wanted = model(ids).logits[:, -1]
    hf.enable(model, block_size=4)
    cache = hf.new_cache(model)
    model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
    if way == "crop":
        later = torch.tensor([[1, 1], [0, 1]])
        model(ids[:, :2], attention_mask=torch.cat((mask[:, :8], later), 1), past_key_values=cache)
        cache.crop(-2)
        rows = [0, 1]
    elif way == "select":
        cache.batch_select_indices(torch.tensor([True, False]))
        rows = [0]
    else:
        cache.reorder_cache(torch.tensor([0, 0]))
        rows = [0, 0]
    got = model(ids[rows, 8:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, wanted[rows], rtol=0, atol=1e-12)


def test_columns_count_tokens() -> None:
    columns = Columns()
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=bool)
    real = columns.admit(mask, 2, 4, True)
    assert real is not None and real.tolist() == mask.tolist()
    assert columns.admit(np.pad(mask, ((0, 0), (0, 1)), constant_values=True), 2, 1, True) is None
    assert columns.admit(None, 2, 1, True, unread=True) is None
    assert [columns.lengths(n, 2) for n in (0, 2, 3, 5, 6)] == [[0, 0], [0, 2], [1, 3], [3, 5], [4, 6]]
    columns.take([1, 1, 0])
    assert columns.lengths(4, 3) == [4, 4, 2]
    columns.cut(1)
    assert columns.count == 1 and columns.lengths(1, 3) == [1, 1, 0]
