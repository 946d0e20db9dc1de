"""`vllm serve` over the library's backend, asked by the `openai` client as its users do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from .vllm_process import free_port

_SECONDS_TO_START = 300


@contextmanager
def served(
    model: Path, log: Path, options: Sequence[str], own: Sequence[str] = (), nodes: Sequence[Sequence[str]] = ()
) -> Iterator[Any]:
    """A client of a server of the model on a free port, which ends with the block.

    Args:
        log: what it says goes there; what the other nodes say, to files beside it.
        options: of the server and of the other nodes. own: of the server alone.
        nodes: of each other node, which has engines and no server.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    port = str(free_port())
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", model.name, *options]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    asked = [["--port", port, *own], *(["--headless", *node] for node in nodes)]
    running = list[tuple[subprocess.Popen[bytes], Path]]()
    try:
        for number, more in enumerate(asked):
            said = log.with_suffix(f".{number}.log") if number else log
            with said.open("w", encoding="utf-8") as file:
                started = subprocess.Popen([*command, *more], stdout=file, stderr=file, env=environment)
            running.append((started, said))
        _wait(f"http://127.0.0.1:{port}/health", running)
        yield import_module("openai").OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(url: str, running: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> None:
    """Until the server answers.

    Raises:
        RuntimeError: a process ended, or it took too long; with the end of each one's log.
    """
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and all(process.poll() is None for process, _ in running):
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-3000:] for _, log in running)
    raise RuntimeError(f"the server does not answer:\n{said}")


def completions(
    client: Any, model: str, prompts: Sequence[list[int]], max_tokens: Sequence[int], rank: int | None = None
) -> list[str]:
    """What follows each prompt, greedily; 32 are asked at a time. `rank`: the data parallel rank that is to answer."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def ask(prompt: list[int], limit: int) -> str:
        given: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0}
        return client.completions.create(**given, extra_headers=headers).choices[0].text

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(ask, prompts, max_tokens))


def chat(client: Any, model: str, question: str) -> str:
    """The answer to a question, streamed."""
    messages = [{"role": "user", "content": question}]
    parts = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=128, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
