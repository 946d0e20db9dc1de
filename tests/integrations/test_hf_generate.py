"""transformers' own `generate` over a paged cache: the same logits and tokens, however it decodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import MODELS, VOCAB, prompts
from hf_more_models import ALL, batch, generate, model_of

import pagedattn.integrations.transformers as hf
from pagedattn.errors import UnsupportedError

RAGGED = (17, 3, 30, 9)
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
KINDS = ("llama", *WINDOWED, "deepseek_v3")


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_logits_equal_eager(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """float32, at every token of a ragged prompt and of six steps after it."""
    model, inputs = model_of(name, torch.float32, "eager"), batch(*RAGGED)
    real = inputs["attention_mask"].bool()
    options: dict[str, Any] = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    options |= {"do_sample": False, "eos_token_id": None}
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    wanted = model(**inputs, position_ids=positions).logits[real]
    eager = model.generate(**inputs, **options)
    hf.enable(model, block_size=4)
    prompt = model(**inputs, position_ids=positions)
    paged = model.generate(**inputs, **options)
    assert type(prompt.past_key_values).__name__ == type(paged.past_key_values).__name__ == "PagedCache"
    pairs = [(prompt.logits[real], wanted), *zip(paged.logits, eager.logits, strict=True)]
    delta = max(float((one - other).abs().max()) for one, other in pairs)
    largest = float(wanted.abs().max())
    with capsys.disabled():
        print(f"\n{name}: largest difference {delta:.1e}, largest logit {largest:.1f}", end="")
    assert torch.equal(paged.sequences, eager.sequences)
    assert delta <= 1e-5 * largest


def test_there_are_many_families_and_they_differ() -> None:
    assert len(ALL) >= 16
    tokens = {tuple(generate(model_of(name), batch(5))[0, 5:].tolist()) for name in MODELS}
    assert len(tokens) == len(MODELS) and len({token for one in tokens for token in one}) > 20


@pytest.mark.cover(by=lambda name: [(name in WINDOWED, name == "deepseek_v3")])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_eager_in_every_way_of_decoding(name: str) -> None:
    """float64, so that equal tokens are no luck."""
    model, inputs = model_of(name), batch(*RAGGED)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "chunks": {"prefill_chunk_size": 4},
        "chunks of a token": {"prefill_chunk_size": 1},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "beams with an end": {"num_beams": 4, "eos_token_id": 7, "length_penalty": 2.0, "max_new_tokens": 20},
        "several samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        "beams that sample": {"do_sample": True, "num_beams": 2},
        "rows that end": {"eos_token_id": list(range(3, 30)), "pad_token_id": 0},
        "no cache": {"use_cache": False, "max_new_tokens": 4},
    }

    def tokens() -> dict[str, torch.Tensor]:
        out = {}
        for way, options in ways.items():
            torch.manual_seed(5)
            out[way] = generate(model, inputs, **options)
        return out

    wanted = tokens()
    hf.enable(model, block_size=4, num_blocks=200)
    got = tokens()
    for way in ways:
        assert torch.equal(got[way], wanted[way]), way
    assert torch.equal(wanted["greedy"], wanted["chunks"])
    assert not torch.equal(wanted["greedy"], wanted["beams"][::2, : wanted["greedy"].shape[1]])
    assert bool((wanted["rows that end"][:, -1] == 0).any()), "a row ended before the others"
    assert hf.new_cache(model).num_blocks_used == 0, "every generation gave all its blocks back"


@pytest.mark.parametrize(("name", "num_blocks"), [("gemma2", None), ("gemma2", 100), ("deepseek_v3", None)])
@torch.no_grad()
def test_a_forward_over_padding_alone(name: str, num_blocks: int | None) -> None:
    """Rows may all begin after the first chunk of a prompt."""
    model, inputs = model_of(name), {key: torch.nn.functional.pad(x, (8, 0)) for key, x in batch(9, 5).items()}
    ways: list[dict[str, Any]] = [{"prefill_chunk_size": 6}, {"prefill_chunk_size": 3, "num_beams": 2}]
    wanted = [generate(model, inputs, **way) for way in ways]
    hf.enable(model, block_size=4, num_blocks=num_blocks)
    assert all(torch.equal(generate(model, inputs, **way), one) for way, one in zip(ways, wanted, strict=True))
    first = {key: x[:, :8] for key, x in inputs.items()}
    assert bool(model(**first, use_cache=False).logits.isfinite().all())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_hidden_states(name: str) -> None:
    model, inputs = model_of(name), batch(*RAGGED)
    real = inputs["attention_mask"].bool()
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
    options |= {"max_new_tokens": 3, "eos_token_id": None}

    def states() -> list[torch.Tensor]:
        first, *steps = model.generate(**inputs, **options).hidden_states
        forward = model(**inputs, output_hidden_states=True).hidden_states
        return [*(x[real] for x in (*forward, *first)), *(x for step in steps for x in step)]

    wanted = states()
    hf.enable(model, block_size=4)
    assert len(wanted) == 4 * 3
    torch.testing.assert_close(states(), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_assisted_decoding(name: str) -> None:
    """A draft is cut from the cache where it was wrong; both models may be enabled."""
    model, assistant, inputs = model_of(name), model_of(name), batch(30)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    repetitive = {key: value.repeat(1, 3) for key, value in batch(6).items()}
    # transformers takes padding tokens in a draft for padding.
    options: dict[str, Any] = {"max_new_tokens": 24, "suppress_tokens": [0]}
    wanted = generate(model, inputs, **options)
    looked_up = generate(model, repetitive, prompt_lookup_num_tokens=4, **options)
    hf.enable(model, block_size=4, num_blocks=100)
    lengths = []
    cache = hf.new_cache(model)
    crop = cache.crop
    cache.crop = lambda n: (lengths.append(-n), crop(n))  # type: ignore[method-assign]
    assert torch.equal(generate(model, inputs, assistant_model=assistant, past_key_values=cache, **options), wanted)
    assert max(lengths) > 0, "a draft was wrong"
    assert cache.num_blocks_used == -(-cache.get_seq_length() // 4), "what was cut was given back"
    hf.enable(assistant, block_size=4)
    assert torch.equal(generate(model, inputs, assistant_model=assistant, **options), wanted)
    assert torch.equal(generate(model, repetitive, prompt_lookup_num_tokens=4, **options), looked_up)


@pytest.mark.parametrize("name", KINDS)
def test_turns_over_one_cache(name: str) -> None:
    """Three turns; each continues a ragged batch, and the tokens of the last one were never run."""
    from transformers import DynamicCache

    model, inputs = model_of(name), batch(9, 4)

    def turns(cache: Any) -> torch.Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=5, past_key_values=cache)
            ids = torch.cat((ids, torch.tensor(prompts(5, 5)[:2]) + turn), 1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), 1)
        return ids

    wanted = turns(DynamicCache(config=model.config))
    hf.enable(model, block_size=4)
    cache = hf.new_cache(model)
    assert torch.equal(turns(cache), wanted)
    assert cache.get_seq_length() == wanted.shape[1] - 5 - 1 and cache.batch_size == 2
    assert cache.num_blocks_used == -(-(wanted.shape[1] - 6) // 4) + -(-(wanted.shape[1] - 11) // 4)


def test_padding_between_turns_where_no_window_counts_it() -> None:
    model, first, second = model_of("llama"), batch(9, 4), batch(3, 6)
    ids = torch.cat((first["input_ids"], second["input_ids"]), 1)
    mask = torch.cat((first["attention_mask"], second["attention_mask"]), 1)
    wanted = generate(model, {"input_ids": ids, "attention_mask": mask})
    hf.enable(model, block_size=4)
    cache = hf.new_cache(model)
    with torch.no_grad():
        model(**first, position_ids=(first["attention_mask"].cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    assert torch.equal(generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache), wanted)
    assert sum(-(-length // 4) for length in (9 + 3 + 11, 4 + 6 + 11)) == cache.num_blocks_used


def test_a_copied_cache_shares_its_prompt() -> None:
    """One prompt run once, several continuations of it: the copies hold what they add, and no more."""
    model = model_of("gemma3")
    system, users = prompts(13)[0], prompts(2, 3, 4)
    hf.enable(model, block_size=4, num_blocks=40)
    cache = hf.new_cache(model)
    with torch.no_grad():
        model(torch.tensor([system]), past_key_values=cache)
    assert cache.num_blocks_used == 4
    copies = [copy.deepcopy(cache) for _ in users]
    assert cache.num_blocks_used == 4
    got = [
        generate(model, {"input_ids": torch.tensor([system + user])}, past_key_values=one)
        for user, one in zip(users, copies, strict=True)
    ]
    added = sum(-(-(13 + len(user) + 11) // 4) - 3 for user in users)
    assert cache.num_blocks_used == 4 + added
    hf.disable(model)
    for user, tokens in zip(users, got, strict=True):
        assert torch.equal(tokens, generate(model, {"input_ids": torch.tensor([system + user])}))
    del copies
    assert cache.num_blocks_used == 4
    cache.reset()
    assert cache.num_blocks_used == 0 == cache.get_seq_length()


def test_embeddings_instead_of_tokens() -> None:
    model, inputs = model_of("qwen2"), batch(*RAGGED)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    embedded["attention_mask"] = inputs["attention_mask"]
    wanted = generate(model, embedded)
    hf.enable(model, block_size=4)
    assert torch.equal(generate(model, embedded), wanted)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "deepseek_v3"])
@torch.no_grad()
def test_the_models_own_positions(name: str) -> None:
    """Who gives no positions gets those after what the cache holds; without a cache all tokens are given each time."""
    # A router's products are float32, and on some CPUs others for two tokens than for nine.
    layers: dict[str, Any] = {"first_k_dense_replace": 2} if name == "deepseek_v3" else {}
    model, ids = model_of(name, **layers), torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model(ids).logits
    hf.enable(model, block_size=4)
    dense, first = model(ids, use_cache=False), model(ids[:, :5])
    cache = first.past_key_values
    parts = [first, *(model(ids[:, at : at + 2], past_key_values=cache) for at in (5, 7))]
    torch.testing.assert_close(dense.logits, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([one.logits for one in parts], 1), wanted, rtol=0, atol=1e-12)
    assert dense.past_key_values is None and cache.num_blocks_used == 6 and cache.get_seq_length() == 9
    second = model(ids, None)
    torch.testing.assert_close(second.logits, wanted, rtol=0, atol=1e-12)
    assert second.past_key_values is not cache


def test_loaded_by_name(tmp_path: Any) -> None:
    """`attn_implementation="pagedattn"` is enabled by the first `generate`; disabling gives back what was there."""
    import transformers

    model, inputs = model_of("mistral", torch.float32, "sdpa"), batch(*RAGGED)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    wanted = generate(model, inputs)
    hf.register()
    named: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="pagedattn", dtype=torch.float32
    )
    result = named.generate(
        **inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, return_dict_in_generate=True
    )
    assert torch.equal(result.sequences, wanted) and type(result.past_key_values).__name__ == "PagedCache"
    hf.enable(model, block_size=4)
    assert torch.equal(generate(model, inputs), wanted)
    hf.disable(model)
    hf.disable(model)
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks
    again = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
    assert type(again.past_key_values).__name__ == "DynamicCache"


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron", "deepseek_v3"])
def test_a_copied_model_is_enabled_too(name: str) -> None:
    model, inputs = model_of(name), batch(*RAGGED)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    twin = copy.deepcopy(model)
    del model
    assert torch.equal(generate(twin, inputs), wanted)


COMPILED = [
    ("llama", "aot_eager"),
    ("gemma2", "eager"),
    ("granite_swa", "eager"),
    ("nemotron", "eager"),
    ("deepseek_v3", "eager"),
]


# By default the two kinds of layers in one model; the others (aot_eager, sinks, layers without keywords, latent rows)
# take 7 s each.
@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(*one, marks=[pytest.mark.grid] * (one[0] != "gemma2")) for one in COMPILED]
)
def test_torch_compile(name: str, backend: str) -> None:
    """One graph for prompts and one for decodes, and none more as sequences grow. aot: writes can be traced too."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model, inputs = model_of(name, **_dense(name)), batch(*RAGGED)
    wanted = generate(model, inputs, max_new_tokens=4)
    hf.enable(model, block_size=4)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    assert torch.equal(generate(model, inputs, max_new_tokens=4), wanted)
    first = counters["stats"]["unique_graphs"]
    assert torch.equal(generate(model, batch(*RAGGED), max_new_tokens=4), wanted)
    assert counters["stats"]["unique_graphs"] == first and 2 <= first <= 3


