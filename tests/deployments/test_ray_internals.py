"""What depends on Ray's private names: all of it in one file, and headers of any bytes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from deployments.ray_internals import headers_as_utf8
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


def test_private_names_of_ray_are_in_one_file() -> None:
    sources = (PROJECT / "deployments").rglob("*.py")
    found = {path.relative_to(PROJECT).as_posix() for path in sources if PRIVATE.search(path.read_text())}
    assert found == {"deployments/ray_internals.py"}


@pytest.mark.parametrize(("headers", "expected"), [({}, "of-body"), ({"x-request-id": "of-header"}, "of-header")])
def test_an_answer_has_one_request_id_and_it_is_the_clients(
    service: Service, headers: dict[str, str], expected: str
) -> None:
    body = {"model": "held", "prompt": "Hi", "max_tokens": 1, "request_id": "of-body"}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.headers.get_list("x-request-id") == [expected]
    assert answer.json()["id"].startswith(f"cmpl-{expected}-")
