"""Engines of vLLM in processes of their own, one for each data parallel rank, that generate when they are asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .vllm_cases import STORE, Case
from .vllm_models import model_folder

ROOT = Path(__file__).parent.parent
OURS = "CUSTOM"


class Engine:
    """A vLLM engine in a process; what it prints goes to a log. It starts in the background until the first question.

    Args:
        cache: bytes of the KV cache. Measured by vLLM they would depend on what else starts on the GPU.
        variables: of the environment, beside the case's.
        name: of the log.
    """

    def __init__(
        self, case: Case, backend: str, folder: Path, cache: int, variables: dict[str, str], name: str
    ) -> None:
        options = {"kv_cache_memory_bytes": cache, "max_model_len": 2048, "enable_prefix_caching": False}
        options["gpu_memory_utilization"] = 0.1  # must be free at the start, and is not used otherwise
        options |= {"model": str(model_folder(case.model, folder)), "attention_backend": backend, "seed": 0}
        read, write = os.pipe()
        self.log = folder / f"{name}.log"
        environment = {**os.environ, **case.variables, **variables, "RESULTS": str(write), "VLLM_NO_USAGE_STATS": "1"}
        environment["PYTHONFAULTHANDLER"] = "1"  # vLLM says nothing of a process that a signal ends
        if case.suite in ("tokens", "latent", "connectors", "ray"):  # starts in half the time
            options["max_num_seqs"] = 64
            if not case.over_ray:  # vLLM's executor over Ray ends in a process of its own alone
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        store = json.dumps(str(folder / f"{name}-store"))[1:-1]
        given = json.dumps(options | case.options).replace(STORE, store)
        with self.log.open("w", encoding="utf-8") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": [write]}
            command = [sys.executable, "-m", "bench.vllm_engine", given]
            self.process = subprocess.Popen(command, **pipes, env=environment, cwd=ROOT, text=True)
        os.close(write)
        self._answers: IO[str] = os.fdopen(read, encoding="utf-8")

    def send(self, **asked: Any) -> None:
        """Ask it to generate, see `vllm_engine.generate`."""
        if self.process.stdin is None:
            raise RuntimeError("the engine has no standard input")
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """What it answers to what was asked, and first that it is ready.

        Raises:
            RuntimeError: it ended; with the errors of its log, and its end.
        """
        line = self._answers.readline()
        if not line:
            said = self.log.read_text(encoding="utf-8", errors="replace")
            lines = said.replace("\r", "\n").splitlines()  # a bar of progress is a line for each step
            told = "\n".join([line for line in lines if "ERROR" in line or "Fatal Python error" in line][-60:])
            raise RuntimeError(f"{self.log.stem} ended with {self.process.wait()}:\n{told}\n{said[-3000:]}")
        return json.loads(line)

    def finish(self) -> None:
        """Have it end; it has nothing left to do."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended, and end it if it does not."""
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Engines:
    """The engines of a backend, one for each data parallel rank, which share the prompts out."""

    def __init__(self, case: Case, backend: str, folder: Path, cache: int) -> None:
        name, port = f"{backend}-{case.name.replace(' ', '_')}", str(free_port())
        given: list[dict[str, str]] = [{}]
        if case.ranks > 1:
            shared = {"SIZE": str(case.ranks), "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
            ranks = [shared | {"RANK": str(rank), "RANK_LOCAL": str(rank)} for rank in range(case.ranks)]
            given = [{f"VLLM_DP_{key}": value for key, value in rank.items()} for rank in ranks]
        self.ranks = list[Engine]()
        for variables in given:
            self.ranks.append(Engine(case, backend, folder, cache, variables, f"{name}-{len(self.ranks)}"))

    def wait_until_ready(self) -> None:
        """Raise RuntimeError with the end of the log where one does not start."""
        for engine in self.ranks:
            engine.receive()

    def ask(self, prompts: Sequence[Any], max_tokens: Sequence[int], **options: Any) -> dict[str, Any]:
        """Generate, see `vllm_engine.generate`: prompt i by rank i mod ranks; seconds are the slowest rank's."""
        count = len(self.ranks)
        for rank, engine in enumerate(self.ranks):
            engine.send(prompts=prompts[rank::count], max_tokens=max_tokens[rank::count], **options)
        answers = [engine.receive() for engine in self.ranks]
        whole: dict[str, Any] = {"seconds": max(answer["seconds"] for answer in answers)}
        for key in answers[0].keys() - whole.keys():
            whole[key] = [answers[i % count][key][i // count] for i in range(len(prompts))]
        return whole

    def close(self) -> None:
        """Let them end, all before the first is waited for: ranks wait for each other."""
        for engine in self.ranks:
            engine.finish()
        for engine in self.ranks:
            engine.wait()


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def engines(case: Case, folder: Path, cache: int) -> Iterator[dict[str, Engines]]:
    """Both backends' engines, each with a KV cache of `cache` bytes."""
    made: dict[str, Engines] = {}
    try:
        for backend in (OURS, case.peer):
            made[backend] = Engines(case, backend, folder, cache)
        for engine in made.values():
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made.values():
            engine.close()
