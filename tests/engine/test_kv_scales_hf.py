"""hf.enable with the scales of a calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make
from tiny_models import hf_model

from pagedattn import KVScales
from pagedattn.errors import InvalidInputError
from pagedattn.integrations import transformers as hf

TOKENS = torch.randint(3, 500, (1, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KVScales]:
    return make(tmp_path_factory.mktemp("enlarged"))


@pytest.fixture
def model(made: tuple[Path, KVScales]) -> Any:
    transformers = hf.import_transformers()
    return transformers.AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float32).eval()


@torch.no_grad()
def chances(model: Any) -> torch.Tensor:
    """Log-probabilities [60, vocabulary]."""
    return model(TOKENS).logits[0].log_softmax(-1)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_the_divergence_from_an_exact_cache_is_small_with_scales(
    made: tuple[Path, KVScales], model: Any, name: str
) -> None:
    folder, loaded = made
    exact, kl = chances(model), []
    for given in (None, folder / "kv_scales.json", loaded):
        hf.enable(model, kv_cache_dtype=name, kv_scales=given)
        kl.append(float((exact.exp() * (exact - chances(model))).sum(-1).mean()))
    assert kl[1] == kl[2] < kl[0] / 5, kl
    cache = hf.new_cache(model)
    new = model.generate(TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=None, past_key_values=cache)
    assert new.shape == (1, 64)


def test_scales_of_another_model_or_format_are_refused(made: tuple[Path, KVScales], model: Any, tmp_path: Path) -> None:
    folder, loaded = made
    other = replace(loaded, checkpoint={"model.safetensors": "0"})
    refused: list[tuple[Any, str, str]] = [
        (folder / "kv_scales.json", "int8", "kv_scales must be None for kv_cache_dtype='int8'"),
        (loaded, "auto", "kv_scales must be None for kv_cache_dtype='auto', .* got 'KVScales'"),
        (other, "fp8", "of the checkpoint that is loaded, got KVScales, which has another model.safetensors"),
        (replace(loaded, layers=loaded.layers[:2]), "fp8", "of a model with 4 layers, got 2"),
        (tmp_path / "none.json", "fp8", "a file of `pagedattn calibrate`"),
        (7, "fp8", "kv_scales must be the path of a file, got int"),
    ]
    for given, name, said in refused:
        before = model.config._attn_implementation
        with pytest.raises(InvalidInputError, match=said):
            hf.enable(model, kv_cache_dtype=name, kv_scales=given)
        assert model.config._attn_implementation == before
    made_here = hf_model("qwen3", torch.float32)  # of no folder: only shapes can be compared
    hf.enable(made_here, kv_cache_dtype="fp8", kv_scales=other)
