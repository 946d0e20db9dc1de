"""The example server in a thread, on a free port of loopback, and OpenAI's own client for it."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeTokenizer

from pagedattn.engine import LLM

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install pagedattn[dev]")

import openai  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
import openai_server  # noqa: E402

NAME = "tiny-qwen3"
MAX_WAITING = 16


@contextmanager
def serve(llm: LLM) -> Iterator[str]:
    """The server over `llm` in a thread, on a free port; yields its address. It ends as by Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listener = openai_server.Listener(openai_server.Server(llm, NAME))
        thread = threading.Thread(target=listener.run, args=([sock],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            listener.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def connect(url: str, **options: Any) -> openai.OpenAI:
    """A client that asks nobody but the server, and once."""
    plain = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain, **options)


def small_llm() -> LLM:
    """The tiny model, in a precision that does not depend on what else is in a step."""
    options: dict[str, Any] = {"num_kv_blocks": 1200, "max_num_seqs": 16, "max_waiting": MAX_WAITING}
    return LLM(EXAMPLES / "tiny-qwen3", dtype="float32", log_interval=None, **options)


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    """What a GET answers, or with a body a POST of it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.read().decode()


def wait_for(condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 10
        time.sleep(0.01)


class SpellingTokenizer(FakeTokenizer):
    """One that the server can ask for the text of a token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))
