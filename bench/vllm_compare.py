"""The library's backend inside vLLM beside vLLM's own: the same greedy tokens, and output tokens per second.

    python -m bench.vllm_compare [--json FILE] [--suite SUITE] [--only WORD]

Each backend has an engine, in a process of its own. Tokens are compared on models that were trained, since those of
random weights are near ties; their log-probabilities are compared too. Speed is measured in turns, round by round, with
both engines alive.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from random import Random
from threading import Lock
from typing import IO, Any

from .ratios import Row
from .report import ResultFile
from .vllm_models import EXAMPLE, FETCHED, chats, model_folder, prompts, recipe, tokenizer_of
from .vllm_server import chat, completions, served

ROOT = Path(__file__).parent.parent
OURS, PEER = "CUSTOM", "FLASH_ATTN"
_AT_ONCE = 8  # pairs of engines that start side by side


@dataclass(frozen=True)
class Case:
    """Options of `LLM` and variables under which both backends run a model."""

    suite: str
    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    requests: tuple[int, ...] = ()  # of random tokens, a workload each; none: what the model was trained on


_EAGER = {"enforce_eager": True}
_V1, _V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in "01")  # left alone, vLLM looks at the model
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
_TIGHT = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 140, "max_num_seqs": 32}
TOKENS = [
    *(
        Case("tokens", f"{model}, {mode}, {runner}", model, options, variables)
        for model in ("tiny-qwen3", "tiny-gemma2", "tiny-gpt-oss")
        for mode, options in (("eager", _EAGER), ("graphs", {}))
        for runner, variables in (("first runner", _V1), ("second runner", _V2))
    ),
    Case("tokens", "blocks of 64, first runner", "tiny-qwen3", {"block_size": 64}, _V1),
    Case("tokens", "blocks of 64, second runner", "tiny-qwen3", {"block_size": 64}, _V2),
    Case("tokens", "HND", "tiny-qwen3", {}, {"VLLM_KV_CACHE_LAYOUT": "HND"}),
    Case("tokens", "fp8 cache", "tiny-qwen3", {"kv_cache_dtype": "fp8"}),
    Case("tokens", "n-gram speculation", "tiny-qwen3", {"speculative_config": _NGRAM}),
    Case("tokens", "chunked prefill, preemption", "tiny-qwen3", _TIGHT),
    Case("tokens", "prefix cache", "tiny-qwen3", {"enable_prefix_caching": True}),
    Case("tokens", "batch invariance", "tiny-qwen3", {}, {"VLLM_BATCH_INVARIANT": "1"}),
    Case("tokens", "a real model, graphs", FETCHED),
    Case("tokens", "a real model, eager", FETCHED, _EAGER),
    Case("tokens", "a real model, float16", FETCHED, {"dtype": "float16"}),
]
SERVER = [Case("server", "vllm serve", "tiny-qwen3")]
_LONG = {"load_format": "dummy", "max_model_len": 8192, "skip_tokenizer_init": True}
SPEED = [Case("speed", "one GPU", "qwen3-0.6b", _LONG, requests=(256, 1))]
_TP, _PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TWO_GPUS = [
    Case("two-gpus", "tensor parallel", "tiny-qwen3", _TP),
    Case("two-gpus", "pipeline parallel", "tiny-qwen3", _PP),
    Case("two-gpus", "tensor parallel, random weights", "llama-8b", _LONG | _TP, requests=(256, 1)),
]
CASES = [*TOKENS, *SERVER, *SPEED, *TWO_GPUS]
SUITES = [*dict.fromkeys(case.suite for case in CASES)]


class Engine:
    """A vLLM engine in a process; what it prints goes to a log. It starts in the background until the first question.

    Args:
        cache: bytes of the KV cache. Measured by vLLM they would depend on what else starts on the GPU.
    """

    def __init__(self, case: Case, backend: str, folder: Path, cache: int) -> None:
        options = {"kv_cache_memory_bytes": cache, "max_model_len": 2048, "enable_prefix_caching": False}
        options["gpu_memory_utilization"] = 0.1  # must be free at the start, and is not used otherwise
        options |= {"model": str(model_folder(case.model, folder)), "attention_backend": backend, "seed": 0}
        read, write = os.pipe()
        self.log = folder / f"{backend}-{case.name.replace(' ', '_')}.log"
        environment = {**os.environ, **case.variables, "RESULTS": str(write), "VLLM_NO_USAGE_STATS": "1"}
        if case.suite == "tokens":  # starts in half the time
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            options["max_num_seqs"] = 64
        command = [sys.executable, "-m", "bench.vllm_engine", json.dumps(options | case.options)]
        with self.log.open("w", encoding="utf-8") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": [write]}
            self.process = subprocess.Popen(command, **pipes, env=environment, cwd=ROOT, text=True)
        os.close(write)
        self._answers: IO[str] = os.fdopen(read, encoding="utf-8")

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Generate, see `vllm_engine.generate`."""
        if self.process.stdin is None:
            raise RuntimeError("the engine has no standard input")
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def wait_until_ready(self) -> None:
        """Raise RuntimeError with the end of the log where it does not start."""
        self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            said = self.log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the engine ended with {self.process.wait()}:\n{said[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end; it has nothing left to do."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def engines(case: Case, folder: Path, cache: int) -> Iterator[dict[str, Engine]]:
    """Both backends' engines, each with a KV cache of `cache` bytes."""
    made: dict[str, Engine] = {}
    try:
        for backend in (OURS, PEER):
            made[backend] = Engine(case, backend, folder, cache)
        for engine in made.values():
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made.values():
            engine.close()


def compare_tokens(case: Case, folder: Path) -> Iterator[Row]:
    """Greedy tokens and their log-probabilities on what the model was trained on, and whether it was remembered."""
    given: list[tuple[list[int], list[int]]] = prompts()
    asked = {"prompts": [ids for ids, _ in given], "max_tokens": [len(rest) for _, rest in given], "logprobs": 1}
    if case.model == FETCHED:
        asked["prompts"] = chats(model_folder(case.model, folder))
        asked["max_tokens"] = [64] * len(asked["prompts"])
    with engines(case, folder, 1 << 30) as both:
        found = {name: engine.ask(**asked) for name, engine in both.items()}
    ours, peers = (found[name] for name in (OURS, PEER))
    pairs = [*zip(ours["tokens"], peers["tokens"], strict=True)]
    row: Row = {"requests": len(pairs), "tokens": sum(asked["max_tokens"])}
    row["equal_requests"] = sum(one == other for one, other in pairs)
    if case.model != FETCHED:
        wanted = [rest for _, rest in given]
        row["remembered_requests"], row["remembered_by_peer"] = (
            sum(one == rest for one, rest in zip(answers["tokens"], wanted, strict=True)) for answers in (ours, peers)
        )
        if row["remembered_by_peer"] == 0:
            raise RuntimeError(f"{case.name}: {PEER} remembers nothing of what was trained, so that it is no reference")
    # As far as both have seen the same tokens: where they first differ, their choices must have been about equal.
    seen = [min(_common(one, other) + 1, len(one)) for one, other in pairs]
    gaps = [
        abs(x - y)
        for count, one, other in zip(seen, ours["logprobs"], peers["logprobs"], strict=True)
        for x, y in zip(one[:count], other[:count], strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        raise RuntimeError(f"{case.name}: log-probabilities are not finite, so that equal tokens say nothing")
    yield row | {"largest_logprob_difference": round(max(gaps), 5)}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


def compare_server(case: Case, folder: Path) -> Iterator[Row]:
    """How many completions of `vllm serve` are what the model was trained on, and whether a streamed chat is."""
    given, model, tiny = prompts(), model_folder(case.model, folder), recipe()
    tokenizer = tokenizer_of(model)
    wanted = [tokenizer.decode(rest, skip_special_tokens=True) for _, rest in given]
    options = ["--attention-backend", OURS, "--max-model-len", "2048", "--gpu-memory-utilization", "0.1"]
    with served(model, folder / "server.log", *options) as client:
        found = completions(client, model.name, [ids for ids, _ in given], [len(rest) for _, rest in given])
        question, answer = tiny.read_corpus(EXAMPLE / "corpus.txt").pairs[0]
        said = chat(client, model.name, question)
    if said != answer:
        raise RuntimeError(f"{case.name}: the chat must answer {answer!r}, it said {said!r}")
    equal = sum(one == other for one, other in zip(found, wanted, strict=True))
    yield {"requests": len(given), "equal_requests": equal, "streamed_chats": 1}


def compare_speed(case: Case, folder: Path, rounds: int) -> Iterator[Row]:
    """Output tokens per second of both, round by round in turns, after one round of each that is not counted."""
    with engines(case, folder, 40 << 30) as both:
        for count in case.requests:
            asked = workload(count)
            total = sum(asked["max_tokens"])
            first = {name: engine.ask(**asked)["tokens"] for name, engine in both.items()}
            if any([len(row) for row in rows] != asked["max_tokens"] for rows in first.values()):
                raise RuntimeError(f"{case.name}: an engine gave another number of tokens than asked for")
            speeds: dict[str, list[float]] = {OURS: [], PEER: []}
            for _ in range(rounds):
                for name, engine in both.items():
                    speeds[name].append(round(total / engine.ask(**asked)["seconds"], 1))
            same = [_common(one, other) for one, other in zip(first[OURS], first[PEER], strict=True)]
            median = {name: statistics.median(values) for name, values in speeds.items()}
            yield {
                "requests": count,
                "tokens": total,
                "tok_s": speeds,
                "median_tok_s": median,
                "ratio": round(median[OURS] / median[PEER], 3),
                "same_prefix": round(sum(same) / total, 3),
            }


def workload(count: int) -> dict[str, Any]:
    """Prompts of random tokens and how many to generate for each: 100 to 1,024 of both, of one alone 512 and 256."""
    draw = Random(0)
    lens = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)] if count > 1 else [(512, 256)]
    prompts = [[draw.randrange(10, 9000) for _ in range(length)] for length, _ in lens]
    return {"prompts": prompts, "max_tokens": [new for _, new in lens]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print a line each; 1 where tokens differ or an engine failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--only", action="append", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, help="folder to keep models and logs in")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if not given.suite or case.suite in given.suite]
    cases = [case for case in cases if not given.only or any(word in case.name for word in given.only)]
    result = ResultFile(given.json, {}, [])
    result.meta["vllm"] = version("vllm")
    failed, lock = 0, Lock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare({case.model for case in cases}, folder)

        def run(case: Case) -> None:
            nonlocal failed
            about: Row = {"suite": case.suite, "case": case.name, "model": case.model, "options": case.options}
            about["variables"] = case.variables
            if case.requests:
                measured = compare_speed(case, folder, given.rounds)
            else:
                measured = (compare_server if case in SERVER else compare_tokens)(case, folder)
            try:
                for row in measured:
                    with lock:
                        result.add_plain(about | row)
                        failed += row.get("equal_requests", row["requests"]) != row["requests"]
                        print(json.dumps({"case": case.name, "model": case.model} | row), flush=True)
            except RuntimeError as error:
                with lock:
                    result.add_plain(about | {"failed": str(error)})
                    failed += 1
                    print(f"{case.name}: {error}", flush=True)

        if any(not case.requests for case in cases):
            prompts()  # transformers cannot be imported by several threads at once
        side_by_side = [case for case in cases if not case.requests]
        for case in cases:
            if case not in side_by_side:
                run(case)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(run, side_by_side))
    return int(failed > 0)


def prepare(models: set[str], folder: Path) -> None:
    """Train or write what is not there, side by side."""
    commands = [[sys.executable, "-m", "bench.vllm_models", name, str(folder)] for name in sorted(models)]
    running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    if any([process.wait() for process in running]):
        raise RuntimeError("a model could not be made")


if __name__ == "__main__":
    raise SystemExit(main())
