"""Latent attention (MLA) of transformers over a cache of rows: the same logits and tokens, and what is not served."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, MORE, VOCAB, build
from hf_more_models import batch, generate
from hf_multimodal import LATENT, multimodal_model

import pagedattn.integrations.transformers as hf
from pagedattn import FullAttentionSpec, KVScales, MLAAttention, MLASpec
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.fp8.calibration_file import LayerMaxima
from pagedattn.integrations.transformers.generate import Paged
from pagedattn.testing import interpreted

L, R, N, V, LAYERS = 32, 16, 16, 12, 2
SIZES = {"kv_lora_rank": L, "qk_rope_head_dim": R, "qk_nope_head_dim": N, "v_head_dim": V}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
    **{"original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707},
}
FIRST = 5003  # the position of the first token, beyond what a model was trained on before yarn
LONG = {"max_position_embeddings": 163840, "rope_parameters": YARN}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2Config", LONG),
    "v2 without q LoRA": ("DeepseekV2Config", {**LONG, "q_lora_rank": None}),
    "v3": ("DeepseekV3Config", LONG),
    "v3 in halves": ("DeepseekV3Config", {**LONG, "rope_interleave": False}),
    "v3 without q LoRA": ("DeepseekV3Config", {**LONG, "q_lora_rank": None}),
    "v3 without yarn": ("DeepseekV3Config", {"max_position_embeddings": 163840}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {}),
    "minicpm3": ("MiniCPM3Config", {}),
    "youtu": ("YoutuConfig", {}),
    "axk1": ("AXK1Config", {}),
    # Latents and queries are scaled before they are cached; a layer has two attentions.
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **{"head_dim": R, "num_layers": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
            **{"ffn_hidden_size": 64, "moe_topk": 2},
        },
    ),
}
# 45 tokens at once are expanded, the others absorbed: the forms take equally many multiplications at 29.
CHUNKS = {"whole": [45], "chunks": [20, 1, 24], "a long chunk after a short one": [5, 40], "single": [1] * 45}


def latent_model(kind: str, dtype: torch.dtype = torch.float32, attention: str = "eager", **changes: Any) -> Any:
    name, extra = KINDS[kind]
    given = {**_BASE, **MORE["deepseek_v3"][1], **SIZES, **extra, **changes}
    return build(getattr(transformers, name)(**given), dtype, attention)


def paged(model: Any) -> Paged:
    return model.__dict__["_paged_attention"]


@torch.inference_mode()
def logits(model: Any, chunks: list[int], **options: Any) -> torch.Tensor:
    """Of two rows of 45 tokens, in forwards of so many, from a position on where yarn matters."""
    ids = torch.randint(3, VOCAB, (2, 45), generator=torch.Generator().manual_seed(4))
    where, done, out = torch.arange(FIRST, FIRST + 45).expand(2, -1), 0, []
    for count in chunks:
        part, done = slice(done, done + count), done + count
        out.append(model(ids[:, part], position_ids=where[:, part], **options).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_eager_in_every_chunking(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = latent_model(kind)
    wanted = logits(model, [45], use_cache=False)
    hf.enable(model, block_size=4)
    assert not caplog.records
    assert all(isinstance(layer, MLAAttention) for _, layer in paged(model).layers.values())
    bound = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(logits(model, [45], use_cache=False), wanted, rtol=0, atol=bound)
    for chunks in CHUNKS.values():
        got = logits(model, chunks, past_key_values=hf.new_cache(model))
        torch.testing.assert_close(got, wanted, rtol=0, atol=bound)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
def test_the_triton_kernels_are_the_model() -> None:
    model, chunks = latent_model("v3"), [40, 1, 3, 1]
    wanted = logits(model, [45])
    hf.enable(model, block_size=16, backend="TRITON")
    assert "TRITON" in repr(paged(model).layers[0][1])
    got = logits(model, chunks, past_key_values=hf.new_cache(model))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", LATENT)
def test_the_text_part_of_a_model_that_takes_images_keeps_rows(name: str) -> None:
    if not hasattr(transformers, LATENT[name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {LATENT[name][0]}")
    model, inputs = multimodal_model(name), batch(40, 3, 17)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    assert {type(spec) for spec in paged(model).specs} == {MLASpec}
    assert torch.equal(generate(model, inputs), wanted)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_the_oracle_sees_scale_and_rotation(kind: str) -> None:
    """What a wrong scale or pairing would do at these positions is far beyond the bound of the test above."""
    wanted = logits(latent_model(kind), [45])
    changes: list[dict[str, Any]] = [{"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0}}]
    changes += [{"rope_interleave": False}] if kind == "v3" else []
    for change in changes:
        other = logits(latent_model(kind, **change), [45])
        assert float((other - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())


@pytest.mark.parametrize("num_blocks", [None, 60])
def test_the_cache_is_one_row_per_token_and_layer(num_blocks: int | None) -> None:
    model, inputs = latent_model("v3"), batch(40, 9)
    sizes = {}
    for latent in (True, False):
        hf.enable(model, block_size=4, num_blocks=num_blocks, latent=latent)
        cache = hf.new_cache(model)
        generate(model, inputs, past_key_values=cache)
        blocks = cache._store.caches[0].key.shape[0]
        sizes[latent] = cache.nbytes / (blocks * 4 * LAYERS)
    assert sizes == {True: (L + R) * 4, False: 4 * (N + R + V) * 4}
    hf.enable(model, block_size=4)
    assert paged(model).specs == [MLASpec(head_dim=L + R, latent_dim=L, block_size=4)] * LAYERS


def test_a_row_is_the_normalised_latent_and_the_rotated_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the module itself makes no keys and values of it."""
    model, seen = latent_model("v3"), {}
    kind = type(model.model.layers[0].self_attn)
    expand = kind.expand_kv

    def watched(self: Any, latent: torch.Tensor, k_pe: torch.Tensor) -> Any:
        seen[self.layer_idx] = torch.cat((latent, k_pe), -1)[:, 0]
        return expand(self, latent, k_pe)

    monkeypatch.setattr(kind, "expand_kv", watched)
    logits(model, [45], use_cache=False)
    wanted = dict(seen)
    hf.enable(model, block_size=4)
    seen.clear()
    cache = hf.new_cache(model)
    logits(model, [45], past_key_values=cache)
    assert not seen and len(wanted) == LAYERS
    table = cache._rows.table()[:, :12].long()
    for index, layer in enumerate(cache._store.caches):
        rows = layer.key[table].flatten(1, 2)[:, :45, 0]
        torch.testing.assert_close(rows, wanted[index], atol=1e-5, rtol=1e-5)


