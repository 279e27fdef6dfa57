"""Receivers of webhooks for tests: real sockets that note each connection and answer as they are told."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.webhooks.client import WebhookMessage
from app.webhooks.dispatcher import RetrySchedule
from app.webhooks.receiver import WebhookReceiver
from tests.waiting import until

SECRET = "whsec_Y2FuYXJ5LWNhbmFyeS1jYW5hcnktY2FuYXJ5"  # the base64 of some canaries
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def status(code: int, *headers: str) -> bytes:
    """An answer without a body."""
    return "\r\n".join([f"HTTP/1.1 {code} X", "Content-Length: 0", *headers, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    line: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Listens on a port of its own. `answers(n)` says what the n-th request (from 0) gets; None: nothing, ever."""

    def __init__(
        self,
        answers: Callable[[int], bytes | None] = lambda n: OK,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answers = answers
        self.received: list[Received] = []
        self.num_connections = 0
        self._host = host
        self._port = port
        self._tls = tls
        self._connections: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://{self._host}:{self.port}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._connections:
            writer.close()
        await self._server.wait_closed()

    async def got(self, number: int) -> list[Received]:
        """The requests, once there are so many."""
        return await until(lambda: self.received, lambda received: len(received) >= number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._connections.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
            answer = self.answers(len(self.received))
            self.received.append(Received(head[0], headers, body))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            self._connections.discard(writer)
            writer.close()


LOCAL = ("127.0.0.0/8",)  # the networks of these receivers
QUICKLY = RetrySchedule(first_pause_s=0.01, max_pause_s=0.05)


def message(event: str = "batch.completed") -> WebhookMessage:
    receiver = at("https://named.example/")  # by a batch; it is sent to what a test says
    return WebhookMessage(id="evt_1", batch_id="batch_1", owner="", receiver=receiver, event=event, ended_at=5)


def at(url: str) -> WebhookReceiver:
    """The receiver with this URL."""
    return WebhookReceiver(url=url, secret=SECRET)


class Connects:
    """The addresses that this process connects to, as Python's audit hooks see them: below every library."""

    def __init__(self) -> None:
        self.addresses: list[Any] = []

    def __enter__(self) -> Connects:
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)


_watching: list[Connects] = []


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        for each in _watching:
            each.addresses.append(arguments[1])


sys.addaudithook(_heard)  # for good: there is no way to take it back


def names(*addresses: str) -> Callable[[str, int], list[tuple[Any, ...]]]:
    """A look-up by which every name has these addresses."""

    def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
        return [each for address in addresses for each in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]

    return look_up
