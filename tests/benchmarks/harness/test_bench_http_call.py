"""The raw client against bytes as they may come: in any pieces, in any framing, or cut off."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from benchmarks.harness.answer import Answer, ask
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from tests.waiting import PATIENCE_S

EVENTS = (
    b": ping\n\n",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\ndata: {"choices":[{"delta":{"content":"c"}}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
)
ERROR = b'{"error":{"message":"gone","type":"server_error","code":"unavailable"}}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Carousel-Replica: r1\r\n"


def piece(text: str, finish_reason: str | None = None, index: int = 0) -> bytes:
    chunk = {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}
    return b"data: %s\n\n" % json.dumps(chunk).encode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def answer_to(*pieces: bytes, keeps_open: bool = False, timeout_s: float = PATIENCE_S) -> Answer:
    """What the client makes of these pieces, each sent by itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the client leaves when it has seen the end
            await send(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        served.set()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        await reader.readexactly(2)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if keeps_open:
            await reader.read()

    async def main() -> Answer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            target = Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            answer = await ask(target, target.request("completions", b"{}"), timeout_s=timeout_s)
            await served.wait()
            return answer

    served = asyncio.Event()
    return asyncio.run(main())


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(size: int, line_end: bytes) -> None:
    events = [event.replace(b"\n", line_end) for event in EVENTS]
    whole = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*events)
    answer = answer_to(*(whole[at : at + size] for at in range(0, len(whole), size)), keeps_open=True)
    assert answer.has_succeeded
    assert answer.headers["x-carousel-replica"] == "r1"
    assert (answer.num_pieces, answer.num_tokens) == (3, 7)
    assert 1 <= len(answer.delivered_s) <= 3


def test_pieces_that_come_together_are_one_delivery() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = answer_to(head, *(chunked(event)[: -len(b"0\r\n\r\n")] for event in EVENTS), b"0\r\n\r\n")
    assert len(answer.delivered_s) == 2
    assert len(answer.gaps_s) == 1
    assert answer.gaps_s[0] > 0


def test_a_body_may_end_with_a_length_or_with_its_connection() -> None:
    body = b"".join(EVENTS)
    assert answer_to(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, keeps_open=True).has_succeeded
    assert answer_to(HEAD + b"\r\n" + body).has_succeeded


def test_a_whole_answer_is_complete_with_all_its_choices() -> None:
    sent = piece("a"), piece("x", index=1), piece("b", "stop"), piece("y", "length", 1), EVENTS[-2], EVENTS[-1]
    answer = answer_to(HEAD + b"\r\n", *sent)
    assert answer.said == ([(0, "ab"), (1, "xy")], [(0, "stop"), (1, "length")], 7)
    assert (answer.is_complete, answer.is_well_formed, answer.outcome) == (True, True, "completed")
    assert len(answer.events_s) == 4


@pytest.mark.parametrize(
    ("pieces", "is_well_formed", "outcome"),
    [
        ((), False, "no connection"),
        ((b"HTTP/1.1 200 OK\r\n",), False, "no connection"),
        ((b"SSH-2.0-OpenSSH_9\r\n\r\n",), False, "no connection"),
        ((b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\nContent-Length: 2\r\n\r\n{}",), False, "status 429"),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n", ERROR), True, "status 503"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(*EVENTS[:3])[:-9]), False, "cut off: CutOff"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(*EVENTS[:3])), False, "malformed"),
        ((HEAD + b"\r\n", *EVENTS[:4], b"data: %s\n\n" % ERROR, EVENTS[-1]), True, "error event: unavailable"),
        ((HEAD + b"\r\n", *EVENTS[:4], b"data: %s\n\n" % ERROR), False, "error event: unavailable"),
        ((HEAD + b"\r\n", piece("a", "stop"), piece("", "stop"), *EVENTS[-2:]), False, "malformed"),
        ((HEAD + b"\r\n", piece("a", "stop"), *EVENTS[-2:], piece("b")), False, "malformed"),
        ((HEAD + b"\r\n", *EVENTS[-2:]), True, "no text"),
    ],
)
def test_an_answer_that_is_not_whole_is_told_apart_from_one_that_is_broken(
    pieces: tuple[bytes, ...], is_well_formed: bool, outcome: str
) -> None:
    answer = answer_to(*pieces)
    assert (answer.is_well_formed, answer.outcome) == (is_well_formed, outcome)
    assert not answer.has_succeeded or outcome == "malformed"


def test_a_request_times_out_and_without_a_server_there_is_no_connection() -> None:
    answer = answer_to(HEAD + b"\r\n", EVENTS[2], keeps_open=True, timeout_s=0.1)
    assert answer.outcome == "timeout"
    assert answer.ended_s - answer.begun_s >= 0.1
    assert asyncio.run(ask(Target.parse("http://127.0.0.1:9"), b"", timeout_s=PATIENCE_S)).outcome == "no connection"


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "/v1"),
        ("http://host/v1/", "host", 80, "/v1"),
        ("https://host/gateway", "host", 443, "/gateway/v1"),
    ],
)
def test_a_base_url_may_have_the_version_or_not(url: str, host: str, port: int, path: str) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BenchmarkError, match="--base-url"):
        Target.parse(url)
