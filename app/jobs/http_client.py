"""One service over HTTP: a question in, its record out; or in words why there is none yet.

An answer with an error object of the API's form is the service's own word. Anything else with an error status (a proxy
whose application has not started knows neither its routes nor its form) means that the service is not there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.errors import Failure, InvalidSetup
from app.jobs.questions import Question
from app.jobs.record import Record

CONNECT_S = 10.0
ANSWER_S = 3600.0  # a row may wait as long for idle slots, then it is asked again
MAX_RETRY_AFTER_S = 120.0
# A machine that vanishes without a word is noticed after SILENCE_S + PROBES * PROBE_S.
SILENCE_S, PROBE_S, PROBES = 30, 10, 3
REPLICAS_LOST = "replicas_lost"  # the code of an error: this request has cost several replicas, or was there

Json = Mapping[str, Any]


class ServiceFull(Exception):
    """Nobody has room for this row now."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the service is full for {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class ServiceGone(Exception):
    """The service does not answer, or says that it cannot serve; the row is not to blame."""


class RowFailed(Exception):
    """The service failed on this row. The message is its reason."""


class Service:
    """An OpenAI-compatible service; used as an async context manager, in one event loop."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        """`base_url` with or without /v1. Raises InvalidSetup when it is no HTTP URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSetup(f"--base-url {base_url}: write it as http://HOST:PORT")
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Service:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # As many connections as rows under way, and their number has its own bound.
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, connect=CONNECT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None, "entered before it is left"
        await self._session.close()

    async def models(self) -> frozenset[str]:
        """The names that this key may ask for. Raises ServiceGone, InvalidSetup when the key is not known."""
        status, _, body = await self._exchange("GET", "/v1/models", None)
        if status == HTTPStatus.UNAUTHORIZED:
            raise InvalidSetup(f"{self._root} does not take this API key: {_message(body)}")
        if status != HTTPStatus.OK:
            raise ServiceGone(f"/v1/models answers with {status}: {_message(body)}")
        return frozenset(str(model["id"]) for model in body.get("data", ()))

    async def ask(self, question: Question) -> Record:
        """The record of a row; one that the service refuses as it stands has the reason as its error.

        Raises:
            ServiceFull, ServiceGone: not now; the row can be asked again.
            RowFailed: it should not be asked again often.
            Failure: the API key is not known (any more).
        """
        status, headers, body = await self._exchange("POST", question.url, question.body)
        if status == HTTPStatus.OK:
            try:
                return _record(question, body)
            except (KeyError, TypeError, AttributeError):
                return question.failed(f"the answer is no completion: {json.dumps(body)[:200]}")
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServiceFull(_retry_after_s(headers))
        if status == HTTPStatus.UNAUTHORIZED:
            raise Failure(f"{self._root} does not take this API key any more: {_message(body)}; go on with --resume")
        if status == HTTPStatus.INTERNAL_SERVER_ERROR or _code(body) == REPLICAS_LOST:
            raise RowFailed(_message(body))
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServiceGone(f"it answers with {status}: {_message(body)}")
        return question.failed(_message(body))

    async def _exchange(self, method: str, url: str, body: Json | None) -> tuple[int, Mapping[str, str], Json]:
        """(status, headers, body) of an answer in the API's form. Raises ServiceGone for any other, and for none."""
        assert self._session is not None, "used between entering and leaving"
        try:
            async with self._session.request(method, self._root + url, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServiceGone(str(error) or type(error).__name__) from error
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or (response.status >= 400 and "message" not in _error(answer)):
            raise ServiceGone(f"it answers with {response.status} and no word of its own: {content[:100]!r}")
        return response.status, response.headers, answer


def _record(question: Question, body: Json) -> Record:
    choices, usage = body.get("choices") or [], body.get("usage") or {}
    if len(choices) != 1:
        return question.failed(f"the answer has {len(choices)} choices; a row has one: write a row for each")
    [choice] = choices
    return Record(
        row=question.number,
        id=question.row_id,
        text=choice["text"] if "text" in choice else _text(choice["message"]),
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
    )


def _text(message: Json) -> str:
    """What a turn says; of one that has no text (it calls a tool), all of it as JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(message, ensure_ascii=False)


def _error(body: Json) -> Json:
    error = body.get("error")
    return error if isinstance(error, dict) else {}


def _message(body: Json) -> str:
    return str(_error(body).get("message", ""))[:1000]


def _code(body: Json) -> object:
    return _error(body).get("code")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """What a refusal says: our milliseconds, else the standard's seconds, else a second."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        else:
            seconds = float(headers.get("Retry-After", "1"))
    except ValueError:  # the standard allows a date too
        seconds = 1.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _watched_socket(address: Any) -> socket.socket:
    """A socket whose peer is looked after by the kernel: a row may wait an hour without a byte."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENCE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # Linux has all three
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
