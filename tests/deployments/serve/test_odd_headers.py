"""Headers of any bytes in the form that Serve can read."""

from __future__ import annotations

from deployments.serve.odd_headers import readable
from tests.api.odd_requests import exchange
from tests.deployments.conftest import Service


def test_what_is_utf8_stays_as_it_is() -> None:
    plain = [(b"host", b"a"), (b"x-session-id", b"b")]
    assert readable(plain) is plain
    assert readable([(b"a", "é".encode()), (b"b", b"c")]) == [(b"a", "é".encode()), (b"b", b"c")]


def test_what_is_not_becomes_what_latin_1_makes_of_it() -> None:
    assert readable([(b"a", b"\xe9\xff"), (b"b", b"c")]) == [(b"a", "éÿ".encode()), (b"b", b"c")]


def test_the_service_answers_whatever_bytes_serves_own_headers_have(service: Service) -> None:
    for name in ("x-session-id", "x-request-id", "serve-multiplexed-model-id", "x-request-timeout-seconds"):
        for value in ("\xe9\xe8", "\xff" * 500):
            head = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{name}: {value}\r\n\r\n"
            [status] = exchange(service.url, head)
            assert status in (200, 400), (name, value[:5])