def test_disable_and_other_attention_give_keys_and_values_back() -> None:
    model, inputs = latent_model("v3"), batch(12, 5)
    wanted, states = generate(model, inputs), model.model(**inputs).last_hidden_state
    hf.enable(model, block_size=4)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model.model(**inputs).last_hidden_state, states)
    with pytest.raises(UnsupportedError, match="its attn_implementation is now 'eager'"):
        model(**inputs)
    hf.disable(model)
    assert not any("expand_kv" in vars(module) for module in model.modules())
    assert torch.equal(generate(model, inputs), wanted)


def _e4m3(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-448, 448).to(torch.float8_e4m3fn).to(rows.dtype)


@pytest.mark.parametrize("kind", ["v2", "v3", "longcat_flash"])
@pytest.mark.parametrize("form", ["fp8", "fp8_e4m3:skip=1"])
def test_rows_of_e4m3_are_a_model_that_rounds_them(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, but for norms and rotations, which transformers computes in float32: an element that was rounded
    otherwise, because another sum differed, would be off by percents."""
    model = latent_model(kind, torch.float64, "exact")
    module, skipped = type(model.model.layers[0].self_attn), form.endswith("1")
    module = type(model.model.layers[0].self_attn[0]) if kind == "longcat_flash" else module
    expand = module.expand_kv

    def rounded(self: Any, latent: torch.Tensor, k_pe: torch.Tensor) -> Any:
        return expand(self, *((latent, k_pe) if skipped and self.layer_idx == 1 else (_e4m3(latent), _e4m3(k_pe))))

    exact = logits(model, [45], use_cache=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "expand_kv", rounded)
        wanted = logits(model, [45], use_cache=False)
    assert float((wanted - exact).abs().max()) > 1e-3 * float(exact.abs().max())
    hf.enable(model, block_size=4, kv_cache_dtype=form)
    sizes = [L + R, (L + R) * (8 if skipped else 1)]
    assert [spec.bytes_per_token for spec in paged(model).specs] == sizes
    for chunks in CHUNKS.values():
        got = logits(model, chunks, past_key_values=hf.new_cache(model))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


def test_scales_of_keys_and_values_keep_these() -> None:
    model = latent_model("v3", qk_nope_head_dim=16, v_head_dim=32)
    layer = LayerMaxima(key=(3.0,) * 4, value=(2.0,) * 4, head_dim=R + 16, head_dim_v=32)
    scales = KVScales((layer,) * LAYERS, 100, {}, "0")
    for form, latent in (("fp8", None), ("fp8", False)):
        hf.enable(model, kv_cache_dtype=form, kv_scales=scales, latent=latent)
        assert {type(spec) for spec in paged(model).specs} == {FullAttentionSpec}
    with pytest.raises(InvalidInputError, match=r"^kv_scales must be None with latent=True, .*; leave latent out"):
        hf.enable(model, kv_cache_dtype="fp8", kv_scales=scales, latent=True)
    assert not any("expand_kv" in vars(module) for module in model.modules())
    hf.enable(model, kv_cache_dtype="fp8")
    assert {type(spec) for spec in paged(model).specs} == {MLASpec}


@pytest.mark.parametrize("form", ["fp8_e5m2", "int8", "int4", "int8:skip=0"])
def test_formats_are_refused_for_rows_and_served_expanded(form: str) -> None:
    model, inputs = latent_model("v3", qk_nope_head_dim=16, v_head_dim=32), batch(12, 5)
    message = (
        rf"kv_cache_dtype='{form[:3]}.*latent rows of DeepseekV3ForCausalLM.* leave it at \"auto\", take \"fp8\", .*"
        "latent=False"
    )
    with pytest.raises(UnsupportedError, match=message):
        hf.enable(model, kv_cache_dtype=form, latent=True)
    assert model.config._attn_implementation == "eager"
    assert not any("expand_kv" in vars(module) for module in model.modules())
    if form != "int4":
        with pytest.raises(UnsupportedError, match=message):
            hf.PackedModel(model, kv_cache_dtype=form, latent=True)
    model.set_attn_implementation("eager")
    found = []
    for latent in (None, False):
        hf.enable(model, kv_cache_dtype=form, latent=latent)
        assert not any("expand_kv" in vars(module) for module in model.modules())
        found.append(generate(model, inputs, max_new_tokens=3))
    assert found[0].shape == (2, 15) and torch.equal(*found)


class _Adapter(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def _adapted(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    adapter = _Adapter(L, 4 * (N + V), bias=False, dtype=model.dtype)
    adapter.load_state_dict(attention.kv_b_proj.state_dict())
    attention.kv_b_proj = adapter


def _biased(model: Any) -> None:
    bias = torch.ones(4 * (N + V), dtype=model.dtype)
    model.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(bias)


def _hooked(model: Any) -> None:
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda _module, _args, out: 1.5 * out)


def _rows_of_twice_the_size(self: Any, latent: torch.Tensor, k_pe: torch.Tensor) -> Any:
    return type(self).usual_expand_kv(self, 2 * latent, k_pe)


def _keys_that_grow(self: Any, latent: torch.Tensor, k_pe: torch.Tensor) -> Any:
    key, value = type(self).usual_expand_kv(self, latent, k_pe)
    return 1.5 * key, value


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "an adapter": (_adapted, None, "kv_b_proj of DeepseekV3Attention is a _Adapter"),
    "a bias": (_biased, None, "kv_b_proj of DeepseekV3Attention does more than multiply"),
    "a hook": (_hooked, None, "kv_b_proj of DeepseekV3Attention does more than multiply"),
    "other rows": (None, _rows_of_twice_the_size, "layer 0 has other keys"),
    "other keys": (None, _keys_that_grow, "layer 0 has other keys"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_latent_attention_stays_expanded_and_a_warning_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change, method, reason = OTHERS[name]
    model, inputs = latent_model("v3", torch.float64, "exact"), batch(12, 5)
    kind = type(model.model.layers[0].self_attn)
    if change is not None:
        change(model)
    if method is not None:
        monkeypatch.setattr(kind, "usual_expand_kv", kind.expand_kv, raising=False)
        monkeypatch.setattr(kind, "expand_kv", method)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"DeepseekV3ForCausalLM keeps expanded keys and values, not latent rows: {reason}" in caplog.text
    assert type(paged(model).specs[0]) is FullAttentionSpec
    assert torch.equal(generate(model, inputs), wanted)
    refused = f"^latent=True, but DeepseekV3ForCausalLM cannot keep latent rows: {reason}.*; leave latent out"
    for make in (hf.enable, hf.PackedModel):
        with pytest.raises(UnsupportedError, match=refused):
            make(model, latent=True)
        assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("make", [hf.enable, hf.PackedModel], ids=["enable", "PackedModel"])
def test_latent_is_an_order(make: Any) -> None:
    llama = build(transformers.LlamaConfig(**_BASE), torch.float32)
    with pytest.raises(UnsupportedError, match=r"^latent=True, but Llama.* cannot keep latent rows: it has no latent"):
        make(llama, latent=True)
    assert llama.config._attn_implementation == "eager"
    for model in (llama, latent_model("v3")):
        with pytest.raises(InvalidInputError, match=r"^latent must be a bool, or None, got 'no'"):
            make(model, latent="no")
    make(llama)
    make(latent_model("v3"), latent=True)


def test_a_model_that_expands_elsewhere_stays_expanded(caplog: pytest.LogCaptureFixture) -> None:
    """As releases of transformers do that have no method for it."""
    model = build(transformers.LlamaConfig(**_BASE), torch.float32)
    model.model.layers[0].self_attn.kv_a_proj_with_mqa = torch.nn.Identity()
    hf.enable(model)
    assert "LlamaForCausalLM keeps expanded keys and values, not latent rows: it has no expand_kv" in caplog.text


def test_an_adapter_that_comes_later_is_refused_until_the_model_is_enabled_again() -> None:
    model, inputs = latent_model("v3", torch.float64, "exact"), batch(12, 5)
    hf.enable(model, block_size=4)
    _adapted(model)
    with pytest.raises(
        UnsupportedError, match=r"kv_b_proj of DeepseekV3Attention is a _Adapter.*enable\(model\) again"
    ):
        generate(model, inputs)
    hf.disable(model)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    assert torch.equal(generate(model, inputs), wanted)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_keeps_rows_of_its_own(copied: Any) -> None:
    model, inputs = latent_model("v3", torch.float64, "exact"), batch(12, 5)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    twin = copied(model)
    for one, other in zip(model.model.layers, twin.model.layers, strict=True):
        torch.nn.init.zeros_(one.self_attn.kv_b_proj.weight)
        assert other.self_attn.expand_kv.args == (other.self_attn,)
    assert torch.equal(generate(twin, inputs), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_16_bit_keep_rows_of_16_bit(dtype: torch.dtype) -> None:
    model, exact = latent_model("v3", dtype), logits(latent_model("v3"), [45])
    hf.enable(model, block_size=4)
    assert paged(model).specs[0].bytes_per_token == (L + R) * 2
    bound = 0.1 * float(exact.abs().max())
    got = logits(model, [45], past_key_values=hf.new_cache(model))
    assert float((got.float() - exact).abs().mean()) < bound
