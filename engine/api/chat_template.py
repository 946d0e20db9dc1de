"""Chat templates of a model folder: sandboxed, in a process of their own, within limits of time, memory and size.

A template is code of a stranger. The sandbox keeps it from Python's internals but not from looping for ever or from
holding the interpreter inside one operation (`10 ** 10 ** 9`), which no thread or signal of this process could stop. So
it runs in a child process, started once and killed when its time is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pagedattn.errors import RequestError, SecurityError, UnsupportedError, WeightsError

from ..models.folder import ModelFolder

MAX_SOURCE_BYTES = 64 << 10
MAX_RENDERED_CHARS = 4 << 20
_MAX_REPLY_BYTES = 12 * MAX_RENDERED_CHARS + 4096  # a character takes at most 12 bytes of JSON
_WORKER = Path(__file__).with_name("chat_worker.py")
_CPU_SECONDS = 60  # at least; it only counts where the parent has died, which stops the worker after time_limit
_PACKAGES = ("jinja2", "markupsafe")  # what the worker imports beyond the standard library


class ChatTemplate:
    """A template's source and the process that renders it.

    Attributes:
        source: the template's text.
        for_tools: the one that is taken where tools are given; "" for the same.
        variables: names that it always sees, such as `bos_token`.
        time_limit: seconds that one rendering may take.
        memory_limit: bytes of address space of the process.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        *,
        for_tools: str = "",
        time_limit: float = 3.0,
        memory_limit: int = 1 << 30,
    ) -> None:
        size = max(len(text.encode("utf-8", "surrogatepass")) for text in (source, for_tools))
        if size > MAX_SOURCE_BYTES:
            raise SecurityError(f"a chat template must have at most {MAX_SOURCE_BYTES} bytes, got {size}")
        self.source, self.for_tools = source, for_tools
        self.variables = dict(variables or {})
        self.time_limit, self.memory_limit = time_limit, memory_limit
        self._worker: subprocess.Popen[bytes] | None = None

    @classmethod
    def from_folder(
        cls, folder: ModelFolder, variables: Mapping[str, str] | None = None, **limits: Any
    ) -> ChatTemplate | None:
        """The template of a model folder (chat_template.jinja, else tokenizer_config.json), None where it has none.

        Args:
            limits: `time_limit` and `memory_limit`.

        Raises:
            SecurityError: it has more than 64 KiB, or its file leaves the folder.
            WeightsError: it is no text.
        """
        source = folder.read_text("chat_template.jinja", MAX_SOURCE_BYTES)
        if source is None:
            source = (folder.read_json("tokenizer_config.json") or {}).get("chat_template")
        for_tools = ""
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source, for_tools = named.get("default"), named.get("tool_use") or ""
        if source is None:
            return None
        for text in (source, for_tools):
            if not isinstance(text, str):
                raise WeightsError(f"chat_template in {folder.root} must be text, got {type(text).__name__}")
        return cls(source, variables, for_tools=for_tools, **limits)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Messages (plain JSON data) to the text of a prompt.

        Args:
            variables: further names for the template, such as `add_generation_prompt=True` or `tools=[...]`.

        Raises:
            RequestError: messages that are no JSON data, or that the template refuses.
            SecurityError: the template left the sandbox, or took too much time, memory or text.
        """
        names = {"add_generation_prompt": False, "tools": None, "documents": None, **self.variables, **variables}
        source = self.for_tools or self.source if names["tools"] is not None else self.source
        request = {"source": source, "max_chars": MAX_RENDERED_CHARS, "variables": {**names, "messages": messages}}
        reply = json.loads(self._ask(to_json(request).encode()))
        if "text" in reply:
            return reply["text"]
        kind = SecurityError if reply["unsafe"] else RequestError
        raise kind(f"chat template: {reply['message']}")

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        if self._worker is not None:
            _stop(self._worker)
            self._worker = None

    def _ask(self, payload: bytes) -> bytes:
        if self._worker is not None and self._worker.poll() is not None:
            self.close()
        worker = self._worker = self._worker or self._start()
        timer = threading.Timer(self.time_limit, worker.kill)
        timer.start()
        try:
            worker.stdin.write(payload + b"\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
            reply = worker.stdout.readline(_MAX_REPLY_BYTES)  # type: ignore[union-attr]
        except BrokenPipeError:
            reply = b""
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if not reply.endswith(b"\n"):
            self.close()
            remedy = "raise chat_template_timeout or chat_template_memory, or shorten the messages"
            raise SecurityError(
                f"the chat template was stopped: more than {self.time_limit:g} s, or too much memory; {remedy}"
            )
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        folders = _folders()
        # No environment variable, working directory, site folder or .pth file decides what the worker imports.
        limits = str(self.memory_limit), str(max(_CPU_SECONDS, int(2 * self.time_limit)))
        command = [sys.executable, "-I", "-S", str(_WORKER), *limits, *folders]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _stop, worker)
        said = worker.stdout.readline().decode(errors="replace").strip()  # type: ignore[union-attr]
        if said != "ready":
            ended = f"the process that renders chat templates ended with status {worker.wait()} before it was ready"
            raise UnsupportedError(said or f"{ended}; it imports jinja2 from {' and '.join(folders)}")
        return worker


def _folders() -> list[str]:
    """The folders from which this process would import what the worker needs, the working directory left out."""
    path = [entry for entry in sys.path if os.path.exists(entry) and not os.path.samefile(entry, ".")]
    specs = [PathFinder.find_spec(name, path) for name in _PACKAGES]
    found = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
    if len(found) < len(_PACKAGES):
        raise UnsupportedError("chat templates need jinja2 3.1.6 or newer: pip install 'pagedattn[engine]'")
    return [*dict.fromkeys(found)]


def to_json(value: object) -> str:
    """Plain data as JSON; RequestError where it is none."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages must be plain JSON data: {error}") from None


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        try:
            pipe.close()  # type: ignore[union-attr]
        except BrokenPipeError:
            continue  # what was not sent is not missed
