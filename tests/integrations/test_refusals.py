"""What cannot be right over a paged cache is refused by name; every trap of transformers that is silent elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, build, hf_config, hf_model, packed_logits, prompts, reference_logits
from transformers import masking_utils

from pagedattn.errors import UnsupportedError
from pagedattn.integrations import transformers as integration
from pagedattn.integrations.transformers import PackedModel, masks, packed_model, probe, refuse
from pagedattn.integrations.transformers.attention import NAME, PROBE_NAME

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no interface": ("BloomConfig", {}, "Bloom.*no attention interface"),
    "no interface, alibi": ("FalconConfig", {"alibi": True}, "Falcon.*no attention interface.*ALiBi"),
    "chunks": ("Llama4TextConfig", {}, "Llama4.*chunked_attention"),
    "both ways": ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "Gemma3.*both ways"),
    "shared keys": (
        "Gemma4TextConfig",
        {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2},
        "Gemma4.*num_kv_shared_layers",
    ),
    "state space": ("JambaConfig", {}, "Jamba.*: it is stateful.*linear_attention"),
    "state space and nothing else": ("MambaConfig", {}, "Mamba.*: it is stateful"),
    "state space, then attention": ("BambaConfig", {"mamba_n_heads": 4}, "Bamba.*: it is stateful"),
    "state space beside attention": ("FalconH1Config", {}, "FalconH1.*: it is stateful.*hybrid"),
    "convolution": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "Lfm2.*conv"),
    "linear attention": ("Qwen3NextConfig", {}, "Qwen3Next.*: it is stateful.*linear_attention"),
    "sparse attention": ("GlmMoeDsaConfig", {}, "GlmMoeDsa.*layer_types has"),
    "encoder-decoder": (
        "BartConfig",
        {},
        r"Bart.*: it is an encoder-decoder, whose [a-z ]*here\. Run",
    ),
    "attention weights": ("LlamaConfig", {"output_attentions": True}, "Llama.*output_attentions"),
    "longrope": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
        "Phi3.*longrope.*max_model_len=64",
    ),
}


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name_before_weights_are_read(kind: str, options: dict[str, Any], message: str) -> None:
    config = getattr(transformers, kind)(**{**_BASE, **options})
    with pytest.raises(UnsupportedError, match=message):
        refuse(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_a_bias_by_relative_position_is_refused() -> None:
    reason = r"cache: it is an encoder-decoder.*; it adds a bias by relative position.*attention_num_buckets\)\. Run"
    with pytest.raises(UnsupportedError, match=reason):
        refuse(transformers.T5ForConditionalGeneration, transformers.T5Config())


def test_longrope_is_served_where_no_sequence_leaves_the_short_range() -> None:
    config = transformers.Phi3Config(**{**_BASE, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64})
    refuse(transformers.Phi3ForCausalLM, config, 64)
    with pytest.raises(UnsupportedError, match="longrope"):
        refuse(transformers.Phi3ForCausalLM, config, 65)


def test_the_name_is_none_that_transformers_treats_specially() -> None:
    for name in (NAME, PROBE_NAME):
        assert not [word for word in ("flash", "sdpa", "flex", "paged|", "eager", "/", ":") if word in name]
    integration.register()
    assert NAME in transformers.AttentionInterface._global_mapping
    assert NAME not in transformers.AttentionMaskInterface._global_mapping, "no mask may be built for a step"


@pytest.mark.parametrize("first", [True, False], ids=["first layer", "last layer"])
def test_a_chunked_layer_that_its_config_hides(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at layer_types the mask itself gives chunks away, in whichever layer."""
    kinds = ["chunked_attention", "full_attention"] if first else ["full_attention", "chunked_attention"]
    config = transformers.Llama4TextConfig(
        **{**_BASE, "layer_types": kinds, "no_rope_layers": [1, 1], "attention_chunk_size": 7, "num_local_experts": 2},
        intermediate_size_mlp=64,
        head_dim=8,
    )
    monkeypatch.setattr(packed_model, "refuse", lambda *_: None)
    model = build(config)
    with pytest.raises(UnsupportedError, match=r"llama4_text has a mask that is neither causal"):
        PackedModel(model)
    assert model.config._attn_implementation == "eager", "a refused model is as it was"


