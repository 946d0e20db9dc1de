"""The library's backend inside vLLM beside vLLM's own: the same greedy tokens, and output tokens per second.

    python -m bench.vllm_compare [--json FILE] [--suite SUITE] [--only WORD]

Without options it runs every suite that the machine's GPUs allow. Rows that FILE has already are kept, but for those of
the cases that run: a table may come from one call or from several. Each backend has an engine, in a process of its own.
Tokens are compared on models that were trained, since those of random weights are near ties; their log-probabilities
are compared too. Speed is measured in turns, round by round, with both engines alive.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import torch

from .agreement import common_prefix, largest_gap
from .ratios import Row
from .report import ResultFile
from .vllm_cases import ALL, CASES, SUITES, Case, chosen
from .vllm_models import EXAMPLE, FETCHED, chats, model_folder, prompts, recipe, tokenizer_of
from .vllm_process import OURS, ROOT, engines, free_port
from .vllm_server import chat, completions, served

_AT_ONCE = 8  # pairs of engines that start side by side


def compare_tokens(case: Case, folder: Path) -> Iterator[Row]:
    """Greedy tokens and their log-probabilities on what the model was trained on, and whether it was remembered. With a
    KV connector twice: the second answers are compared, whose prompts must have been loaded."""
    given: list[tuple[list[int], list[int]]] = prompts()
    asked = {"prompts": [ids for ids, _ in given], "max_tokens": [len(rest) for _, rest in given], "logprobs": 1}
    if case.model == FETCHED:
        asked["prompts"] = chats(model_folder(case.model, folder))
        asked["max_tokens"] = [64] * len(asked["prompts"])
    with engines(case, folder, 1 << 30) as both:
        first = {name: engine.ask(**asked) for name, engine in both.items()}
        found = {name: engine.ask(**asked) for name, engine in both.items()} if case.connector else first
    ours, peers = (found[name] for name in (OURS, case.peer))
    row: Row = {"requests": len(ours["tokens"]), "tokens": sum(asked["max_tokens"])}
    row["equal_requests"] = _equal(ours["tokens"], peers["tokens"])
    if case.connector:
        row |= _loaded(case, first, found)
    if case.model != FETCHED:
        wanted = [rest for _, rest in given]
        row["remembered_requests"], row["remembered_by_peer"] = (_equal(one["tokens"], wanted) for one in (ours, peers))
        if row["remembered_by_peer"] == 0:
            raise RuntimeError(
                f"{case.name}: {case.peer} remembers nothing of what was trained, so that it is no reference"
            )
    yield row | {"largest_logprob_difference": round(largest_gap(ours, peers), 5)}


def _loaded(case: Case, first: dict[str, Any], second: dict[str, Any]) -> Row:
    """Tokens of prompts that both connectors loaded, and how many of our answers are as those without loading."""
    loaded = [sum(second[name]["cached"]) for name in (OURS, case.peer)]
    if not all(loaded):
        raise RuntimeError(f"{case.name}: {case.connector} loaded {loaded} tokens of {OURS} and {case.peer}")
    equal = _equal(first[OURS]["tokens"], second[OURS]["tokens"])
    return {"loaded_tokens": loaded[0], "loaded_by_peer": loaded[1], "equal_to_computed": equal}


def _equal(these: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(one == other for one, other in zip(these, others, strict=True))


def compare_server(case: Case, folder: Path) -> Iterator[Row]:
    """How many completions of `vllm serve` are what the model was trained on, all of them by each data parallel rank,
    and whether a streamed chat is."""
    given, model, tiny = prompts(), model_folder(case.model, folder), recipe()
    tokenizer = tokenizer_of(model)
    wanted = [tokenizer.decode(rest, skip_special_tokens=True) for _, rest in given]
    options = ["--attention-backend", OURS, "--max-model-len", "2048", "--gpu-memory-utilization", "0.1"]
    options += ["--kv-cache-memory-bytes", str(1 << 30)]
    asked = [ids for ids, _ in given], [len(rest) for _, rest in given]
    with served(model, folder / f"{case.name.replace(' ', '_')}.log", options, *_data_parallel(case)) as client:
        ranks = range(case.ranks) if case.ranks > 1 else [None]
        equal = [_equal(completions(client, model.name, *asked, rank), wanted) for rank in ranks]
        question, answer = tiny.read_corpus(EXAMPLE / "corpus.txt").pairs[0]
        said = chat(client, model.name, question)
    if said != answer:
        raise RuntimeError(f"{case.name}: the chat must answer {answer!r}, it said {said!r}")
    yield {"requests": len(given) * case.ranks, "equal_requests": sum(equal), "streamed_chats": 1}


def _data_parallel(case: Case) -> tuple[list[str], list[list[str]]]:
    """Options of the server for its ranks, and those of each other node's command."""
    if case.ranks == 1:
        return [], []
    shared = ["--data-parallel-size", str(case.ranks)]
    nodes = list[list[str]]()
    if case.one_gpu:
        shared += ["--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"]
        shared += ["--data-parallel-rpc-port", str(free_port())]
        nodes = [[*shared, "--data-parallel-start-rank", str(rank)] for rank in range(1, case.ranks)]
    return [*shared, "--api-server-count", "1"], nodes


