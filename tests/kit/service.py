"""The API over scripted models: apps with keys, files and batches; clients that see every message and can hang up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import httpx2
import openai
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from app.api import Pipeline, RequestHandler, ServedModel, build_app, pipelines_of
from app.api.auth.keys import KeyRing
from app.api.http.guard import Guard
from app.api.prepared_request import RequestLimits
from app.batches import BatchLimits
from app.config import ApiConfig, ApplicationConfig, BatchesConfig, KeysConfig, PricesConfig
from app.engine.request import FinishReason, Generate, ModelInfo, Pooling, Request, TokenDelta, TokenLogprobs
from app.jobs.executors import FleetExecution
from app.jobs.local_service import LocalBatchService
from app.text import ReasoningMarks, Tokenizer
from app.text.tool_calls import FORMATS, ToolFormat
from app.webhooks.client import WebhookClient
from tests.waiting import until

KEY = "sk-test-Zx81canary"
OTHER_KEY = "sk-test-other"
ADMIN_KEY = "sk-test-admin"
MAX_MODEL_LEN = 200
WAIT = "wait"  # a step of a script: nothing more comes until the stream is closed
Step = tuple[int, ...] | TokenDelta | Exception | str
Script = Callable[[Request], Iterable[Step]]


# `both` asks the first of two models, and the second where the first was not sure.
CASCADE: Mapping[str, Any] = MappingProxyType(
    {"name": "both", "steps": [{"kind": "cascade", "small": "small", "large": "large", "min_mean_logprob": -0.5}]}
)


class ScriptedGenerate:
    """A `Generate` that follows a script and notes what was asked and what is still open."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.open: set[str] = set()

    def __call__(self, request: Request) -> AsyncIterator[TokenDelta]:
        return self.following(self.script, request)

    async def following(self, script: Script, request: Request) -> AsyncIterator[TokenDelta]:
        """The same by another script."""
        self.requests.append(request)
        self.open.add(request.request_id)
        try:
            for step in script(request):
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if step == WAIT:
                    await asyncio.Event().wait()
                yield delta(request, step)
        finally:
            self.open.discard(request.request_id)


def delta(request: Request, step: Step) -> TokenDelta:
    """A step of a script as what goes over the seam."""
    if isinstance(step, TokenDelta):
        return step
    assert isinstance(step, tuple), step
    return TokenDelta(request_id=request.request_id, token_ids=step, num_cached_tokens=2)