# By default keys and values of heads; latent rows take 8 s each.
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.grid) for name in ("deepseek_v2", "deepseek_v3"))]
)
def test_torch_compile_with_symbolic_sizes(name: str) -> None:
    """`dynamic=True` makes head sizes symbolic too."""
    torch.compiler.reset()
    model, inputs = model_of(name, **_dense(name)), batch(*RAGGED)
    wanted = generate(model, inputs, max_new_tokens=2)
    hf.enable(model, block_size=4)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(generate(model, inputs, max_new_tokens=2), wanted)


@pytest.mark.grid
def test_a_compiled_model_is_refused_that_asks_for_something_else() -> None:
    """Sizes that are symbolic still have to be those that the layer was made for. An error breaks the graph."""
    torch.compiler.reset()
    model = model_of("llama")
    hf.enable(model, block_size=4)
    layer = model.model.layers[1].self_attn
    layer.scaling *= 2
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    with pytest.raises(UnsupportedError, match=r"layer 1 asks for .*, it used to"):
        generate(model, batch(9), max_new_tokens=1)
    layer.scaling /= 2
    assert generate(model, batch(9), max_new_tokens=1).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", "head_dim"), pytest.param("deepseek_v3", "qk_nope_head_dim", marks=pytest.mark.grid)],
)
def test_torch_compile_of_a_second_model_with_other_heads(name: str, size: str) -> None:
    """Models of a class share the code that is traced, so that a size in which they differ becomes symbolic."""
    torch.compiler.reset()
    for number in (8, 16):
        changes: dict[str, Any] = {**_dense(name), size: number}
        model, inputs = model_of(name, **changes), batch(*RAGGED)
        wanted = generate(model, inputs, max_new_tokens=2)
        hf.enable(model, block_size=4)
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        assert torch.equal(generate(model, inputs, max_new_tokens=2), wanted)


def _dense(name: str) -> dict[str, Any]:
    """No layers of experts, which cannot be traced as they are run on a CPU."""
    return {"first_k_dense_replace": 2} if name.startswith("deepseek") else {}


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_cache_may_be_begun_in_inference_mode(first: Any) -> None:
    model, inputs = model_of("gemma2"), batch(9)
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    cache, second = hf.new_cache(model), torch.no_grad if first is torch.inference_mode else torch.inference_mode
    with first():
        model(inputs["input_ids"][:, :5], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    with second():
        got = generate(model, {"input_ids": inputs["input_ids"].repeat(2, 1)}, past_key_values=cache)
    assert torch.equal(got, wanted.repeat(2, 1))
