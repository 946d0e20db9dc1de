"""`pagedattn why --mla` says what MLAAttention does: who attends absorbed, who expanded, from how many tokens on."""

from __future__ import annotations

import json

import pytest
import torch
from backends.latent_peers import install

from pagedattn import MLAAttention
from pagedattn.cli import command as cli
from pagedattn.errors import NoBackendError

ROW = ("--mla", "--heads", "16", "--dtype", "fp16", "--device", "cpu", "--block-size", "64", "--clean-cache")


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def layer(backend: str | None, window: int | None = None) -> MLAAttention:
    """The layer that ROW describes."""
    kind = {"dtype": torch.float16, "block_size": 64, "clean_cache": True, "device": "cpu", "sliding_window": window}
    return MLAAttention(16, 512, 64, 128, 128, 0.1, backend=backend, **kind)  # type: ignore[arg-type]


def answer(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    cli.main(["why", *ROW, *options, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("backend", [None, "TORCH", "decode=FLASH_MLA", "prefill=TORCH,decode=FLASH_ATTN"])
def test_it_says_what_the_layer_takes(backend: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    said, made = answer(capsys, *(("--backend", backend) if backend else ())), layer(backend)
    assert said["error"] is None and "prefill" not in said and "decode" not in said
    assert said["absorbed"] == made.selection.decode.name and said["expanded"] == made.expanded_selection.prefill.name
    assert made.selection.prefill.name == made.selection.decode.name, "chunks that are attended to absorbed too"
    assert (said["expanded_head"], said["expanded_from"], said["block_size"]) == ("192/128", 172, 64)
    assert f"expanded 192/128 by {made.expanded_selection.served_by} from 172 tokens on" in made.plan_key[2]


@pytest.mark.parametrize("backend", ["FLASH_MLA", "prefill=FLASH_MLA,decode=TORCH"])
def test_what_the_layer_refuses_is_refused(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoBackendError, match=r"the expanded form, .* backend FLASH_MLA, asked for by argument, cannot"):
        layer(backend)
    assert cli.main(["why", *ROW, "--backend", backend]) == 1
    text = capsys.readouterr().out
    assert "the expanded form" in text and "it serves latent attention (MLA) only" in text
    assert "who can attend absorbed: " in text and "who can attend expanded: " in text
    assert "absorbed" not in answer(capsys, "--backend", backend)


def test_sizes_of_a_head_decide_from_when_on(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "--nope-dim", "64", "--v-dim", "64")
    assert (said["expanded_head"], said["expanded_from"]) == ("128/64", 75)
    assert answer(capsys, "--window", "9", "--backend", "TORCH")["expanded_from"] is None
    assert layer("TORCH", window=9).plan_key[2].endswith("expanded 192/128 by TORCH from None tokens on")
    assert cli.main(["why", *ROW, "--v-dim", "0"]) != 0
    assert "--v-dim must be at least 1, got 0" in capsys.readouterr().err


def test_no_scale_is_shown_and_both_forms_tell_who_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", *ROW]) == 0
    text = capsys.readouterr().out
    assert "scale=0" not in text and "absorbed, not " in text and "expanded, not FLASH_MLA:" in text
    said = answer(capsys)
    assert said["spec"]["scale"] is None  # type: ignore[index]
    assert {"rejections", "expanded_rejections"} < set(said)
