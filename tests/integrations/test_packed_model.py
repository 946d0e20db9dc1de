"""Many sequences in one row over the paged cache give the logits that transformers gives each alone."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from hf_models import MODELS, MORE, hf_model, packed_logits, prompts, reference_logits

from pagedattn import CommonAttentionMetadata, plan_step
from pagedattn.integrations.transformers import PackedModel

LENGTHS = (41, 18, 33)
# Prompts of whole lengths, in chunks, and decodes beside them; a decode comes first in its step, as in the engine.
STEPS = ((41, 0, 0), (0, 7, 20), (0, 10, 1), (0, 1, 1), (0, 0, 10), (0, 0, 1))
DECODES_FIRST = ((5, 3, 9), (1, 1, 1), (1, 1, 20), (30, 11, 1), (1, 1, 1), (3, 1, 1))
# Exact attention leaves the rounding of float64; eager attention has its softmax in float32.
EXACT, EAGER = 1e-11, 2e-5
# The router's matrix product is in float32 whatever the model is in: how it rounds depends on the rows that come
# together and on the processor. Logits move by a few units of that rounding.
ROUTED = {"deepseek_v3": 8 * torch.finfo(torch.float32).eps}


@cache
def expected(name: str, attention: str, **changes: Any) -> list[torch.Tensor]:
    return reference_logits(hf_model(name, attention=attention, **changes), prompts(*LENGTHS))


@cache
def packed_model(name: str, block_size: int) -> PackedModel:
    return PackedModel(hf_model(name), block_size=block_size)


@pytest.mark.parametrize("steps", [STEPS, DECODES_FIRST], ids=["prompts", "mixed"])
@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_logits_equal_transformers(name: str, steps: tuple[tuple[int, ...], ...]) -> None:
    assert tuple(map(sum, zip(*steps, strict=True))) == LENGTHS
    got = packed_logits(packed_model(name, 4), prompts(*LENGTHS), steps, 4)
    for ours, exact, eager in zip(got, expected(name, "exact"), expected(name, "eager"), strict=True):
        assert ours.dtype == exact.dtype == torch.float64
        largest = float(exact.abs().max())
        torch.testing.assert_close(ours, exact, rtol=0, atol=ROUTED.get(name, EXACT) * largest)
        torch.testing.assert_close(ours, eager, rtol=0, atol=EAGER * largest)
    assert len(got[0].argmax(-1).unique()) > 10, "the model must not be degenerate"


def test_float32_and_another_block_size() -> None:
    for name in ("gemma2", "gpt_oss"):
        model = PackedModel(hf_model(name, torch.float32), block_size=16)
        for ours, exact in zip(
            packed_logits(model, prompts(*LENGTHS), STEPS, 16), expected(name, "exact"), strict=True
        ):
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_without_a_cache(name: str) -> None:
    model, tokens = packed_model(name, 4), prompts(*LENGTHS)
    common = CommonAttentionMetadata.from_lengths(LENGTHS, LENGTHS)
    where = torch.cat([torch.arange(length) for length in LENGTHS])
    metadata = plan_step(model.attention_layers(), {0: common, 1: common})
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(list(chain(*tokens))), where, None, metadata))
    bound = ROUTED.get(name, 1e-10) * max(1.0, float(logits.abs().max()))
    torch.testing.assert_close(logits, torch.cat(expected(name, "exact")), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        *((name, {"sliding_window": window}) for name in ("gemma3", "mixtral", "phi3") for window in (7, 9)),
        ("qwen2", {"max_window_layers": 0}),
        ("granite", {"logits_scaling": 1.0}),
    ],
    ids=str,
)
def test_the_oracle_sees_each_feature(name: str, changes: dict[str, Any]) -> None:
    wanted, other = expected(name, "exact"), expected(name, "exact", **changes)
    assert max(float((a - b).abs().max()) for a, b in zip(wanted, other, strict=True)) > 1e-2


def test_the_oracle_sees_sinks() -> None:
    model = hf_model("gpt_oss", attention="exact")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    other = reference_logits(model, prompts(*LENGTHS))
    assert float((other[0] - expected("gpt_oss", "exact")[0]).abs().max()) > 1e-2


def test_what_layers_learn_comes_from_their_calls() -> None:
    layers = {name: packed_model(name, 4).attention_layers() for name in MODELS}
    windows = {name: [layer.spec.sliding_window for layer in found] for name, found in layers.items()}
    half, full, always = [8, None], [None, None], [8, 8]
    assert windows == {
        **{"gemma2": half, "gemma3": half, "gpt_oss": half, "qwen2": half[::-1]},
        **{"mixtral": always, "phi3": always, "mistral": always},
        **{"olmo2": full, "qwen3_moe": full, "llama": full},
    }
    capped = layers["gemma2"][0].spec
    assert (capped.softcap, capped.scale, capped.head_dim) == (1.5, 5**-0.5, 16)
    assert layers["gpt_oss"][1].spec.has_sinks and not layers["llama"][1].spec.has_sinks
    # expanded, values of 12 elements and keys of 16, one key head per query head
    spec = PackedModel(hf_model("deepseek_v3"), latent=False).attention_layers()[0].spec
    assert (spec.kv_heads, spec.head_dim, spec.value_dim) == (4, 16, 12)
    spec = packed_model("deepseek_v3", 4).attention_layers()[0].spec
    assert (spec.kv_heads, spec.head_dim, spec.latent_dim, spec.scale) == (1, 24, 16, 0.25)


def test_windowed_layers_have_a_group_of_their_own() -> None:
    assert [layer.kv_group for layer in packed_model("gemma3", 4).attention_layers()] == [0, 1]
    assert [spec.window() for spec in packed_model("gemma3", 4).kv_cache_specs(4)] == [8, None]


def test_logits_are_computed_for_the_rows_given_only() -> None:
    model, rows = packed_model("gemma2", 4), []
    hook = model.model.lm_head.register_forward_hook(lambda _module, _args, out: rows.append(out.shape[-2]))
    with torch.inference_mode():
        logits = model.logits(torch.zeros(3, 32, dtype=torch.float64))
    hook.remove()
    assert rows == [3] and logits.shape == (3, model.vocab_size)
