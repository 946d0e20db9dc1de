"""`generate` over a paged cache on a GPU: tokens of eager attention, and decodes for which the host never waits."""

from __future__ import annotations

import pytest
import torch
from hf_more_models import batch, generate, model_of

import pagedattn.integrations.transformers as hf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "granite_swa", "deepseek_v3"])
def test_tokens_equal_eager(name: str) -> None:
    model = model_of(name, torch.float32, "eager").cuda()
    inputs = {key: value.cuda() for key, value in batch(17, 3, 30, 9).items()}
    ways = ({}, {"num_beams": 3}, {"prefill_chunk_size": 8})
    wanted = [generate(model, inputs, **options) for options in ways]
    hf.enable(model, block_size=4, num_blocks=300)
    for options, tokens in zip(ways, wanted, strict=True):
        assert torch.equal(generate(model, inputs, **options), tokens), options
    assert hf.new_cache(model).num_blocks_used == 0


@torch.no_grad()
def test_decodes_wait_for_nothing() -> None:
    """The mask is read with the prompt, and never again."""
    model = model_of("llama", torch.float32, "eager").cuda()
    inputs = {key: value.cuda() for key, value in batch(17, 3, 30, 9).items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    hf.enable(model, block_size=4)
    cache = hf.new_cache(model)
    cache.expect([64] * 4)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    token = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1:].argmax(-1)
    tokens = [token]
    try:
        for step in range(12):
            mask, positions = torch.cat((mask, torch.ones_like(token)), 1), positions[:, -1:] + 1
            if step == 2:  # kernels are compiled, buffers are there
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            out = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
        with pytest.raises(RuntimeError, match="synchronizing"):
            token.sum().item()  # the mode works
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hf.disable(model)
    assert torch.equal(torch.cat(tokens, 1), generate(model, inputs, max_new_tokens=13)[:, 30:])
