"""Servers for clients to be tested against: the real API over a simulated engine, and one that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import RequestHandler, ServedModel, build_app
from app.build import build_engine
from app.config import ApiConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from tests.waiting import PATIENCE_S, eventually, until


@contextmanager
def serving(app: ASGIApp, *, ws: Literal["none", "auto"] = "none") -> Iterator[str]:
    """The base URL of an app on a port of its own."""
    config = uvicorn.Config(app, port=0, ws=ws, lifespan="off", loop="asyncio", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, every_s=0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The same for an app that belongs to this event loop."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class Cutting:
    """An app of which the first answers break off after some bytes."""

    def __init__(self, app: ASGIApp, num_answers: int, *, num_bytes: int = 3000) -> None:
        self._app = app
        self._num_answers = num_answers
        self._num_bytes = num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_left = self._num_bytes

        async def send_some(message: Message) -> None:
            nonlocal num_left
            num_left -= len(message.get("body", b""))
            if num_left < 0 and self._num_answers:
                self._num_answers -= 1
                await send(message | {"body": message["body"][:num_left], "more_body": True})
                raise ConnectionResetError
            await send(message)

        await self._app(scope, receive, send_some)


@contextmanager
def served(engine: AsyncEngine, tokenizer: Tokenizer, api: ApiConfig, **of_model: Any) -> Iterator[str]:
    """The base URL of the real API over one engine. of_model: of `ServedModel`, and its `authenticator`."""

    async def is_ready() -> bool:
        return True

    authenticator = of_model.pop("authenticator", None)
    usual = {"tokenizer": tokenizer, "model_info": engine.model_info, "generate": engine.generate, "created": 0}
    handler = RequestHandler([ServedModel(**usual | of_model)], api, authenticator=authenticator)
    with serving(build_app(handler, is_ready)) as url:
        yield url


@contextmanager
def simulated_service(demo_path: Path, *, step_ms: float, name: str = "simulated", **scheduler: int) -> Iterator[str]:
    """One engine that only sleeps, behind the real API; its model is called `simulated`, or what `name` says."""
    model = ModelConfig(path=str(demo_path), simulated={"step_ms": step_ms})
    engine = build_engine(EngineConfig(model=model, scheduler=SchedulerConfig(**scheduler)))
    try:
        with served(engine, Tokenizer.load(str(demo_path)), ApiConfig(), name=name) as url:
            yield url
    finally:
        engine.shutdown()


def told_server(answer: Callable[[int], Response]) -> Starlette:
    """Answers the n-th completion (from 0) as it is told."""
    numbers = iter(range(1_000_000))

    async def complete(_: Request) -> Response:
        return answer(next(numbers))

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])


def stream(*, num_tokens: int, first_after_s: float = 0.0, gap_s: float = 0.0) -> Response:
    """A text piece for each token, then usage as OpenAI sends it."""

    async def events() -> object:
        await asyncio.sleep(first_after_s)
        for number in range(num_tokens):
            if number:
                await asyncio.sleep(gap_s)
            yield b'data: {"choices":[{"index":0,"text":" a"}],"usage":null}\n\n'
        usage = b'{"prompt_tokens":3,"completion_tokens":%d}' % num_tokens
        yield b'data: {"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % usage

    return StreamingResponse(events(), media_type="text/event-stream")
