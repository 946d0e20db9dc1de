"""MLAAttention over rows of e4m3: every form against the float64 oracle over what is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mla_layer import DEVICE, FORMS, HEADS, SIZES, STEPS, L, Model, N, R, S, layer_of

from pagedattn import MLAAttention, PagedKVCache, plan_step
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.testing import interpreted

SCALES: dict[str, float | torch.Tensor | None] = {
    "none": None,
    "float": 0.005,  # no power of two, and small enough that elements beyond 2.24 saturate
    "tensor": torch.tensor([0.005]),
}
FORM = {"kv_cache_dtype": "fp8", "block_size": S}


class StoredModel(Model):
    """With rows of e4m3, by the definition."""

    stored = "fp8"
    scale: float = 1.0

    @classmethod
    def of(cls, lengths: list[int], scale: float | torch.Tensor | None, **options: Any) -> StoredModel:
        model = cls(lengths, **options)
        model.scale = 1.0 if scale is None else float(scale)
        return model

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        quotient = rows.float() / torch.tensor(self.scale, device=rows.device)
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.double() * self.scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_oracle_over_stored_rows(form: str, step: str, scale: str) -> None:
    query_lens, seq_lens = STEPS[step]
    model = StoredModel.of(seq_lens, SCALES[scale])
    model.fill([total - new for new, total in zip(query_lens, seq_lens, strict=True)])
    got, want = model.run(layer_of(**FORM, **FORMS[form], k_scale=SCALES[scale]), query_lens, seq_lens)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    if scale != "none":  # the largest elements were saturated, and what was written last is among what was read
        largest = float(model.decode(model.encode(torch.cat(model.rows))).abs().max())
        assert largest == pytest.approx(448 * 0.005) and float(torch.cat(model.rows).abs().max()) > largest


@pytest.mark.skipif(DEVICE.type == "cpu" and not interpreted(), reason="needs TRITON")
@pytest.mark.parametrize("backend", ["TORCH", "TRITON", "prefill=TORCH,decode=TRITON"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_backends_and_dtypes(backend: str, dtype: torch.dtype) -> None:
    unserved = (torch.float64, torch.bfloat16) if interpreted() else (torch.float64,)
    if "TRITON" in backend and dtype in unserved:
        pytest.skip("TRITON has no such dtype here")
    gate = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    model = StoredModel.of([9, 22], 0.02, dtype=dtype)
    model.fill([8, 10])
    layer = layer_of(**FORM, backend=backend, dtype=dtype, max_absorbed_len=1, k_scale=0.02)
    got, want = model.run(layer, [1, 12], [9, 22])
    assert got.dtype == dtype and float((got.double() - want).norm() / want.norm()) < gate


@pytest.mark.parametrize("form", ["absorbed", "expanded, few keys at once"])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sliding_window": 5}], ids=str)
def test_soft_cap_and_window(form: str, options: dict[str, Any]) -> None:
    model = StoredModel.of([20, 9], 0.02)
    model.fill([8, 4])
    got, want = model.run(layer_of(**FORM, **FORMS[form], **options, k_scale=0.02), [12, 5], [20, 9])
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_nan_in_unused_slots_and_padding_rows_do_not_matter() -> None:
    for form in ("absorbed", "expanded", "decodes absorbed"):
        model = StoredModel.of([6, 13], 0.02)
        model.fill([5, 4])
        got, want = model.run(layer_of(**FORM, **FORMS[form], k_scale=0.02), [1, 9], [6, 13], padding=3)
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
        assert bool(model.cache.layer(0).key.float().isnan().any())


def test_a_cache_is_written_as_the_definition_says_and_is_a_quarter_as_large() -> None:
    model, native = StoredModel.of([9], 0.005), Model([9])
    model.run(layer_of(**FORM, k_scale=0.005), [9], [9])
    rows = model.cache.layer(0).key[model.table[0, :3].long().cpu().tolist()].flatten(0, 1)[:9, 0]
    assert torch.equal(rows.float(), model.encode(model.rows[0]).float())
    assert 4 * model.cache.nbytes == native.cache.nbytes


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_it_compiles_without_a_graph_break(form: str) -> None:
    model, layer = StoredModel.of([7, 9], 0.02), layer_of(**FORM, **FORMS[form], k_scale=torch.tensor([0.02]))
    model.fill([6, 4])
    step = plan_step([layer], model.step([1, 5], [7, 9]))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    got, want = model.run(layer, [1, 5], [7, 9], metadata=step, call=compiled)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_the_selection_says_where_the_scale_is_from() -> None:
    given, unknown = layer_of(**FORM, k_scale=0.02).selection, layer_of(**FORM).selection
    assert given.scales == "the layer's arguments" and unknown.scales.startswith("1.0: neither")
    assert layer_of().selection.scales == ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"k_scale": 0.0}, "k_scale must be a tensor, or a positive finite number"),
    "negative": ({"k_scale": -1.0}, "k_scale must be a tensor, or a positive finite number"),
    "infinite": ({"k_scale": float("inf")}, "k_scale must be a tensor, or a positive finite number"),
    "two": ({"k_scale": torch.ones(2)}, "k_scale must be of 1"),
    "native rows": ({"k_scale": 0.5, "kv_cache_dtype": "auto"}, "k_scale, v_scale, kv_scale must be given for fp8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_scales_that_cannot_be_are_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        MLAAttention(**SIZES, scale=0.3, **{**FORM, **changes})


def test_a_cache_of_another_format_is_refused() -> None:
    for layer, model in ((layer_of(**FORM), Model([6])), (layer_of(), StoredModel([6]))):
        with pytest.raises(InvalidInputError, match=r"^kv_cache must be of kv_cache_dtype="):
            model.run(layer, [2], [6])
    with pytest.raises(UnsupportedError, match=r"kv_cache_dtype=fp8_e5m2 \(serves auto, fp8_e4m3, fp8_ds_mla\)"):
        layer_of(kv_cache_dtype="fp8_e5m2")
    pair = PagedKVCache(1, 9, S, 1, L + R, head_dim_v=L, kv_cache_dtype="fp8", device=DEVICE).layer(0)
    model, layer = StoredModel([6]), layer_of(**FORM)
    queries = torch.zeros(2, HEADS, N, device=DEVICE), torch.zeros(2, HEADS, R, device=DEVICE)
    with pytest.raises(InvalidInputError, match=r"^kv_cache must be of latent rows"):
        layer(*queries, None, None, *layer.split_kv_b(model.weight), pair, model.step([2], [6]))