def compare_speed(case: Case, folder: Path, rounds: int) -> Iterator[Row]:
    """Output tokens per second of both, round by round in turns, after one round of each that is not counted."""
    # Both live side by side, on each GPU: two caches, weights and graphs.
    room = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    with engines(case, folder, min(40 << 30, int(0.3 * room))) as both:
        for count in case.requests:
            asked = workload(count)
            total = sum(asked["max_tokens"])
            first = {name: engine.ask(**asked)["tokens"] for name, engine in both.items()}
            if any([len(row) for row in rows] != asked["max_tokens"] for rows in first.values()):
                raise RuntimeError(f"{case.name}: an engine gave another number of tokens than asked for")
            speeds: dict[str, list[float]] = {OURS: [], case.peer: []}
            for _ in range(rounds):
                for name, engine in both.items():
                    speeds[name].append(round(total / engine.ask(**asked)["seconds"], 1))
            same = [common_prefix(one, other) for one, other in zip(first[OURS], first[case.peer], strict=True)]
            median = {name: statistics.median(values) for name, values in speeds.items()}
            yield {
                "requests": count,
                "tokens": total,
                "tok_s": speeds,
                "median_tok_s": median,
                "ratio": round(median[OURS] / median[case.peer], 3),
                "same_prefix": round(sum(same) / total, 3),
            }


def workload(count: int) -> dict[str, Any]:
    """Prompts of random tokens and how many to generate for each: 100 to 1,024 of both, of one alone 512 and 256."""
    draw = Random(0)
    lens = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)] if count > 1 else [(512, 256)]
    prompts = [[draw.randrange(10, 9000) for _ in range(length)] for length, _ in lens]
    return {"prompts": prompts, "max_tokens": [new for _, new in lens]}


class Results:
    """Rows of the cases that ran, in the place of those that the file had of them; each says where it was measured."""

    def __init__(self, path: Path | None) -> None:
        self._file = ResultFile(path, {}, [])
        self._about = {name: self._file.meta[name] for name in ("commit", "gpu")}
        self._file.meta |= {"vllm": version("vllm"), "commit": "of each row"}
        if path is not None and path.exists():
            known = {(case.suite, case.name) for case in CASES}
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            self._file.rows = [row for row in rows if (row["suite"], row["case"]) in known]
        self._begun, self._lock, self.failed = set[tuple[str, str]](), Lock(), 0

    def add(self, case: Case, row: Row) -> None:
        """Keep and print a row; its requests count as failed unless all were equal."""
        about = {"suite": case.suite, "case": case.name, "model": case.model}
        about |= {"options": case.options, "variables": case.variables, "ranks": case.ranks, "peer": case.peer}
        with self._lock:
            key = case.suite, case.name
            if key not in self._begun:
                self._begun.add(key)
                self._file.rows = [old for old in self._file.rows if (old["suite"], old["case"]) != key]
            self._file.add_plain(about | row | self._about)
            compared = (row.get(name, row.get("requests")) for name in ("equal_requests", "equal_to_computed"))
            self.failed += "failed" in row or any(count != row["requests"] for count in compared)
            print(json.dumps({"case": case.name, "model": case.model} | row), flush=True)


def run(case: Case, folder: Path, rounds: int, results: Results) -> None:
    """Run a case, whose engines may fail."""
    if case.requests:
        measured = compare_speed(case, folder, rounds)
    else:
        measured = (compare_server if case.served else compare_tokens)(case, folder)
    try:
        for row in measured:
            results.add(case, row)
    except (RuntimeError, OSError) as error:
        results.add(case, {"failed": str(error)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print a line each; 1 where tokens differ or an engine failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result; rows of other cases in it are kept")
    parser.add_argument("--suite", action="append", choices=[ALL, *SUITES], help=f"default: {ALL} that the GPUs allow")
    parser.add_argument("--only", action="append", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, help="folder to keep models and logs in")
    given = parser.parse_args(arguments)
    try:
        cases = chosen(given.suite or [ALL], given.only or [], torch.cuda.device_count())
    except ValueError as error:
        parser.error(str(error))
    results = Results(given.json)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.models or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        prepare({case.model for case in cases}, folder)
        side_by_side = [case for case in cases if not case.requests]
        if side_by_side:
            prompts()  # transformers cannot be imported by several threads at once
        for case in cases:
            if case.requests:
                run(case, folder, given.rounds, results)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda case: run(case, folder, given.rounds, results), side_by_side))
    return int(results.failed > 0)


def prepare(models: set[str], folder: Path) -> None:
    """Train or write what is not there, side by side."""
    commands = [[sys.executable, "-m", "bench.vllm_models", name, str(folder)] for name in sorted(models)]
    running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    if any([process.wait() for process in running]):
        raise RuntimeError("a model could not be made")


if __name__ == "__main__":
    raise SystemExit(main())
