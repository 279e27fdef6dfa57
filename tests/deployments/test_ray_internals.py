"""What depends on Ray's private names: all of it in one file, and headers of any bytes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private import http_util

from deployments.ray_internals import headers_as_utf8, leave_request_ids_alone
from tests.api.odd_requests import exchange
from tests.deployments.conftest import Service

PROJECT = Path(__file__).parents[2]


def test_what_is_utf8_stays_as_it_is() -> None:
    plain = [(b"host", b"a"), (b"x-session-id", b"b")]
    assert headers_as_utf8(plain) is plain
    assert headers_as_utf8([(b"a", "é".encode()), (b"b", b"c")]) == [(b"a", "é".encode()), (b"b", b"c")]


def test_what_is_not_becomes_what_latin_1_makes_of_it() -> None:
    assert headers_as_utf8([(b"a", b"\xe9\xff"), (b"b", b"c")]) == [(b"a", "éÿ".encode()), (b"b", b"c")]


def test_the_service_answers_whatever_bytes_serves_own_headers_have(service: Service) -> None:
    for name in ("x-session-id", "x-request-id", "serve-multiplexed-model-id", "x-request-timeout-seconds"):
        for value in ("\xe9\xe8", "\xff" * 500):
            head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: {value}\r\n\r\n"
            [status] = exchange(service.url, head, stays=True)
            assert status == 200, (name, value[:5])


PRIVATE = re.compile(r"ray\S*\._private|import _get_|\b(handle|broadcast\(\w+\))\._(?!_)|super\(\)\._(?!_)")


def test_private_names_of_ray_are_in_one_file_and_in_the_start_of_a_cluster() -> None:
    sources = (PROJECT / "deployments").rglob("*.py")
    found = {path.relative_to(PROJECT).as_posix() for path in sources if PRIVATE.search(path.read_text())}
    assert found == {"deployments/ray_internals.py", "deployments/launcher/own_cluster.py"}


def test_serve_gives_no_id_beside_the_apis(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own middlewares around an application that gives one itself."""
    monkeypatch.setattr(http_util.RequestIdMiddleware, "__call__", http_util.RequestIdMiddleware.__call__)  # put back
    seen, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"mine")]})

    async def send(message: Any) -> None:
        sent.append(message)

    leave_request_ids_alone()
    asyncio.run(http_util._apply_middlewares(app, [])({"type": "http", "headers": []}, None, send))
    assert (seen, sent[0]["headers"]) == ([], [(b"x-request-id", b"mine")])
