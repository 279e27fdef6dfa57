"""Streams: framing, chunks, usage, and what happens when something goes wrong in the middle or the client goes away."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.types import Message

from app.api.http.sse import HEARTBEAT, WhileConnected
from app.engine.request import FinishReason, Queued, Request, TokenDelta
from app.errors import DeadlineMissed, Overloaded, Quarantined, StepFailed, Unavailable
from app.text import Tokenizer
from tests.kit.service import (
    ADMIN_KEY,
    WAIT,
    Answer,
    Connection,
    Script,
    Service,
    Step,
    bearer,
    check_error,
    delta,
    entry,
    last,
    say,
)
from tests.waiting import until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def texts(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice, put together."""
    whole: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            part = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            whole[choice["index"]] = whole.get(choice["index"], "") + part
    return whole


def test_a_chat_stream_chunk_by_chunk(service: Service) -> None:
    answer = service.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert answer.is_complete
    chunks = answer.chunks
    assert {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", "demo")
    }
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "3"},
        {"content": " 4"},
        {"content": " 5"},
        {"content": "."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_a_completion_stream(service: Service) -> None:
    chunks = service.complete(stream=True).chunks
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert texts(chunks) == {0: "3 4 5."}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]


def test_asked_for_usage_comes_last_and_is_null_before(service: Service) -> None:
    *chunks, final = service.chat(stream=True, stream_options={"include_usage": True}).chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert final["choices"] == []
    assert final["usage"] == service.chat().json["usage"]


def test_running_usage_on_request(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, final = service.complete(stream=True, stream_options=options).chunks
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert final["usage"] == chunks[-1]["usage"]


@pytest.mark.parametrize("size", [1, 5])
def test_usage_of_a_chat_counts_from_the_first_text_on(tokenizer: Tokenizer, size: int) -> None:
    """The event that says the role has none of the tokens, however many came together."""
    tokens = tokenizer.encode("3 4 5 6 7", add_special_tokens=False)
    pieces = [tokens[at : at + size] for at in range(0, 5, size)]
    service = Service(tokenizer, lambda request: [*pieces, last(request, (4,), FinishReason.STOP)])
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, final = service.chat(stream=True, stream_options=options).chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, *range(size, 6, size), 6]
    assert all(
        chunk["usage"]["total_tokens"] - count == final["usage"]["prompt_tokens"]
        for chunk, count in zip(chunks, counts, strict=True)
    )
    assert final["usage"]["completion_tokens"] == 6


def test_stream_options_without_wishes_change_nothing(service: Service) -> None:
    for options in ({}, {"include_usage": None}, {"include_usage": False}):
        assert all("usage" not in chunk for chunk in service.chat(stream=True, stream_options=options).chunks)


@pytest.mark.parametrize("stop", [None, ["5 6"], ["7 8", "nope"]])
def test_streams_say_what_whole_responses_say(tokenizer: Tokenizer, stop: Any) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 é 😀 5 6 7"))
    whole = service.chat(stop=stop, n=2).json
    chunks = service.chat(stop=stop, n=2, stream=True, stream_options={"include_usage": True}).chunks
    assert texts(chunks) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]


def test_each_of_several_choices_has_its_role_and_its_end(service: Service) -> None:
    chunks = service.chat(stream=True, n=3).chunks
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert texts(chunks) == dict.fromkeys(range(3), "3 4 5.")


def test_choices_are_generated_at_the_same_time(tokenizer: Tokenizer) -> None:
    """The first prompt answers only after the second has begun to."""
    begun, names = asyncio.Event(), set()
    say_3 = say(tokenizer, "3")

    async def generate(request: Request) -> Any:
        task = asyncio.current_task()
        names.add(task and task.get_name())
        if request.request_id.endswith("-1"):
            begun.set()
        else:
            await begun.wait()
        for step in say_3(request):
            yield delta(request, step)

    service = Service(tokenizer, generate=generate)
    assert texts(service.complete(prompt=["a", "b"], stream=True).chunks) == {0: "3", 1: "3"}
    assert names == {"POST /v1/completions"}, "by which the monitor of the loop knows what holds it"


