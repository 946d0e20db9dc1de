"""bench.vllm_compare over a stand-in for vLLM's `LLM`: which cases run, how ranks share prompts, what a file keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedattn.bench import vllm_cases, vllm_compare, vllm_server
from pagedattn.bench.vllm_cases import ALL, CASES, Case, chosen
from pagedattn.bench.vllm_models import EXAMPLE, recipe
from pagedattn.bench.vllm_process import Engines

# Tokens depend on the prompt alone; what is cached, on whether a connector was given and the prompt seen before.
_STAND_IN = """
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class LLM:
    def __init__(self, **options):
        print(options)
        self.options, self.seen = options, set()
        store = options.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
        self.loads = bool(store) and not store.get("broken")
        self.wrong = store.get("wrong", False)

    def generate(self, prompts, params, use_tqdm):
        return [self.answer(one["prompt_token_ids"], param) for one, param in zip(prompts, params)]

    def answer(self, prompt, param):
        known = tuple(prompt) in self.seen
        self.seen.add(tuple(prompt))
        ids = [sum(prompt) + i for i in range(param.max_tokens)]
        if known and self.wrong and self.options["attention_backend"] == "CUSTOM":
            ids[-1] += 1
        if param.max_tokens == 9:
            ids[0] = int(os.environ.get("VLLM_DP_RANK", -1))
        found = SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-0.5)} for i in ids])
        return SimpleNamespace(outputs=[found], num_cached_tokens=8 if known and self.loads else None)
