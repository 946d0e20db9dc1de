"""An OpenAI-compatible server over the engine: completions and chat completions, whole or streamed.

    pip install 'pagedattn[engine,server]'
    python examples/openai_server.py examples/tiny-qwen3 --port 8000

What the engine cannot do is refused (400), never ignored, and a client that goes away ends its request. There is no
authentication: leave the server on loopback, or put a proxy in front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import openai_protocol as protocol
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from pagedattn.engine import LLM, AsyncLLM
from pagedattn.errors import EngineDeadError, PagedAttnError, UnsupportedError

Json = dict[str, Any]
T = TypeVar("T")
SECONDS_TO_END = 5  # that running answers get after Ctrl-C


class Server:
    """The app over one LLM."""

    engine: AsyncLLM

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.name = llm, name
        self.app = FastAPI(title="pagedattn", lifespan=self.lifespan)
        self.app.add_api_route("/health", self.health)
        self.app.add_api_route("/metrics", self.metrics)
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        for kind in (PagedAttnError, RequestValidationError, AnyHTTPException, Exception):
            self.app.add_exception_handler(kind, self.failed)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with AsyncLLM(self.llm) as self.engine:
            yield

    async def health(self) -> Response:
        if self.engine.error is not None:
            raise EngineDeadError(str(self.engine.error))
        return PlainTextResponse("ok\n")

    async def metrics(self) -> Response:
        """The engine's stats, a name and a number per line, as Prometheus reads them."""
        return PlainTextResponse("".join(metric_lines("pagedattn", asdict(self.llm.stats()))))

    async def models(self) -> Json:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "pagedattn"}
        return {"object": "list", "data": [model]}

    async def completions(self, request: Request, body: Json) -> Response:
        return await self.respond(request, body, chat=False)

    async def chat_completions(self, request: Request, body: Json) -> Response:
        return await self.respond(request, body, chat=True)

    async def respond(self, request: Request, body: Json, chat: bool) -> Response:
        if body.get("model") != self.name:
            raise HTTPException(404, f"model must be {self.name!r}, got {body.get('model')!r:.100}")
        protocol.refuse_others(body, protocol.CHAT if chat else protocol.COMPLETION)
        params, include_usage = protocol.sampling_params(body, chat), protocol.wants_usage(body)
        answer = protocol.Answer(body, self.llm.runner, chat)

        async def work() -> Response:
            given = [await self.engine.encode_chat(protocol.messages(body))] if chat else protocol.prompts(body)
            if body.get("stream"):
                stream = await self.engine.stream(given, params)
                headers = {"cache-control": "no-cache"}
                events = answer.events(stream, params.n, include_usage)
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            outputs = await self.engine.generate(given, params)
            completions = [one for output in outputs for one in output.outputs]
            return JSONResponse(answer.whole([output.prompt_token_ids for output in outputs], completions))

        return await while_connected(request, work())

    async def failed(self, request: Request, error: Exception) -> Response:
        status, body = protocol.error_object(error)
        # Behind an error of no known kind uvicorn closes the connection; a client that is not told may use it again.
        headers = {"connection": "close"} if status == 500 else None
        return JSONResponse(body, status, headers)


class Listener(uvicorn.Server):
    """Serves a Server's app until Ctrl-C; answers that go on for long after that end with an error."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn.Config(server.app, timeout_graceful_shutdown=2 * SECONDS_TO_END))
        self.server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.ensure_future(super().shutdown(sockets))
        await asyncio.wait((end,), timeout=SECONDS_TO_END)
        await self.server.engine.close()
        await end


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away."""
    gone, task = asyncio.ensure_future(disconnected(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client went away")  # only the log shows it
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def metric_lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from metric_lines(f"{name}_{key}", inner)
    else:
        yield f"{name} {value}\n"


def engine_options(given: Sequence[str]) -> Json:
    """NAME=VALUE pairs as options of LLM; a value that is no JSON is text."""
    options: Json = {}
    for name, _, value in (pair.partition("=") for pair in given):
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face model folder with a tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--name", help="what requests call the model (default: the folder's name)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the engine, such as max_num_seqs=64, max_waiting=1000 or backend=TRITON; may be repeated",
    )
    args = parser.parse_args()
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        sock = socket.create_server((args.host, args.port), family=family)
        llm = LLM(args.model, **engine_options(args.set))
        if llm.runner.tokenizer is None:
            missing = args.model.absolute() / "tokenizer.json"
            raise UnsupportedError(f"{missing} is missing, and this server speaks text")
    except (OSError, PagedAttnError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    name = args.name or args.model.resolve().name
    with closing(llm), sock, suppress(KeyboardInterrupt):
        host = f"[{args.host}]" if family == socket.AF_INET6 else args.host
        print(f"{name} at http://{host}:{sock.getsockname()[1]}/v1", flush=True)
        Listener(Server(llm, name)).run([sock])


if __name__ == "__main__":
    main()