@pytest.mark.parametrize("name", ["demo", "\0", 'a"\0"'])
def test_awkward_text_and_names_are_written_as_json_writes_them(tokenizer: Tokenizer, name: str) -> None:
    text = 'a "quoted" \\ back\\slash\n\t\0 \x1f\x7f é\u2028'
    service = Service(tokenizer, say(tokenizer, text), names=(name,))
    answer = service.complete(stream=True, n=2, stream_options={"include_usage": True})
    assert texts(answer.chunks) == {0: text, 1: text}
    assert {chunk["model"] for chunk in answer.chunks} == {name}
    for written in answer.data[:-1]:
        as_json = json.dumps(json.loads(written), ensure_ascii=False, separators=(",", ":"))
        assert written == as_json.replace("\u2028", r"\u2028"), "where many clients would end the line"


# ---- errors


def refused(error: Exception) -> Script:
    return lambda request: [error]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_a_status_of_its_own(tokenizer: Tokenizer, stream: bool) -> None:
    service = Service(tokenizer, refused(Overloaded("64 requests are waiting; try again", retry_after_s=1.5)))
    answer = service.chat(stream=stream)
    assert answer.status == 429
    assert answer.error == {
        "message": "64 requests are waiting; try again",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")


@pytest.mark.parametrize("stream", [False, True])
def test_a_missed_deadline_is_a_408_that_is_not_to_be_tried_again(tokenizer: Tokenizer, stream: bool) -> None:
    answer = Service(tokenizer, refused(DeadlineMissed("the deadline of 1 s cannot be met"))).chat(stream=stream)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (408, "timeout_error", "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def test_a_quarantined_request_is_a_400_that_is_not_to_be_tried_again(tokenizer: Tokenizer) -> None:
    answer = Service(tokenizer, refused(Quarantined("not tried again", param="prompt", code="quarantined"))).chat()
    assert (answer.status, answer.error["code"]) == (400, "quarantined")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_the_place_in_the_queue_is_in_the_headers(tokenizer: Tokenizer, stream: bool) -> None:
    def script(request: Request) -> Iterable[Step]:
        first = TokenDelta(request.request_id, tokenizer.encode("3", add_special_tokens=False), queued=Queued(7, 1.25))
        return [first, last(request, (), FinishReason.LENGTH)]

    answer = Service(tokenizer, script).chat(stream=stream)
    assert answer.headers["x-carousel-queue-position"] == "7"
    assert answer.headers["x-carousel-estimated-wait-ms"] == "1250"


def failing(tokenizer: Tokenizer, error: Exception | TokenDeltaMaker) -> Script:
    """Says `3 4`, then fails."""

    def script(request: Request) -> list[Step]:
        ids = tokenizer.encode("3 4", add_special_tokens=False)
        return [*((token_id,) for token_id in ids), error if isinstance(error, Exception) else error(request)]

    return script


TokenDeltaMaker = Callable[[Request], Any]


def test_an_error_in_mid_stream_is_an_event_before_done(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, failing(tokenizer, Unavailable("the replica is gone")))
    answer = service.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.is_complete
    *chunks, error = answer.chunks
    assert texts(chunks) == {0: "3 4"}
    assert error == {
        "error": {"message": "the replica is gone", "type": "server_error", "param": None, "code": "unavailable"}
    }


def test_what_went_wrong_inside_stays_inside(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    for error in (RuntimeError("secret path /srv"), StepFailed("CUDA error: secret")):
        service = Service(tokenizer, failing(tokenizer, error))
        streamed = service.call("POST", "/v1/chat/completions", CHAT, {"x-request-id": "r-1"}).chunks[-1]["error"]
        whole = service.call("POST", "/v1/chat/completions", CHAT | {"stream": False}, {"x-request-id": "r-2"})
        assert whole.status == 500
        for shown, request_id in ((streamed, "r-1"), (whole.error, "r-2")):
            check_error(shown)
            assert "secret" not in shown["message"]
            assert request_id in shown["message"], "the log can be searched for it"
        assert [record.levelno for record in caplog.records if "secret" in record.getMessage()] == [logging.ERROR] * 2
        caplog.clear()


def test_an_abort_from_below_is_an_error_and_no_finish_reason(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, failing(tokenizer, lambda request: last(request, (), FinishReason.ABORT)))
    *chunks, error = service.chat(stream=True).chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error["error"]["code"] == "unavailable"
    assert service.chat().status == 503


def test_a_stream_that_just_ends_is_an_error(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4", reason=None))
    assert service.chat(stream=True).chunks[-1]["error"]["type"] == "server_error"
    assert service.chat().status == 500


def test_a_cancellation_from_below_is_an_error_too(tokenizer: Tokenizer) -> None:
    async def generate(request: Request) -> Any:
        yield delta(request, (20,))
        raise asyncio.CancelledError

    service = Service(tokenizer, generate=generate)
    for n in (1, 2):
        assert service.chat(n=n).status == 503
        assert service.chat(n=n, stream=True).chunks[-1]["error"]["code"] == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_choice_ends_all(tokenizer: Tokenizer, stream: bool) -> None:
    def script(request: Request) -> list[Step]:
        return [Unavailable("gone")] if request.request_id.endswith("-1") else [(20,), WAIT]

    service = Service(tokenizer, script)
    answer = service.chat(n=3, stream=stream)
    error = answer.chunks[-1]["error"] if answer.status == 200 else answer.error
    assert error["message"] == "gone"
    assert not service.generate.open


# ---- clients that go away


def begin_and_wait(request: Request) -> list[Step]:
    return [(20,), (21,), WAIT]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leave", [Connection.hang_up, Connection.cancel])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_generation(
    tokenizer: Tokenizer, stream: bool, leave: Callable[[Connection], None], n: int
) -> None:
    service = Service(tokenizer, begin_and_wait)

    body = CHAT | {"stream": stream, "n": n}
    async with Connection(service.app, "POST", "/v1/chat/completions", body, {}) as connection:
        await until(lambda: len(service.generate.open) == n)
        if stream:
            await until(lambda: len(connection.messages) > 2)
        leave(connection)
        await until(lambda: not service.generate.open)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_while_queued_ends_its_request(tokenizer: Tokenizer, stream: bool) -> None:
    service = Service(tokenizer, lambda request: [WAIT])

    async with Connection(service.app, "POST", "/v1/chat/completions", CHAT | {"stream": stream}, {}) as connection:
        await until(lambda: bool(service.generate.open))
        assert not connection.messages, "no header before the first token"
        connection.hang_up()
        await until(lambda: not service.generate.open)
        await connection.finished()


async def test_a_client_that_is_gone_before_the_headers_leaves_nothing_open(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, begin_and_wait)

    async with Connection(service.app, "POST", "/v1/chat/completions", CHAT, {}) as connection:
        connection.hang_up()
        await connection.finished()
        assert not service.generate.open


async def test_a_client_that_cannot_be_written_to_ends_its_generation(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, begin_and_wait)

    class BrokenPipe(Connection):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if len(self.messages) == 3:
                raise OSError("broken pipe")

    async with BrokenPipe(service.app, "POST", "/v1/chat/completions", CHAT, {}) as connection:
        await connection.finished()
        assert not service.generate.open


def test_a_server_that_reports_a_disconnect_after_the_last_message_cancels_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tokenizer, say(tokenizer, "Hi"))

    class HangsUpAtTheEnd(Connection):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if message.get("more_body") is False:
                self.hang_up()

    async def main() -> None:
        async with HangsUpAtTheEnd(service.app, "POST", "/v1/chat/completions", CHAT, {}) as connection:
            await connection.finished()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert re.search(r"finished after \d+\.\d{3} s: model", caplog.text)
    assert "closed the connection" not in caplog.text


async def test_events_leave_as_they_come(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, begin_and_wait)

    async with Connection(service.app, "POST", "/v1/completions", {"prompt": "a", "stream": True}, {}) as connection:
        await until(lambda: len(connection.messages) == 3)
        bodies = [message["body"] for message in connection.messages[1:]]
        assert [json.loads(body[6:])["choices"][0]["text"] for body in bodies] == ["0", "1"]


def num_comments(connection: Connection) -> int:
    return sum(message.get("body") == HEARTBEAT for message in connection.messages)


def heard(service: Service, listen: Callable[[Connection], Awaitable[None]]) -> Answer:
    """A stream to its end; its reader sees each message."""

    async def main() -> Answer:
        body = {"prompt": "Hi", "stream": True}
        async with Connection(service.app, "POST", "/v1/completions", body, {}) as connection:
            await listen(connection)
            return await connection.finished()

    return asyncio.run(main())


def test_a_stream_that_waits_long_in_a_queue_is_kept_open_by_comments(tokenizer: Tokenizer) -> None:
    may_begin, may_end = asyncio.Event(), asyncio.Event()

    async def slowly(request: Request) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(
            request.request_id, (), queued=Queued(3, 2.0, replica_id="r1", routing_reason="least_loaded: r1")
        )
        await may_begin.wait()
        yield TokenDelta(request.request_id, tuple(tokenizer.encode("3 4", add_special_tokens=False)))
        await may_end.wait()
        yield TokenDelta(request.request_id, (), finish_reason=FinishReason.LENGTH)

    async def listened(connection: Connection) -> None:
        await until(lambda: num_comments(connection) >= 3)
        may_begin.set()
        await until(lambda: b"3 4" in connection.messages[-1]["body"])
        await until(lambda: num_comments(connection) >= 4)
        may_end.set()

    answer = heard(Service(tokenizer, generate=slowly, heartbeat_s=0.1), listened)
    assert answer.status == 200
    assert answer.headers["x-carousel-replica"] == "r1"
    assert answer.headers["x-carousel-queue-position"] == "3"
    lines = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert lines[:3] == [": still here"] * 3
    assert lines.count(": still here") >= 4
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_an_error_after_a_long_wait_in_a_queue_is_an_event(tokenizer: Tokenizer) -> None:
    may_end = asyncio.Event()

    async def slowly(request: Request) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request.request_id, (), queued=Queued(3, 2.0))
        await may_end.wait()
        raise DeadlineMissed("too late")

    async def listened(connection: Connection) -> None:
        await until(lambda: num_comments(connection) >= 2)
        may_end.set()

    answer = heard(Service(tokenizer, generate=slowly, heartbeat_s=0.1), listened)
    lines = [line for line in answer.body.decode().split("\n\n") if line and not line.startswith(":")]
    assert answer.status == 200
    assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert lines[1:] == ["data: [DONE]"]


def test_an_error_in_a_queue_before_any_comment_has_its_own_status(tokenizer: Tokenizer) -> None:
    async def refused(request: Request) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request.request_id, (), queued=Queued(3, 2.0))
        raise DeadlineMissed("too late")

    service = Service(tokenizer, generate=refused)
    assert service.complete(stream=True).status == 408


