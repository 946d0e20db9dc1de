"""`vllm serve` over the library's backend, asked by the `openai` client as its users do."""

from __future__ import annotations

import os
import socket
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

_SECONDS_TO_START = 300


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[Any]:
    """A client of a server of the model on a free port, which ends with the block; what it says goes to the log.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *options]
    command += ["--served-model-name", model.name]
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"})
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield import_module("openai").OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server does not answer:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


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
