"""The process that renders chat templates: one JSON request per line of stdin, one JSON reply per line of stdout.

Its first line is "ready", or says why it cannot render and what to do.

Started by path (`python -I -S chat_worker.py MEMORY SECONDS FOLDER ...`), so it imports the standard library only, and
jinja2 from the folders that it is given. MEMORY: bytes of address space that it may have. SECONDS: of processor time
for each request, should its parent, which stops it earlier, be gone.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

sys.path.extend(sys.argv[3:])

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, but an unsafe attribute is an error at once and not an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")


class _Generation(ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is rendered as it is."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=4)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation])
    environment.globals = {
        "range": environment.globals["range"],
        **{name: environment.globals[name] for name in ("namespace", "cycler", "joiner")},
        "dict": _dict,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def _dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _render(source: str, max_chars: int, variables: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in _compile(source).generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            remedy = "shorten the messages, or render them yourself and pass token ids"
            raise SecurityError(f"the rendered text is longer than {max_chars} characters; {remedy}")
    return "".join(pieces)


def _reply(line: bytes, render: Callable[..., str] = _render) -> dict[str, Any]:
    try:
        return {"text": render(**json.loads(line))}
    except (SecurityError, MemoryError, OverflowError, RecursionError) as error:
        return {"unsafe": True, "message": _describe(error)}
    except Exception as error:
        return {"unsafe": False, "message": _describe(error)}


def _describe(error: Exception) -> str:
    text = str(error)[:1000]
    if isinstance(error, MemoryError) and not text:
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        text = (
            f"rendering it takes more than {memory / 2**30:g} GiB; raise chat_template_memory, or shorten the messages"
        )
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _refuse(why: str) -> int:
    print(f"chat templates {why}", flush=True)
    return 1


def main() -> None:
    """Serve until stdin ends."""
    memory, seconds = map(int, sys.argv[1:3])
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
        place = jinja2.__file__.rpartition("/jinja2/")[0]
        sys.exit(_refuse(f"need jinja2 3.1.6 or newer, {place} has {jinja2.__version__}; pip install -U jinja2"))
    try:
        _limit(resource.RLIMIT_AS, memory)
        _limit(resource.RLIMIT_FSIZE, 0)
    except (OSError, ValueError) as error:
        sys.exit(
            _refuse(f"run under limits of memory, which this system does not set ({error}); encode prompts as text")
        )
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + seconds)
        print(json.dumps(_reply(line)), flush=True)


if __name__ == "__main__":
    main()
