"""The attention function that transformers calls: what it takes from a call, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import hf_model, prompts

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.integrations.transformers import PackedModel
from pagedattn.integrations.transformers.attention import AttentionCall, attention_forward
from pagedattn.integrations.transformers.packed_step import ForwardContext
from pagedattn.integrations.transformers.probe import Recorder


class Module(SimpleNamespace):
    """What attention sees of the module that calls it."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"layer_idx": 0, "training": False, "is_causal": True, **changes})


def call(module: Any = None, step: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """Attention of 5 tokens, 4 heads on 2, head_dim 8."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    mask = options.pop("attention_mask", None)
    caller: Any = module or Module()
    out, weights = attention_forward(caller, q, k, v, mask, paged_step=step, **options)
    assert weights is None
    return out


def learnt(**options: Any) -> AttentionCall:
    recorder = Recorder()
    call(step=recorder, **options)
    return recorder.layers[0].call


def packed_step(dtype: torch.dtype = torch.float32, **options: Any) -> ForwardContext:
    """A step of two sequences, of 3 and 2 new tokens, for one layer that learnt `options`."""
    asked = learnt(dtype=dtype, **options)
    layer = Attention(4, 8, 2, asked.scale, sliding_window=asked.sliding_window, softcap=asked.softcap, dtype=dtype)
    table = torch.tensor([[3], [5]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([3, 2], [3, 2], table, block_size=16)
    cache = PagedKVCache(1, 8, 16, 2, 8, dtype=dtype)
    return ForwardContext({0: (asked, layer)}, [cache.layer(0)], plan_step([layer], common))


def test_the_scale_is_that_of_the_call() -> None:
    assert learnt(scaling=1.0).scale == 1.0
    assert learnt(scaling=None).scale == 8**-0.5
    assert learnt(scaling=0.3).scale == 0.3


def test_windows_and_caps_are_those_of_the_call() -> None:
    assert learnt().sliding_window is None and learnt().softcap is None
    assert learnt(sliding_window=None, softcap=None) == learnt(sliding_window=-1) == learnt()
    assert learnt(sliding_window=3).sliding_window == 3 and learnt(softcap=2.0).softcap == 2.0


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Module(layer_idx=None), {}, "no layer_idx"),
        (SimpleNamespace(training=False), {}, "layer None has no layer_idx"),
        (Module(training=True), {}, "model.eval"),
        (Module(), {"dropout": 0.1}, "dropout"),
        (Module(is_causal=False), {}, "both ways"),
        (Module(), {"is_causal": False}, "both ways"),
        (Module(), {"position_bias": torch.zeros(1)}, "position_bias, which no paged layer honours"),
        (Module(), {"cu_seq_lens_q": torch.zeros(1), "output_attentions": True}, "cu_seq_lens_q, output_attentions"),
    ],
    ids=str,
)
def test_what_a_paged_layer_cannot_give_is_refused(module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        call(module, Recorder(), **options)


def test_keywords_that_mean_nothing_to_attention_are_let_through() -> None:
    ignored = {"position_ids": torch.zeros(1), "use_cache": False, "output_router_logits": True}
    assert learnt(**ignored, position_bias=None, output_attentions=False) == learnt()


def test_cross_attention_is_refused() -> None:
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 9, 8)
    with pytest.raises(UnsupportedError, match="5 queries and 9 keys"):
        attention_forward(Module(), q, k, k, None, paged_step=Recorder())  # type: ignore[arg-type]


def test_without_a_step_it_says_who_called() -> None:
    with pytest.raises(UnsupportedError, match=r"Module of layer 7 got no paged step.*PackedModel"):
        call(Module(layer_idx=7))


def test_a_step_serves_what_the_layer_learnt_and_nothing_else() -> None:
    step = packed_step(sliding_window=3)
    assert call(step=step, sliding_window=3).shape == (1, 5, 4, 8)
    others: tuple[dict[str, Any], ...] = (
        {"sliding_window": 4},
        {},
        {"sliding_window": 3, "softcap": 1.0},
        {"sliding_window": 3, "scaling": 1.0},
    )
    for other in others:
        with pytest.raises(UnsupportedError, match=r"layer 0 asks for .*, it used to"):
            call(step=step, **other)
    with pytest.raises(UnsupportedError, match="layer 1 asks for"):
        call(Module(layer_idx=1), step, sliding_window=3)
    with pytest.raises(UnsupportedError, match="layer 0 was given a mask"):
        call(step=step, sliding_window=3, attention_mask=torch.ones(1, 1, 5, 5))


def test_a_batch_of_rows_is_refused() -> None:
    rows = torch.zeros(2, 4, 5, 8)
    with pytest.raises(InvalidInputError, match=r"one row \[1, T\].*2 rows"):
        attention_forward(Module(), rows, rows[:, :2], rows[:, :2], None, paged_step=packed_step())  # type: ignore[arg-type]


def test_a_float32_stream_over_a_half_precision_cache() -> None:
    step = packed_step(torch.float16)
    wide = call(step=step)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, call(step=step, dtype=torch.float16).float(), rtol=0, atol=2e-3)
    torch.testing.assert_close(wide, call(step=packed_step()), rtol=0, atol=5e-3)


def test_sequences_of_a_row_do_not_see_each_other() -> None:
    out = call(step=packed_step())
    generator = torch.Generator().manual_seed(0)
    _, _, v = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    torch.testing.assert_close(out[0, 3], v[0, :, 3].repeat_interleave(2, 0))  # first token of its sequence


def test_steps_of_two_models_may_alternate() -> None:
    """What a step needs comes with its call: one model's forward inside another's steps changes nothing."""
    first, second = (PackedModel(hf_model(name), block_size=16) for name in ("llama", "gemma2"))

    def logits(model: PackedModel) -> torch.Tensor:
        tokens = torch.tensor(prompts(12)[0])
        common = CommonAttentionMetadata.from_lengths([12], [12])
        plan = plan_step(model.attention_layers(), {0: common, 1: common})
        with torch.inference_mode():
            return model.logits(model(tokens, torch.arange(12), None, plan))

    alone = logits(first)
    inner: list[torch.Tensor] = []
    handle = first.model.model.layers[1].register_forward_pre_hook(lambda *_: inner.append(logits(second)))
    assert torch.equal(logits(first), alone) and torch.equal(inner[0], logits(second))
    handle.remove()


def test_sinks_are_those_that_the_layer_was_built_with() -> None:
    sinks, others = torch.zeros(4), torch.zeros(4)
    asked = learnt(s_aux=sinks)
    layer = Attention(4, 8, 2, sinks=sinks)
    plan = plan_step([layer], CommonAttentionMetadata.from_lengths([5], [5]))
    step = ForwardContext({0: (asked, layer)}, None, plan)
    assert call(step=step, s_aux=sinks).shape == (1, 5, 4, 8)
    for given in (others, None):
        with pytest.raises(UnsupportedError, match=r"layer 0 asks for .*, it used to"):
            call(step=step, s_aux=given)


def test_heads_whose_elements_lie_apart() -> None:
    step = packed_step()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    a, b, c = (x.mT.contiguous().mT for x in (q, k, v))
    caller: Any = Module()
    whole, _ = attention_forward(caller, q, k, v, None, paged_step=step)
    assert a.stride(-1) != 1
    assert torch.equal(attention_forward(caller, a, b, c, None, paged_step=step)[0], whole)