class Service:
    """An app over scripted models (one called `demo`) or over another `generate`, with a JSON client."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script = lambda request: [],
        *,
        generate: Generate | None = None,
        names: Sequence[str] = ("demo",),
        aliases: tuple[str, ...] = (),
        tool_format: ToolFormat | None = None,
        reasoning_marks: ReasoningMarks | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        pooling: Pooling | None = None,
        prices: PricesConfig = PricesConfig(),  # noqa: B008 - frozen
        pipelines: Sequence[Mapping[str, Any]] = (),
        models: Sequence[Mapping[str, Any]] | None = None,
        scripts: Mapping[str, Script] = MappingProxyType({}),
        keys: Sequence[Mapping[str, Any]] = (),
        model_info: Mapping[str, Any] = MappingProxyType({}),
        facts_of: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """`scripts`, `facts_of`: of single models, by their names. `models`: settings, which only pipelines look at.

        `keys`: entries.
        """
        self.tokenizer = tokenizer
        self.generate = ScriptedGenerate(script)
        self.script_of = dict(scripts)
        self.is_ready = True
        usual = ModelInfo(max_model_len=max_model_len, vocab_size=763, eos_token_ids=(4,), embedding_size=4)
        self.models = [
            ServedModel(
                name=name,
                tokenizer=tokenizer,
                model_info=replace(usual, **{**model_info, **facts_of.get(name, {})}),
                generate=generate or (partial(self._scripted, name) if scripts else self.generate),
                created=1_700_000_000,
                aliases=aliases,
                tool_format=tool_format,
                reasoning_marks=reasoning_marks,
                pooling=pooling,
                prices=prices,
            )
            for name in names
        ]
        self.pipelines: list[Pipeline] = []
        if pipelines:
            configs = {"models": models or [{"name": name} for name in names], "pipelines": pipelines}
            self.pipelines = pipelines_of(ApplicationConfig.model_validate(configs), self.models)
        limits = {name: settings.pop(name) for name in RequestLimits.__slots__ if name in settings}
        self.handler = RequestHandler(
            self.models,
            ApiConfig.model_validate(settings),
            authenticator=ring(keys) if keys else None,
            pipelines=self.pipelines,
            limits=RequestLimits(**limits),
        )
        self.app: ASGIApp = self.built()

    def built(self, **options: Any) -> ASGIApp:
        """Another app over the same models: with fleets, adapters, switches or routes of batches."""
        return build_app(self.handler, self._is_ready, **options)

    def _scripted(self, name: str, request: Request) -> AsyncIterator[TokenDelta]:
        return self.generate.following(self.script_of[name], request)

    async def _is_ready(self) -> bool:
        return self.is_ready

    @property
    def request(self) -> Request:
        """The only request that was generated."""
        [request] = self.generate.requests
        return request

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> Answer:
        """One call from start to end, in an event loop of its own."""
        return asyncio.run(self.answer(method, path, body, headers, query))

    async def answer(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> Answer:
        """One call from start to end."""
        async with Connection(self.app, method, path, body, headers or {}, query) as connection:
            return await connection.finished()

    def chat(self, **fields: Any) -> Answer:
        return self.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | fields)

    def complete(self, **fields: Any) -> Answer:
        return self.call("POST", "/v1/completions", {"prompt": "Hi"} | fields)


def routes_of(app: Any) -> tuple[list[Route], list[Route]]:
    """The open routes of an app, and those behind its guard."""
    guard = app.router.default
    assert isinstance(guard, Guard)
    assert isinstance(guard.app, Router)
    both = app.router.routes, guard.app.routes
    assert all(isinstance(route, Route) for routes in both for route in routes), "others need a thought of their own"
    return both


class Answer:
    """What came back over a connection."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        [start] = [message for message in messages if message["type"] == "http.response.start"]
        self.status: int = start["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        self.parts = [m["body"] for m in messages if m["type"] == "http.response.body" and m["body"]]
        self.body = b"".join(self.parts)
        self.is_complete = not messages[-1].get("more_body", False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it has the OpenAI shape."""
        assert self.json.keys() == {"error"}, self.json
        error = self.json["error"]
        check_error(error)
        return dict(error)

    @property
    def event_fields(self) -> list[dict[str, str]]:
        """The fields of each server-sent event, after checking the framing."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = self.body.decode()
        assert text.endswith("\n\n")
        return [dict(line.split(": ", 1) for line in event.split("\n")) for event in text[:-2].split("\n\n")]

    @property
    def data(self) -> list[str]:
        """The data of each server-sent event, which have no names."""
        events = self.event_fields
        assert all(event.keys() <= {"id", "data"} for event in events)
        return [event["data"] for event in events]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Server-sent events that are named, after checking that each has its type as its name."""
        events = [(event["event"], json.loads(event["data"])) for event in self.event_fields]
        assert all(name == event["type"] for name, event in events)
        return [event for _, event in events]

    @property
    def chunks(self) -> list[Any]:
        """All events but the last, which must be [DONE]."""
        *chunks, done = self.data
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def check_error(error: dict[str, Any]) -> None:
    """The OpenAI error object, with a message for people and nothing from our insides."""
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for insides in ("Traceback", 'File "', "pydantic", "validation error"):
        assert insides not in error["message"]


class Connection:
    """One HTTP exchange with an ASGI app, as a server would run it."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        query: str = "",
        *,
        begins_work: bool = False,
    ) -> None:
        """`begins_work`: which outlives the call."""
        self._app = app
        self._begins_work = begins_work
        chunks = body if isinstance(body, list) and all(isinstance(chunk, bytes) for chunk in body) else [_bytes(body)]
        declared = {"content-type": "application/json"} if method == "POST" else {}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, chunk in enumerate(chunks):
            self._incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1})
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (declared | headers).items()],
        }
        self.messages: list[dict[str, Any]] = []
        self.error: BaseException | None = None  # that has ended it

    async def __aenter__(self) -> Connection:
        self._others = asyncio.all_tasks()
        self._task = asyncio.create_task(self._app(self._scope, self._incoming.get, self._send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        [self.error] = await asyncio.gather(self._task, return_exceptions=True)
        left = asyncio.all_tasks() - self._others
        assert not left or self._begins_work, "a call leaves no task behind"

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    def send_body(self, piece: bytes, *, more: bool = True) -> None:
        """The next piece of a body, for one that began with no pieces."""
        self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    def cancel(self) -> None:
        """What Ray Serve does instead of hanging up."""
        self._task.cancel()

    async def finished(self) -> Answer:
        """The answer, once it is complete."""
        await self.ended()
        return Answer(self.messages)

    async def ended(self) -> None:
        """Wait until the answer is complete, and put nothing together."""
        await self._task

    def answer(self) -> Answer:
        """The answer by now."""
        return Answer(self.messages)


async def hang_up(app: ASGIApp, path: str, body: Any, when: Callable[[], object]) -> None:
    """A client that goes away once this is so, and what follows in the app."""
    async with Connection(app, "POST", path, body, {}) as connection:
        await until(when)
        connection.hang_up()
        await connection.finished()


def _bytes(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""
    return json.dumps(body).encode()


def say(tokenizer: Tokenizer, text: str, *, reason: FinishReason | None = FinishReason.STOP) -> Script:
    """A script that says a text token by token and ends as models do: with the end token, or at the length.

    Of tokens that a request names it says log-probabilities, all the same.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request) -> Iterable[Step]:
        if named := request.sampling.logprob_token_ids:
            told = TokenLogprobs(-1.0, 1, named, (-1.0,) * len(named))
            yield TokenDelta(request.request_id, (ids[0],), FinishReason.LENGTH, logprobs=(told,))
            return
        yield from ((token_id,) for token_id in ids)
        if reason is FinishReason.STOP:
            yield last(request, (4,), reason, stop_token_id=4)
        elif reason is not None:
            yield last(request, (), reason)

    return script


def say_likely(tokenizer: Tokenizer, text: str, logprob: float) -> Script:
    """Says a text, to its length, with this log-probability for each of its tokens where the request asks for it."""

    def script(request: Request) -> Iterable[Step]:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            told = () if request.sampling.logprobs is None else (TokenLogprobs(logprob, 1),)
            yield TokenDelta(request.request_id, (token_id,), logprobs=told)
        yield last(request, (), FinishReason.LENGTH)

    return script


def vector(request: Request, numbers: Iterable[float]) -> list[Step]:
    """The end of a request for an embedding or for scores."""
    return [TokenDelta(request.request_id, (), FinishReason.STOP, embedding=array("f", numbers).tobytes())]


def steps_of_vectors(tokenizer: Tokenizer, *, size: int) -> Service:
    """A model of which all requests that wait end at once with a vector, as those of one step of an engine do.

    It takes the vector for the scores of as many labels, too.
    """
    numbers = array("f", (0.01 * index for index in range(size))).tobytes()
    waiting: list[asyncio.Future[None]] = []

    def end_step() -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)
        waiting.clear()

    async def generate(request: Request) -> AsyncIterator[TokenDelta]:
        loop = asyncio.get_running_loop()
        if not waiting:
            loop.call_later(0.01, end_step)
        waiting.append(loop.create_future())
        await waiting[-1]
        yield TokenDelta(request.request_id, (), FinishReason.STOP, embedding=numbers)

    model_info = {"embedding_size": size, "labels": tuple(map(str, range(size)))}
    return Service(tokenizer, generate=generate, pooling=Pooling.LAST, model_info=model_info)


def by_angle(tokenizer: Tokenizer, angles: Mapping[str, float], *, reason: FinishReason = FinishReason.STOP) -> Script:
    """The text `3 4` for a prompt; for a text its direction in the plane, in degrees, by what is in it."""
    says = say(tokenizer, "3 4", reason=reason)

    def script(request: Request) -> Iterable[Step]:
        if request.pooling is None:
            return says(request)
        text = tokenizer.decode(request.prompt_token_ids)
        angle = math.radians(next(angle for words, angle in angles.items() if words in text))
        return vector(request, [math.cos(angle), math.sin(angle)])

    return script


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def calling(
    tokenizer: Tokenizer,
    text: str,
    reason: FinishReason = FinishReason.STOP,
    *,
    form: ToolFormat = FORMATS["hermes"],
    marks: ReasoningMarks | None = None,
) -> Service:
    """A model with tools that says a text."""
    says = say(tokenizer, text, reason=reason)
    return Service(tokenizer, says, tool_format=form, reasoning_marks=marks, max_model_len=2000)


def without_times(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of a pipeline's answer, in which no two runs differ."""
    pipeline = usage["pipeline"]
    steps = [{name: value for name, value in step.items() if name != "ms"} for step in pipeline["steps"]]
    return {**usage, "pipeline": {**pipeline, "steps": steps}}


def last(
    request: Request, token_ids: tuple[int, ...], reason: FinishReason, *, stop_token_id: int | None = None
) -> TokenDelta:
    """The last delta of a request."""
    return TokenDelta(
        request_id=request.request_id, token_ids=token_ids, finish_reason=reason, stop_token_id=stop_token_id
    )


# ---- keys


def entry(key: str = KEY, name: str = "alice", **limits: Any) -> dict[str, Any]:
    """What the file has of a key."""
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | limits


def ring(entries: Iterable[Mapping[str, Any]]) -> KeyRing:
    """An authenticator that knows the keys of these entries."""
    return KeyRing(KeysConfig.model_validate({"keys": list(entries)}).keys)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- clients


@asynccontextmanager
async def openai_client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that never tries again, so that a test sees every answer."""
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http,
        openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


# ---- files and batches

ENDED = ("completed", "failed", "cancelled", "expired")


@asynccontextmanager
async def served(
    service: Service,
    folder: Path,
    *,
    keys: Sequence[Mapping[str, Any]] = (),
    limits: RequestLimits | None = None,
    batch_limits: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
    client: WebhookClient | None = None,
    store_responses: bool = False,
    **settings: Any,
) -> AsyncIterator[Any]:
    """The app with these API keys. Their limits count for lines by themselves, as in a process of their own."""
    max_in_flight = settings.pop("max_in_flight", 32)
    config = BatchesConfig(**settings)
    handler, of_items = (
        RequestHandler(
            service.models,
            ApiConfig(store_responses=store_responses),
            authenticator=ring(keys) if keys else None,
            pipelines=service.pipelines,
            limits=limits or RequestLimits(),
        )
        for _ in range(2)
    )
    execution = FleetExecution(of_items.handle_item, max_in_flight=max_in_flight)
    async with LocalBatchService(
        folder, config, execution, of_items.keep, limits=batch_limits, client=client
    ) as batches:
        yield build_app(handler, service._is_ready, batches=batches)


def client_of(app: Any) -> httpx.AsyncClient:
    """A client of this app."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


@asynccontextmanager
async def http_client(service: Service, folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app with files and batches."""
    async with served(service, folder, **settings) as app, client_of(app) as client:
        yield client


@asynccontextmanager
async def openai_batches(service: Service, folder: Path, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The `openai` package on that app."""
    async with served(service, folder, **settings) as app, openai_client(app) as client:
        yield client


async def job_ended(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """A job once it has ended."""
    answer = await until(lambda: client.get(f"/v1/batch/{job_id}"), lambda answer: answer.json()["status"] in ENDED)
    return dict(answer.json())


def line_of(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    """A line of a file for a batch."""
    given = body if "messages" in body else {"prompt": "Hi"} | body
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": given}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


async def sent_batch(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> dict[str, Any]:
    """The body that begins a batch over a file with this content, which is uploaded."""
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", **form)).json()
    return {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}


async def begun_batch(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> str:
    """The id of a batch over these lines."""
    return str((await client.post("/v1/batches", json=await sent_batch(client, content, endpoint))).json()["id"])
