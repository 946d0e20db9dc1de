"""`python -m bench.latent_engine` on a CPU: both caches of the engine, a stand-in for vLLM, and the file they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import latent_engine
from pagedattn.bench.agreement import common_prefix, largest_gap
from pagedattn.bench.engine_cases import DEEPSEEK_V2_LITE

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny case is for machines without a GPU")
_STAND_IN = """
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class LLM:
    def __init__(self, **options):
        assert options["attention_backend"] == "CUSTOM", "no such backend here"
        assert options["enable_prefix_caching"] and options["load_format"] == "dummy"

    def generate(self, prompts, params, use_tqdm):
        found = [SimpleNamespace(token_ids=[7] * one.max_tokens, logprobs=None) for one in params]
        return [SimpleNamespace(outputs=[one], num_cached_tokens=0) for one in found]
"""


def _run(file: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """What `main` returns, and the rows of the file by contender."""
    sizes = ["--requests", "4", "--longest", "9", "--rounds", "1"]
    code = latent_engine.main(["--json", str(file), *sizes, *arguments])
    return code, {row["contender"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}


@CPU_ONLY
def test_both_caches_and_vllm_in_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "latent.json"
    code, rows = _run(file)
    assert code == 0 and [*rows] == ["latent", "expanded"]
    for row in rows.values():
        (workload,) = row["workloads"]
        assert workload["requests"] == 4 and workload["median_tok_s"] > 0 and row["captured_sizes"] == 3
        assert (row["layers"], row["experts"], row["refused"]) == (2, 4, None)
        assert row["cache_tokens"] == 199 * 16 and row["sequences_that_fit"]["2048"] == 1
        assert row["commit"] and row["versions"]["transformers"]
    # float32 in two layers: rows of 32 + 16; two heads of keys of 32 and values of 16.
    per_token = [row["cache_bytes_per_token"] for row in rows.values()]
    assert per_token == [2 * (32 + 16) * 4, 2 * 2 * (32 + 16) * 4]
    assert rows["expanded"]["same_prefix"] == 1.0 and 0 < rows["expanded"]["largest_logprob_difference"] < 1e-4
    assert "384 bytes a token, sequences that fit: 1 of 2048 tokens" in capsys.readouterr().out
    (tmp_path / "vllm.py").write_text(_STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(latent_engine, "versions", lambda name: {"vllm": "0.24.0"})
    code, rows = _run(file, "--contender", "vllm CUSTOM", "--contender", "vllm FLASHMLA")
    assert code == 1 and [*rows] == ["latent", "expanded", "vllm CUSTOM", "vllm FLASHMLA"]
    assert rows["vllm CUSTOM"]["workloads"][0]["median_tok_s"] > 0 and rows["vllm CUSTOM"]["refused"] is None
    assert "FLASHMLA-FLASHMLA-0 ended with 1" in rows["vllm FLASHMLA"]["refused"]


@CPU_ONLY
def test_other_sizes_are_rows_of_their_own_and_where_time_goes_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "latent.json"
    for layers in ("1", "2"):
        assert _run(file, "--layers", layers, "--experts", "2", "--contender", "latent", "--profile")[0] == 0
    content = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["layers"], row["experts"]) for row in content] == [(1, 2), (2, 2)]
    assert all(row["host_ms"]["launch"] > 0 and "same_prefix" not in row for row in content)


@CPU_ONLY
def test_an_engine_that_keeps_another_cache_than_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedattn.integrations.transformers import latent_probe

    monkeypatch.setattr(latent_probe, "alike", lambda one, other: False)
    code, rows = _run(tmp_path / "latent.json", "--contender", "latent")
    assert code == 1 and "cannot keep latent rows" in rows["latent"]["refused"]


def _answer(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"tokens": [tokens], "logprobs": [logprobs]}


def test_tokens_may_differ_where_both_choices_are_about_equal_only() -> None:
    ours, near = _answer([1, 2, 3], [-1.0, -2.0, -0.1]), _answer([1, 5, 9], [-1.0, -2.1, -7.0])
    assert common_prefix([1, 2, 3], [1, 5, 9]) == 1 and largest_gap(ours, near) == pytest.approx(0.1)
    assert latent_engine.compared(ours, near, "bfloat16")["same_prefix"] == round(1 / 3, 4)
    with pytest.raises(ArithmeticError, match=r"differ by 0\.1 from those of the other cache, 0\.001 at most"):
        latent_engine.compared(ours, near, "float32")
    with pytest.raises(RuntimeError, match="not finite"):
        largest_gap(ours, _answer([1, 2, 3], [-1.0, float("nan"), -0.1]))


def test_the_whole_shape_has_the_published_parameters() -> None:
    """15.7 billion, without drawing them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING["deepseek_v2"].from_dict(dict(DEEPSEEK_V2_LITE))
    with torch.device("meta"):
        model = transformers.DeepseekV2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 15_706_484_224
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 40.0


class _Short:
    """Gives a token less than asked for to the last request."""

    def ask(self, prompts: list[list[int]], max_tokens: list[int], logprobs: int | None = None) -> dict[str, Any]:
        return {"seconds": 1.0, "tokens": [[1] * count for count in [*max_tokens[:-1], max_tokens[-1] - 1]]}


def test_an_engine_that_gives_fewer_tokens_is_no_result() -> None:
    engine: Any = _Short()
    for measured in (lambda: latent_engine.measure(engine, [4], 9, 1), lambda: latent_engine.checked(engine, 9)):
        with pytest.raises(RuntimeError, match="another number of tokens than asked for"):
            measured()