def test_why_a_request_went_where_it_did_is_told_when_asked(tokenizer: Tokenizer) -> None:
    async def placed(request: Request) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request.request_id, (), queued=Queued(0, 0.0, "r1", "least_loaded: r1", "r1 (9); r2 (11)"))
        yield TokenDelta(request.request_id, (5,), finish_reason=FinishReason.LENGTH)

    def told(service: Service, explain: str, headers: dict[str, str]) -> str | None:
        body = {"prompt": "x", "stream": True}
        answer = service.call("POST", "/v1/completions", body, {"x-carousel-explain": explain, **headers})
        assert answer.headers["x-carousel-replica"] == "r1"
        return answer.headers.get("x-carousel-why")

    open_service = Service(tokenizer, generate=placed)
    everything = "least_loaded: r1: r1 (9); r2 (11)"
    for explain, why in (("1", everything), ("true", everything), ("0", None), ("", None)):
        assert told(open_service, explain, {}) == why
    with_keys = Service(tokenizer, generate=placed, keys=[entry(), entry(ADMIN_KEY, "root", admin=True)])
    assert told(with_keys, "1", bearer()) == "least_loaded: r1", "the loads of others are for admins"
    assert told(with_keys, "1", bearer(ADMIN_KEY)) == everything


def test_groups_and_sessions_come_from_their_headers(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"))
    body = {"prompt": "x", "n": 2}
    headers = {"x-carousel-group": "new", "x-carousel-preset": "batch", "x-carousel-session": "s" * 256}
    assert service.call("POST", "/v1/completions", body, headers).status == 200
    assert {(each.group, each.preset, each.session) for each in service.generate.requests} == {
        ("new", "batch", "s" * 256)
    }
    assert not any(each.no_queue for each in service.generate.requests)
    service.call("POST", "/v1/completions", {"prompt": "x"}, {"x-carousel-no-queue": "1"})
    assert service.generate.requests[-1].no_queue
    headers["x-carousel-session"] += "s"
    refused = service.call("POST", "/v1/completions", body, headers)
    assert (refused.status, refused.error["param"]) == (400, "x-carousel-session")


def test_a_connection_that_is_watched_is_freed_at_its_end_and_not_by_the_garbage_collector() -> None:
    """It holds all of its request. Otherwise the collector takes a fifth of what a short request costs."""

    async def main() -> weakref.ref[WhileConnected]:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("nothing comes")

        connected = WhileConnected(receive)
        async with connected:
            await asyncio.sleep(0)
        return weakref.ref(connected)

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
