"""Forwards without a cache: rows of several sequences, and padding on either side, give transformers' own logits."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import VOCAB
from hf_more_models import batch, model_of

import pagedattn.integrations.transformers as hf
from pagedattn.errors import InvalidInputError, UnsupportedError

# Three sequences, then two, of which one begins later than at 0; windows of 8 end within the longest.
PACKED = torch.tensor([[*range(11), *range(1), *range(5)], [*range(3), *range(20, 34)]])


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, 17), generator=torch.Generator().manual_seed(1))


# transformers tells gpt_oss' and OPT's masks nothing of positions: their rows are one sequence each.
@pytest.mark.parametrize(
    ("name", "packs"),
    [("llama", True), ("mistral", True), ("gemma2", True), ("qwen3", True), ("gpt_oss", False), ("opt", False)],
)
@torch.no_grad()
def test_positions_that_begin_anew_begin_another_sequence(name: str, packs: bool) -> None:
    reference = model_of(name)
    model, tokens = copy.deepcopy(reference), ids()
    hf.enable(model, block_size=4)
    wanted = reference(tokens, position_ids=PACKED, use_cache=False).logits
    torch.testing.assert_close(model(tokens, position_ids=PACKED, use_cache=False).logits, wanted, rtol=0, atol=1e-12)
    for row in (0, 1):  # one row of positions for all rows of tokens
        given = {"position_ids": PACKED[row : row + 1], "use_cache": False}
        torch.testing.assert_close(model(tokens, **given).logits, reference(tokens, **given).logits, rtol=0, atol=1e-12)
    whole = reference(tokens, position_ids=PACKED).logits  # with a cache, rows are one sequence each
    torch.testing.assert_close(model(tokens, position_ids=PACKED).logits, whole, rtol=0, atol=1e-12)
    assert (float((whole - wanted).abs().max()) > 0.1) == packs
    if packs:
        alone = reference(tokens[:1, 12:]).logits
        torch.testing.assert_close(wanted[:1, 12:], alone, rtol=0, atol=1e-12)
        with pytest.raises(InvalidInputError, match=r"position_ids must be \[2, 17\], as input_ids, got \[1, 16\]"):
            model(tokens, position_ids=PACKED[:1, 1:], use_cache=False)


@torch.no_grad()
def test_a_mask_leaves_rows_whole() -> None:
    reference = model_of("llama")
    model, given = copy.deepcopy(reference), {"position_ids": PACKED, "attention_mask": torch.ones(2, 17)}
    reference.config.use_cache = model.config.use_cache = False
    hf.enable(model, block_size=4)
    torch.testing.assert_close(model(ids(), **given).logits, reference(ids(), **given).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_padding_on_the_right(name: str) -> None:
    reference, inputs = model_of(name), batch(17, 3, 9)
    model = copy.deepcopy(reference)
    hf.enable(model, block_size=4)
    given = {key: value.flip(1) for key, value in inputs.items()}
    real = given["attention_mask"].bool()
    wanted = reference(**given, use_cache=False).logits[real]
    torch.testing.assert_close(model(**given, use_cache=False).logits[real], wanted, rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match=r"row 1 .*ends in padding, after.*use_cache=False where no tokens"):
        model(**given)
    with pytest.raises(InvalidInputError, match=r"attention_mask must be \[3, 17\], as input_ids, got \[3, 16\]"):
        model(given["input_ids"], attention_mask=given["attention_mask"][:, 1:], use_cache=False)


@torch.no_grad()
def test_padding_between_tokens_where_windows_count_it() -> None:
    mask = torch.ones(2, 17)
    mask[1, 4:6] = 0
    reference, windowed = model_of("llama"), model_of("mistral")
    model = copy.deepcopy(reference)
    hf.enable(model)
    hf.enable(windowed)
    given, real = {"attention_mask": mask, "use_cache": False}, mask.bool()
    wanted = reference(ids(), **given).logits[real]
    torch.testing.assert_close(model(ids(), **given).logits[real], wanted, rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match="row 1 of the attention_mask has padding between tokens"):
        windowed(ids(), **given)
