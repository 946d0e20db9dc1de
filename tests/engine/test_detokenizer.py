"""Tokenizer and Detokenizer: the pieces of a stream are the whole text, and no character comes in halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from pagedattn.engine.models.detokenizer import Detokenizer
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.engine.models.tokenizer import Tokenizer
from pagedattn.errors import RequestError, WeightsError

TEXT = "the quick brown fox says caf\u00e9 to \u4f60\u597d \U0001f600 and\ttabs\n" * 3


def byte_level() -> Backend:
    """A small byte-level BPE, as Qwen and Llama 3 have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_fallback() -> Backend:
    """Words with a leading mark, and bytes for the rest, as Llama 2 and Mistral have."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ("\u2581the", "\u2581fox", "\u2581", "a"):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    replace = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["</s>"])
    return backend


TOKENIZER = Tokenizer(byte_level())
FALLBACK = Tokenizer(byte_fallback())
BYTE_IDS = [TOKENIZER._backend.token_to_id(piece) for piece in sorted(pre_tokenizers.ByteLevel.alphabet())]


def stream(tokenizer: Tokenizer, ids: list[int], chunk: int = 1, **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(BYTE_IDS), max_size=40), st.integers(1, 5))
def test_pieces_of_random_bytes_are_the_whole_text(ids: list[int], chunk: int) -> None:
    assert "".join(stream(TOKENIZER, ids, chunk)) == TOKENIZER.decode(ids)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(max_size=40), st.integers(1, 5))
def test_pieces_of_any_text_are_the_text(text: str, chunk: int) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(stream(TOKENIZER, ids, chunk)) == text


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["the", "fox", "\u00e9", "\u4f60", "\U0001f600", "a"]), min_size=1, max_size=12))
def test_pieces_with_byte_fallback_and_stripped_space(words: list[str]) -> None:
    ids = []
    for word in words:
        known = FALLBACK._backend.token_to_id(f"\u2581{word}")
        ids += [known] if known is not None else [1 + byte for byte in f" {word}".encode()]
    assert "".join(stream(FALLBACK, ids)) == FALLBACK.decode(ids)


@pytest.mark.parametrize("silent", [["</s>"], [10_000], ["</s>", 10_000] * 20], ids=["special", "unknown", "many"])
def test_tokens_without_text_take_no_space_with_them(silent: list[str | int]) -> None:
    the, fox, *others = (
        FALLBACK._backend.token_to_id(one) if isinstance(one, str) else one
        for one in ("\u2581the", "\u2581fox", *silent)
    )
    ids = [*others, the, *others, fox, *others, *others, the]
    assert FALLBACK.decode(ids) == "the fox the"
    for chunk in range(1, 6):
        assert "".join(stream(FALLBACK, ids, chunk)) == "the fox the"


def test_a_blank_that_a_decoder_strips_keeps_the_next_one() -> None:
    """It has no text of its own, and is what the decoder takes away in front of all."""
    ids = [FALLBACK._backend.token_to_id(piece) for piece in ("\u2581", "\u2581the")]
    assert "".join(stream(FALLBACK, ids)) == FALLBACK.decode(ids) == " the"


def test_half_a_character_is_held_back() -> None:
    ids = [1 + byte for byte in "\U0001f389 ok".encode()]
    assert stream(FALLBACK, ids) == ["", "", "", "\U0001f389", " ", "o", "k", ""]
    parts = stream(TOKENIZER, TOKENIZER.encode("\U0001f389 ok"))
    assert parts[0] == "", "the emoji must be several tokens, or nothing is tested"
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("ok \U0001f389")[:-1]
    pieces = stream(TOKENIZER, ids)
    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == "\ufffd"


def test_endless_invalid_bytes_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(FALLBACK)
    sent = [detokenizer.push([1 + 0x80]) for _ in range(1000)]
    assert sum(map(len, sent)) > 900
    assert len(detokenizer._window) < 100


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [*TOKENIZER.encode("the fox"), TOKENIZER.control_tokens["<|im_end|>"]]
    assert "".join(stream(TOKENIZER, ids)) == "the fox"
    assert "".join(stream(TOKENIZER, ids, skip_special_tokens=False)) == "the fox<|im_end|>"


def test_control_tokens_can_be_spelled_out() -> None:
    text = "a<|im_end|>b"
    as_control = TOKENIZER.encode(text)
    spelled = TOKENIZER.encode(text, control=False)
    assert TOKENIZER.control_tokens["<|im_end|>"] in as_control
    assert TOKENIZER.control_tokens["<|im_end|>"] not in spelled
    assert TOKENIZER.decode(spelled, skip_special_tokens=False) == text
    assert TOKENIZER.encode(text) == as_control


def test_from_folder(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    assert Tokenizer.from_folder(folder) is None
    backend = byte_level()
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "bos_token": null}', encoding="utf-8"
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_ids == (tokenizer.control_tokens["<|im_end|>"],)
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>"}


def test_bad_input_is_typed(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("\ud800")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(ModelFolder(tmp_path))
