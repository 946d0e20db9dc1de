"""What cannot be right over a paged cache is refused by `enable`, by `generate` or by the forward, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, build
from hf_more_models import batch, generate, model_of

import pagedattn.integrations.transformers as hf
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError

RAGGED = (9, 4)


def enabled(name: str = "llama", **options: Any) -> Any:
    model = model_of(name)
    hf.enable(model, **{"block_size": 4, **options})
    return model


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no interface": ("BloomConfig", {}, "Bloom.*no attention interface"),
    "chunks": ("Llama4TextConfig", {"intermediate_size_mlp": 64, "head_dim": 8}, "Llama4.*chunked_attention"),
    "shared keys": (
        "Gemma4TextConfig",
        {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "head_dim": 8, "global_head_dim": 8},
        "Gemma4.*num_kv_shared_layers",
    ),
    "two attentions in a layer": ("DiffLlamaConfig", {}, "layer 0 calls attention twice"),
}


@pytest.mark.parametrize(("kind", "options", "message"), MODELS.values(), ids=MODELS)
def test_models_are_refused_and_left_as_they_were(kind: str, options: dict[str, Any], message: str) -> None:
    model = build(getattr(transformers, kind)(**{**_BASE, **options}))
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=message):
        hf.enable(model)
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_a_refused_model_that_was_loaded_by_name() -> None:
    hf.register()
    model = build(transformers.BloomConfig(**_BASE), attention="pagedattn")
    with pytest.raises(UnsupportedError, match=r"Bloom.*no attention interface"):
        generate(model, batch(*RAGGED))


def test_a_model_that_is_not_enabled_says_so() -> None:
    hf.register()
    model = model_of("llama", attention="pagedattn")
    with (
        pytest.raises(UnsupportedError, match=r"of layer 0 got no paged step: call .*enable\(model\)"),
        torch.no_grad(),
    ):
        model(torch.tensor([[3, 4]]))
    with pytest.raises(InvalidInputError, match=r"call enable\(model\) first"):
        hf.new_cache(model)


@torch.no_grad()
def test_training_is_refused() -> None:
    model, ids = enabled(), torch.tensor([[3, 4]])
    with torch.enable_grad(), pytest.raises(UnsupportedError, match=r"differentiated; use torch.no_grad"):
        model(ids)
    model.train()
    with pytest.raises(UnsupportedError, match=r"in training; call model.eval"):
        model(ids)
    with pytest.raises(UnsupportedError, match=r"in training; call model.eval"):
        hf.enable(model)


@torch.no_grad()
def test_caches_that_are_none_of_this_model() -> None:
    model, other, ids = enabled(), enabled(), torch.tensor([[3, 4]])
    for past, message in (
        (transformers.DynamicCache(), "past_key_values is DynamicCache: give LlamaForCausalLM new_cache"),
        (hf.new_cache(other), "PagedCache of another model"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            model(ids, past_key_values=past)
        with pytest.raises(UnsupportedError, match=message):
            generate(model, batch(4), past_key_values=past)
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(UnsupportedError, match=f"cache_implementation='{kind}' asks for another cache"):
            generate(model, batch(4), cache_implementation=kind)
    with pytest.raises(UnsupportedError, match="use_cache=False with a paged cache: every step would store all"):
        generate(model, batch(4), past_key_values=hf.new_cache(model), use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_paged_cache_in_a_model_that_is_not_paged(attention: str) -> None:
    """One new token needs no mask, so that nothing else would tell that its attention saw no other."""
    model, ids = model_of("llama", attention=attention), batch(9)["input_ids"]
    wanted = model(ids).logits
    paged = copy.deepcopy(model)
    hf.enable(paged, block_size=4)
    cache = paged(ids[:, :8]).past_key_values
    for new in (ids[:, 8:], ids):
        with pytest.raises(UnsupportedError, match=r"the model that runs is not enabled, or no longer.*call enable"):
            model(new, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="the model that runs is not enabled"):
        generate(model, batch(9), past_key_values=hf.new_cache(paged))
    torch.testing.assert_close(paged(ids[:, 8:], past_key_values=cache).logits, wanted[:, 8:], rtol=0, atol=1e-5)
    cache.crop(-1)
    hf.disable(paged)
    with pytest.raises(UnsupportedError, match="the model that runs is not enabled"):
        paged(ids[:, 8:], past_key_values=cache)


@torch.no_grad()
def test_a_cache_whose_forward_failed_in_a_model_that_is_no_longer_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = enabled(), batch(9)["input_ids"]
    cache = model(ids[:, :7]).past_key_values
    with monkeypatch.context() as broken:
        broken.setattr(model.model.norm, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 7:8], past_key_values=cache)
    hf.disable(model)
    with pytest.raises(UnsupportedError, match="the model that runs is not enabled"):
        model(ids[:, 8:], past_key_values=cache)


@torch.no_grad()
def test_attention_that_was_changed_by_hand() -> None:
    model, ids = enabled(), torch.tensor([[3, 4]])
    model.set_attn_implementation("sdpa")
    for call in (lambda: model(ids), lambda: generate(model, batch(4)), lambda: model(ids, use_cache=False)):
        with pytest.raises(UnsupportedError, match=r"attn_implementation is now 'sdpa'.*call disable\(model\)"):
            call()
    hf.disable(model)
    assert model.config._attn_implementation == "exact" and generate(model, batch(4)).shape == (1, 16)


@torch.no_grad()
def test_masks_that_cannot_be_right() -> None:
    model, inputs = enabled("mistral"), batch(*RAGGED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with pytest.raises(UnsupportedError, match="attention_mask has 4 dimensions"):
        model(ids, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(UnsupportedError, match="attention_mask has dict"):
        model(ids, attention_mask={"full_attention": mask})
    with pytest.raises(UnsupportedError, match=r"row 1 of the attention_mask ends in padding.*pad on the left"):
        model(ids, attention_mask=mask.flip(1))
    with pytest.raises(InvalidInputError, match=r"attention_mask must be \[2, 9\].*got \[2, 8\]"):
        model(ids, attention_mask=mask[:, 1:])
    with pytest.raises(UnsupportedError, match="output_attentions is set"):
        model(ids, attention_mask=mask, output_attentions=True)
    cache = hf.new_cache(model)
    with pytest.raises(UnsupportedError, match="ends in padding"):
        model(ids[:1], attention_mask=mask[1:].flip(1), past_key_values=cache)
    model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    longer = torch.cat((mask, torch.tensor([[1, 1], [0, 1]])), 1)
    with pytest.raises(UnsupportedError, match="row 1 of the attention_mask has padding between tokens, which sliding"):
        model(ids[:, :2], attention_mask=longer, past_key_values=cache)
    with pytest.raises(InvalidInputError, match=r"given for all 10 columns, got None; the cache saw padding before"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(InvalidInputError, match="as before for the columns in the cache, got another value at row"):
        model(ids[:, :1], attention_mask=torch.ones(2, 10), past_key_values=cache)
    with pytest.raises(InvalidInputError, match=r"input_ids must be 2 rows, as this cache has, got 1"):
        model(ids[:1, :1], attention_mask=mask[:1], past_key_values=cache)
    assert cache.get_seq_length() == 9 and cache.num_blocks_used == 3 + 1
    wanted = generate(model_of("mistral"), inputs)
    first = wanted[:, 9:10]
    more = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
    positions = more.sum(1, keepdim=True) - 1
    out = model(first, attention_mask=more, position_ids=positions, past_key_values=cache)
    assert torch.equal(out.logits[:, -1].argmax(-1), wanted[:, 10]), "refusals left the cache as it was"


@torch.no_grad()
def test_a_failed_forward_leaves_the_cache_as_it_was() -> None:
    model, inputs = enabled(num_blocks=20), batch(9)
    wanted = model(inputs["input_ids"]).logits
    cache = hf.new_cache(model)
    model(inputs["input_ids"][:, :6], past_key_values=cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(inputs["input_ids"][:, 6:], past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 6
    out = model(inputs["input_ids"][:, 6:], past_key_values=cache)
    torch.testing.assert_close(out.logits, wanted[:, 6:], rtol=0, atol=1e-12)
    assert cache.num_blocks_used == 3


def test_a_pool_that_is_too_small() -> None:
    model, inputs = enabled(num_blocks=8), batch(9, 9)
    with pytest.raises(CapacityError, match=r"allocate needs \d+ blocks, have \d+ free of 7"):
        generate(model, inputs, max_new_tokens=20)
    assert hf.new_cache(model).num_blocks_used == 0
    assert generate(model, inputs, max_new_tokens=4).shape == (2, 13)


@torch.no_grad()
def test_a_model_that_moved_must_be_enabled_again() -> None:
    model, inputs = enabled(), batch(*RAGGED)
    model.to(torch.float32)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM moved from \(torch.float64.*enable it again"):
        generate(model, inputs)
    hf.enable(model)
    assert generate(model, inputs).shape == (2, 21)


def test_a_model_on_two_devices_is_refused() -> None:
    model = model_of("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM lies on cpu, meta; a paged cache lies on one device"):
        hf.enable(model)
