"""Clients that are to be killed: the requests that they send."""

from __future__ import annotations

import json

from benchmarks.chaos.doomed import requests_to
from benchmarks.harness.http_call import Target


def test_the_long_request_asks_the_same_and_is_larger_than_a_buffer_of_the_proxy() -> None:
    requests = requests_to(Target.parse("http://127.0.0.1:8000"), "chaos", 3)
    for request, streams in ((requests.stream, True), (requests.whole, None), (requests.long, None)):
        head, _, body = request.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
        assert b"Connection: keep-alive" in head
        asked = json.loads(body)
        assert (asked["seed"], asked.get("stream")) == (3, streams)
    assert len(requests.long) > 16 * 1024 > len(requests.whole)
