"""A remote service over HTTP as the executor of a run: an item in, its response out.

A response with an error object of the API's form comes from the service itself. Anything else with an error status
means that the service is not there: a proxy in front of an application that has not started has neither its routes nor
its form.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType, TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.errors import Failure, InvalidSetup
from app.jobs.executors import RequestClient, ServiceFull, ServiceGone
from app.jobs.job import LOWEST_CLASS, Answered, Item, ItemOrigin, Json
from app.jobs.outputs import error_message

CONNECT_S = 10.0
ANSWER_S = 3600.0  # an item may wait as long for idle slots, then it is sent again
MAX_RETRY_AFTER_S = 120.0
# A machine that vanishes without a word is noticed after SILENCE_S + PROBES * PROBE_S.
SILENCE_S, PROBE_S, PROBES = 30, 10, 3
REPLICAS_LOST = "replicas_lost"  # the code of an error: several replicas were lost while they computed this request


class HttpClient(RequestClient):
    """An OpenAI-compatible service; used as an async context manager, in one event loop."""

    def __init__(self, base_url: str, api_key: str | None, *, model: str | None = None, job_id: str = "job") -> None:
        """`base_url` with or without /v1; `model` is for items that name none; `job_id` begins the ids of requests.

        Raises InvalidSetup for another URL.
        """
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSetup(f"--base-url {base_url}: write it as http://HOST:PORT")
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._defaults: Json = {} if model is None else {"model": model}
        self._job_id = job_id
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # As many connections as items under way, and their number has its own bound.
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
            raise InvalidSetup(f"{self._root} does not take this API key: {error_message(body)}")
        if status != HTTPStatus.OK:
            raise ServiceGone(f"/v1/models answers with {status}: {error_message(body)}")
        return frozenset(str(model["id"]) for model in body.get("data", ()))

    async def answer(self, item: Item) -> Answered:
        """An item that the service refuses as it stands is answered with the refusal."""
        content = {**self._defaults, **item.body, **LOWEST_CLASS}
        origin = ItemOrigin(self._job_id, item.number)
        status, headers, body = await self._exchange("POST", item.url, content, {"x-request-id": origin.request_id})
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServiceFull(_retry_after_s(headers))
        if status == HTTPStatus.UNAUTHORIZED:
            message = error_message(body)
            raise Failure(f"{self._root} does not take this API key any more: {message}; go on with --resume")
        has_failed = status == HTTPStatus.INTERNAL_SERVER_ERROR or _error(body).get("code") == REPLICAS_LOST
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and not has_failed:
            raise ServiceGone(f"it answers with {status}: {error_message(body)}")
        return Answered(status, body)

    async def _exchange(
        self, method: str, url: str, body: Json | None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, Mapping[str, str], Json]:
        """(status, headers, body) of an answer in the API's form. Raises ServiceGone for any other, and for none."""
        assert self._session is not None, "used between entering and leaving"
        try:
            async with self._session.request(method, self._root + url, json=body, headers=headers) as response:
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


def _error(body: Json) -> Json:
    error = body.get("error")
    return error if isinstance(error, dict) else {}


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
    """A socket with keep-alive probes: an item may wait an hour without a byte."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENCE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # Linux has all three
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