def test_masks_are_told_apart() -> None:
    functions = masking_utils
    causal, window = functions.causal_mask_function, functions.sliding_window_causal_mask_function

    def classify(function: Any) -> tuple[int | None] | None:
        found = masks.classify(function, 100)
        return None if found is None else (found.window,)

    assert classify(causal) == (None,) == classify(window(100))
    assert classify(window(8)) == (8,) and classify(window(1)) == (1,) and classify(window(99)) == (99,)
    assert classify(lambda b, h, q, k: (k <= q) & (k >= q - 8)) == (9,), "one key more is another window"
    overlay = functions.chunked_overlay(16, torch.zeros(1, dtype=torch.long))
    assert classify(functions.and_masks(overlay, causal)) is None
    assert classify(functions.bidirectional_mask_function) is None
    prefix = functions.or_masks(causal, lambda b, h, q, k: (q < 4) & (k < 4))
    assert classify(prefix) is None
    paragraph = functions.or_masks(causal, lambda b, h, q, k: (q // 20 == 2) & (k // 20 == 2))
    assert classify(paragraph) is None, "both ways in the middle only"
    images = torch.zeros(1, 2, dtype=torch.long)
    assert classify(functions.or_masks(causal, lambda b, h, q, k: images[b, q] == images[b, k])) is None


def test_windows_of_mask_and_call_must_agree() -> None:
    model = hf_model("mixtral")
    model.config.sliding_window = 8
    for layer in model.model.layers:
        layer.self_attn.config = transformers.MixtralConfig(**{**_BASE, "sliding_window": 9})
        layer.self_attn.config._attn_implementation = PROBE_NAME
    with pytest.raises(UnsupportedError, match="a window of 9, and a mask of 8"):
        PackedModel(model)


def test_a_window_that_only_the_mask_has_is_honoured() -> None:
    model, tokens = hf_model("llama", attention="exact", sliding_window=8), prompts(30, 20)
    model.config.sliding_window = 8
    create = transformers.models.llama.modeling_llama
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "create_causal_mask", masking_utils.create_sliding_window_causal_mask)
        wanted = reference_logits(model, tokens)
        packed = PackedModel(model, block_size=4)
        got = packed_logits(packed, tokens, ((30, 12), (0, 8)), 4)
    assert [layer.spec.sliding_window for layer in packed.attention_layers()] == [8, 8]
    torch.testing.assert_close(torch.cat(got), torch.cat(wanted), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(None, "builds no mask for layer 0"), (torch.ones(1, 1, 2, 2), "layer 0 has a mask that transformers' mask")],
    ids=["none", "its own"],
)
def test_masks_that_are_not_known_are_refused(
    mask: torch.Tensor | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", lambda *_, **__: mask)
    with pytest.raises(UnsupportedError, match=message):
        PackedModel(hf_model("llama"))


def test_two_attentions_in_a_layer_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer 0 calls attention twice"):
        PackedModel(build(transformers.DiffLlamaConfig(**_BASE)))


def test_attention_that_is_given_no_keywords_is_refused() -> None:
    """Nemotron's attention gets the step from a hook on its layer, which cannot tell that the wrapper is attention."""
    model = hf_model("nemotron")
    for layer in model.model.layers:
        layer.self_attn = _WithoutKeywords(layer.self_attn)
    with pytest.raises(UnsupportedError, match="NemotronForCausalLM does not hand the keywords of its forward on"):
        PackedModel(model)
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class _WithoutKeywords(torch.nn.Module):
    """Attention behind a module without a layer_idx, which drops the step."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, paged_step: Any = None, **given: Any) -> Any:
        return self.inner(**given)


class _Shift(torch.nn.Module):
    """Mixes each token with the one before it, as a short convolution does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.1 * x.roll(1, dims=1)


def test_tokens_that_meet_outside_attention_are_found() -> None:
    for layer, message in (
        (0, "query in layer 1 depends on the token"),
        (1, "no function of its decoder's last hidden"),
    ):
        model = hf_model("llama")
        model.model.layers[layer].mlp = _Shift(model.model.layers[layer].mlp)
        with pytest.raises(UnsupportedError, match=f"LlamaForCausalLM.*{message}"):
            PackedModel(model)


def test_positions_that_are_not_followed_are_found() -> None:
    model = hf_model("llama")
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1])[None])
    with pytest.raises(UnsupportedError, match="not on its position_ids alone"):
        PackedModel(model)


def test_a_decoder_without_position_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model("llama")
    forward = model.model.forward
    model.model.forward = lambda input_ids=None, **options: forward(input_ids, **options)
    with pytest.raises(UnsupportedError, match="LlamaModel takes no position_ids"):
        PackedModel(model)


class _OwnAttention(torch.nn.Module):
    """Attention that does not ask the interface, as that of a model without one."""

    def forward(self, hidden_states: torch.Tensor, **_options: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize(("layers", "called"), [((0, 1), "none"), ((1,), r"\[0\]")])
def test_layers_that_do_not_call_the_interface_are_found(layers: tuple[int, ...], called: str) -> None:
    """transformers takes such a model silently, and its masks are gone."""
    model = hf_model("llama")
    for layer in layers:
        model.model.layers[layer].self_attn = _OwnAttention()
    with pytest.raises(UnsupportedError, match=f"has 2 layers, but its attention interface was called by {called}"):
        PackedModel(model)


def test_no_cache_of_transformers_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackedModel(hf_model("gemma2"), block_size=4)

    def never(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a step must not make a cache")

    monkeypatch.setattr(transformers.DynamicCache, "__init__", never)
    assert len(packed_logits(model, prompts(9, 4), ((9, 3), (0, 1)), 4)) == 2


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(UnsupportedError, match=r"transformers >= 5.*4\.57\.1.*pagedattn\[hf\]"):
        PackedModel(object())


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"needs transformers >= 5.*pagedattn\[hf\]"):
        PackedModel(object())


def test_nan_is_never_alike() -> None:
    assert probe.alike(torch.ones(3), torch.ones(3))
    assert not probe.alike(torch.ones(3), torch.full((3,), float("nan")))
    assert hf_config("gemma2").layer_types == ["sliding_attention", "full_attention"]