"""
_PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(_STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_compare, "version", lambda name: "0.24.0")
    given = [(ids, [sum(ids), sum(ids) + 1]) for ids in _PROMPTS]
    monkeypatch.setattr(vllm_compare, "prompts", lambda: given)
    monkeypatch.setattr(vllm_compare, "prepare", lambda models, folder: None)


def _case(name: str, suite: str = "connectors", **extra: Any) -> Case:
    store = {"kv_transfer_config": {"kv_connector": "Some", "kv_connector_extra_config": extra}} if extra else {}
    return Case(suite, name, "tiny-qwen3", store)


def _run(monkeypatch: pytest.MonkeyPatch, file: Path, *cases: Case) -> tuple[int, list[dict[str, Any]]]:
    """What `main` returns for these cases, and the rows of the file then."""
    monkeypatch.setattr(vllm_compare, "chosen", lambda *_: [*cases])
    code = vllm_compare.main(["--json", str(file), "--models", str(file.parent)])
    return code, json.loads(file.read_text(encoding="utf-8"))["rows"]


def test_a_connector_must_have_loaded_and_given_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vllm.json"
    code, (row,) = _run(monkeypatch, file, _case("loads", path="{store}"))
    assert code == 0 and row["equal_requests"] == row["equal_to_computed"] == row["remembered_requests"] == 3
    assert row["loaded_tokens"] == row["loaded_by_peer"] == 8 * len(_PROMPTS)
    code, (row,) = _run(monkeypatch, file, _case("loads nothing", broken=True))
    assert code == 1 and "loaded [0, 0] tokens" in row["failed"]
    code, (row,) = _run(monkeypatch, file, _case("loads wrongly", wrong=True))
    assert code == 1 and (row["equal_requests"], row["equal_to_computed"]) == (0, 0)


def test_speed_is_of_both_engines_over_one_kind_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "vllm.json", [case for case in CASES if case.suite == "speed"]
    assert [case.options.get("kv_cache_dtype") for case in asked] == [None, "fp8"]
    assert len({(case.model, case.requests, case.peer) for case in asked}) == 1
    (tmp_path / asked[0].model).mkdir()
    (tmp_path / asked[0].model / "config.json").write_text("{}", encoding="utf-8")
    code, rows = _run(monkeypatch, file, *(replace(case, requests=(3, 1)) for case in asked))
    assert code == 0 and [(row["case"], row["requests"]) for row in rows] == [
        (case.name, count) for case in asked for count in (3, 1)
    ]
    for row in rows:
        assert row["tok_s"].keys() == {"CUSTOM", "FLASH_ATTN"} and row["ratio"] > 0 and row["same_prefix"] == 1
        logs = [tmp_path / f"{name}-{row['case'].replace(' ', '_')}-0.log" for name in row["tok_s"]]
        stored = "'kv_cache_dtype': 'fp8'"
        assert [stored in log.read_text(encoding="utf-8") for log in logs] == [row["case"].endswith("fp8")] * 2


def test_ranks_share_the_prompts_and_answers_come_back_in_order(tmp_path: Path) -> None:
    case = Case("two-gpus", "data parallel", "tiny-qwen3", ranks=2)
    assert case.gpus == 2
    engines = Engines(case, case.peer, tmp_path, 1 << 20)
    try:
        engines.wait_until_ready()
        asked = engines.ask(_PROMPTS, [9, 1, 9], logprobs=1)
    finally:
        engines.close()
    assert [rows[0] for rows in asked["tokens"]] == [0, 9, 0] and [len(rows) for rows in asked["tokens"]] == [9, 1, 9]
    assert len(asked["logprobs"]) == len(asked["cached"]) == 3 and asked["seconds"] > 0
    assert all(engine.process.returncode == 0 for engine in engines.ranks)


def test_nodes_of_one_gpu_are_served_behind_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.one_gpu)
    assert (case.gpus, case.ranks) == (1, 2)
    given: list[list[str]] = []
    asked: list[int | None] = []

    @contextmanager
    def served(model: Path, log: Path, options: list[str], own: list[str], nodes: list[list[str]]) -> Iterator[None]:
        given[:] = [own, *nodes]
        yield None

    def completions(client: None, model: str, prompts: object, limits: object, rank: int | None) -> list[str]:
        asked.append(rank)
        return [texts[0], texts[1], "wrong"]

    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    texts = [str([sum(ids), sum(ids) + 1]) for ids in _PROMPTS]
    pair = recipe().read_corpus(EXAMPLE / "corpus.txt").pairs[0]
    for name, stand_in in (("served", served), ("completions", completions), ("tokenizer_of", lambda _: tokenizer)):
        monkeypatch.setattr(vllm_compare, name, stand_in)
    monkeypatch.setattr(vllm_compare, "chat", lambda *_: pair[1])
    (row,) = vllm_compare.compare_server(case, tmp_path)
    assert (row["requests"], row["equal_requests"]) == (6, 4) and asked == [0, 1]
    (front, other), start = given, ["--data-parallel-start-rank", "1"]
    assert front[-2:] == ["--api-server-count", "1"] and other[-2:] == start and front[:-2] == other[:-2]
    assert {"--data-parallel-size-local", "--data-parallel-rpc-port"} < {*front}


def test_a_server_that_ends_is_told_with_what_each_node_said(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "vllm.py").unlink()
    (package / "main.py").write_text("import sys; sys.exit(f'said {sys.argv[-1]}')", encoding="utf-8")
    with (
        pytest.raises(RuntimeError, match=r"does not answer:\n(.|\n)*said own(.|\n)*said other"),
        vllm_server.served(Path("model"), tmp_path / "log", [], ["own"], [["other"]]),
    ):
        pass


def test_a_file_keeps_rows_of_other_cases_that_still_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, (one, other) = tmp_path / "vllm.json", CASES[:2]
    rows = [{"suite": one.suite, "case": name, "requests": 1} for name in (one.name, other.name, "no longer a case")]
    file.write_text(json.dumps({"meta": {}, "rows": rows}), encoding="utf-8")
    code, found = _run(monkeypatch, file, one)
    assert code == 0 and [row["case"] for row in found] == [other.name, one.name]
    assert found[1]["requests"] == 3 and "gpu" in found[1] and found[1]["commit"] and "commit" not in found[0]


def test_all_is_what_is_possible_here_and_a_suite_by_name_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cases, "find_spec", lambda name: None)
    assert {case.suite for case in chosen([ALL], [], 1)} == {"tokens", "latent", "connectors", "server", "speed"}
    assert chosen([ALL], [], 2) == [case for case in CASES if not case.over_ray] and chosen([ALL], [], 0) == []
    assert {case.suite for case in chosen(["ray"], [], 1)} == {"ray"}
    monkeypatch.setattr(vllm_cases, "find_spec", lambda name: name)
    assert chosen([ALL], [], 2) == CASES
    assert [case.name for case in chosen(["connectors"], ["files"], 1)] == [
        "files, first runner",
        "files, second runner",
    ]
    with pytest.raises(ValueError, match="two-gpus must need at most 1 GPUs"):
        chosen(["two-gpus"], [], 1)


def test_no_two_cases_have_one_name() -> None:
    names = [(case.suite, case.name) for case in CASES]
    assert len({*names}) == len(names)
