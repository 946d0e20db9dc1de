"""Engines over all attention backends in bfloat16: the tokens of a trained model, and how exact logits are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import CommonAttentionMetadata, plan_step
from pagedattn.bench.engine_cases import QWEN3_06B
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.worker.runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRAINED = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
SEQS, PREFILLED, LENGTH, BLOCK = 2, 280, 300, 16


def tokens(backend: str, version: str | None = None) -> list[tuple[int, ...]]:
    prompts = (TRAINED / "prompts.txt").read_text(encoding="utf-8").splitlines()
    llm = LLM(TRAINED, backend=backend, block_size=256, num_kv_blocks=64, clean_cache=True, max_num_seqs=16)
    if version is not None:
        assert version in llm.describe_attention()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), progress=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("backend", "version", "module"),
    [
        ("FLASH_ATTN", "2", "flash_attn"),
        ("FLASH_ATTN", "3", "flash_attn_interface"),
        ("FLASHINFER", None, "flashinfer"),
    ],
)
def test_backends_agree_on_the_tokens_of_a_trained_model(
    backend: str, version: str | None, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(module)
    if version is not None:
        monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", version)
    wanted = tokens("TRITON")
    assert tokens(backend, None if version is None else f"FA{version}") == wanted
    assert sum(map(len, wanted)) > 100


def test_logits_are_as_close_to_float32_as_those_of_transformers(tmp_path: Path) -> None:
    """Teacher forced, two prefills and twenty steps of decodes: at most twice the error of bfloat16 in transformers."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**QWEN3_06B)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, QWEN3_06B["vocab_size"], (SEQS, LENGTH), device="cuda")
    with torch.inference_mode():
        rounded = model(ids).logits.float()
        exact = model.float()(ids).logits
    del model
    torch.cuda.empty_cache()
    ours = forced(ModelRunner(EngineConfig(model=str(tmp_path), num_kv_blocks=64, backend="TRITON")), ids)
    theirs, own = ((each - exact).pow(2).mean().sqrt() for each in (rounded, ours))
    assert own <= 2 * theirs, f"{own} beside {theirs}"
    worst = [(each - exact).abs().max() for each in (rounded, ours)]
    assert worst[1] <= 2 * worst[0]
    assert exact.std() > 10 * own


@torch.inference_mode()
def forced(runner: ModelRunner, ids: torch.Tensor) -> torch.Tensor:
    """Logits [SEQS, LENGTH, vocab] of tokens that are given."""
    width = -(-LENGTH // BLOCK)
    table = torch.arange(1, 1 + SEQS * width, dtype=torch.int32, device="cuda").view(SEQS, width)
    parts = []
    for start, end in [(0, PREFILLED), *((at, at + 1) for at in range(PREFILLED, LENGTH))]:
        size = end - start
        common = CommonAttentionMetadata.from_lengths([size] * SEQS, [end] * SEQS, table, block_size=BLOCK)
        positions = torch.arange(start, end, dtype=torch.int32, device="cuda").repeat(SEQS)
        metadata = plan_step(runner.model.attention_layers(), common)
        hidden = runner.model(ids[:, start:end].reshape(-1).int(), positions, runner._layers, metadata)
        parts.append(runner.model.logits(hidden).float().view(SEQS, size, -1))
    return torch.cat(parts, dim=1)
