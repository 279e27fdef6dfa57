"""Sends a message to its receiver in one request to a checked address, without redirects and with a time limit."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from app.errors import InvalidRequest
from app.webhooks.addresses import AddressPolicy, ForbiddenAddress, WebhookUrl, parse_url
from app.webhooks.receiver import WebhookReceiver
from app.webhooks.signature import SigningKey

# Returns the entries of `getaddrinfo` for a host and a port. Blocks.
LookUp = Callable[[str, int], Sequence[tuple[Any, ...]]]

TIMEOUT_S = 10.0  # of one attempt; Standard Webhooks asks receivers to answer before they do any work
_look_up_streams: LookUp = partial(socket.getaddrinfo, type=socket.SOCK_STREAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookMessage:
    """The message that reports the end of a batch."""

    id: str
    batch_id: str
    owner: str
    receiver: WebhookReceiver | None  # None for the default receiver in the settings
    event: str  # such as `batch.completed`
    ended_at: int  # when the batch ended, in seconds since 1970
    num_attempts: int = 0  # includes the current attempt

    def body(self) -> bytes:
        """Return the message in the format of OpenAI's events."""
        event = {
            "id": self.id,
            "object": "event",
            "created_at": self.ended_at,
            "type": self.event,
            "data": {"id": self.batch_id},
        }
        return json.dumps(event, separators=(",", ":")).encode()


class DeliveryFailed(Exception):
    """Raised if a message was probably not delivered. `is_final` means that another attempt would fail as well."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason  # reveals neither the URL nor the host's response
        self.is_final = is_final


class WebhookClient:
    """Sends messages. Only `deliver` requires a running event loop."""

    def __init__(
        self,
        allowed_networks: Iterable[str] = (),
        *,
        timeout_s: float = TIMEOUT_S,
        look_up: LookUp = _look_up_streams,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`allowed_networks` come from the settings. An attempt may take at most `timeout_s` seconds.

        `tls` verifies the host's certificate and name. The default context trusts the system's certificate authorities.
        """
        self.timeout_s = timeout_s
        self._gate = AddressPolicy(allowed_networks)
        self._operators_gate = AddressPolicy(allowed_networks, is_operators=True)
        self._tls = tls or ssl.create_default_context()
        self._look_up = look_up
        # These are enough threads for all attempts that start while the system waits for a name server, so that a name
        # server that is slow on purpose cannot delay other messages.
        num_look_up_threads = 64
        self._threads = ThreadPoolExecutor(num_look_up_threads, thread_name_prefix="webhook-names")

    def check(self, receiver: WebhookReceiver) -> None:
        """Raise InvalidRequest if the receiver's URL is certainly forbidden or its secret is invalid."""
        parse_url(receiver.url, self._gate)
        SigningKey.parse(receiver.secret)

    async def deliver(self, message: WebhookMessage, receiver: WebhookReceiver, now: float) -> None:
        """Send a message once, signed with the time `now` (in seconds since 1970). Raises DeliveryFailed."""
        gate = self._operators_gate if message.receiver is None else self._gate
        try:
            # Check again, because the allowed networks may have changed since the batch was created.
            url = parse_url(receiver.url, gate)
            key = SigningKey.parse(receiver.secret)
        except InvalidRequest as error:
            raise DeliveryFailed(error.message, is_final=True) from None
        body = message.body()
        headers = key.headers(message.id, int(now), body) | {
            "content-type": "application/json",
            "user-agent": "carousel-webhooks",
        }
        status = await self._status(url, gate, headers, body)
        if not 200 <= status < 300:
            raise DeliveryFailed(f"the receiver answered with {status}", is_final=status == HTTPStatus.GONE)

    async def _status(self, url: WebhookUrl, gate: AddressPolicy, headers: dict[str, str], body: bytes) -> int:
        try:
            async with (
                self._session(url, gate) as session,
                session.post(
                    URL(str(url), encoded=True), headers=headers, data=body, allow_redirects=False
                ) as response,
            ):
                return response.status  # closes the connection without reading the body
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {self.timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError:
            raise DeliveryFailed("the certificate is not valid for this host") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise DeliveryFailed(_reason(error)) from None

    def _session(self, url: WebhookUrl, gate: AddressPolicy) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=self._tls,
            resolver=_Names(self._look_up, self._threads),
            use_dns_cache=False,
            force_close=True,
            socket_factory=partial(gate.open_socket, url),
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # no proxy, which would look up the name again
        )

    def close(self) -> None:
        """Stop the threads without waiting for look-ups in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Names(AbstractResolver):
    """Looks up host names in the client's threads."""

    def __init__(self, look_up: LookUp, threads: ThreadPoolExecutor) -> None:
        self._look_up = look_up
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all stream addresses of a host. Raises OSError if the look-up fails."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, host, port)
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for family, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing, because the client owns the threads."""


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ForbiddenAddress):
            return "the host name resolves to an address that is not public"
        cause = getattr(cause, "os_error", None) or cause.__cause__
    return f"the connection failed ({type(error).__name__})"
