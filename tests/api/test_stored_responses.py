"""Responses that are kept: by their ids, in the background, gone on with, and over the death of what generates them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from msgspec import structs

from app.api.http.sse import HEARTBEAT
from app.api.prepared_request import RequestLimits
from app.api.stored_answers import StoredEvents
from app.batches import AnswerEnd, AnswerPart, BatchLimits
from app.engine.request import Queued, Request, TokenDelta, TokenLogprobs
from app.errors import Overloaded, Unavailable
from app.jobs.catalog import Catalog
from app.jobs.local_service import LocalBatchService
from app.records import RecordReader, record
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.engine import FakeClock
from tests.kit.service import CALL, Answer, Connection, Service, bearer, delta, entry, openai_client, say, served
from tests.waiting import until

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
STREAM = {"stream": True, "store": True, "background": True}


class Gated:
    """A script that gives one step for each place of `places`."""

    def __init__(self, tokenizer: Tokenizer, text: str = "3 4 5.", *, at_once: int = 1) -> None:
        self.script = say(tokenizer, text)
        self.places = asyncio.Semaphore(0)
        self.requests: list[Request] = []
        self.refusals: list[Exception] = []
        self.num_open = 0
        self._at_once = at_once

    def open(self) -> None:
        """Let everything through."""
        for _ in range(10_000):
            self.places.release()

    async def __call__(self, request: Request) -> AsyncIterator[TokenDelta]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.requests.append(request)
        self.num_open += 1
        try:
            for step in _merged(list(self.script(request)), self._at_once):
                await self.places.acquire()
                yield (
                    _likely(request, step)
                    if request.sampling.logprobs and isinstance(step, tuple)
                    else delta(request, step)
                )
        finally:
            self.num_open -= 1


def _likely(request: Request, step: tuple[int, ...]) -> TokenDelta:
    """The tokens with log-probabilities, which depend on the token alone."""
    told = [TokenLogprobs(-token / 7, 1, (token, token + 1), (-token / 7, float("-inf"))) for token in step]
    return structs.replace(delta(request, step), logprobs=tuple(told))


def _merged(steps: Sequence[Any], at_once: int) -> Iterator[Any]:
    """Several tokens in a step, as a busy process gets them."""
    for at in range(0, len(steps), at_once):
        some = steps[at : at + at_once]
        if all(isinstance(step, tuple) for step in some):
            yield tuple(token for step in some for token in step)
        else:
            yield from some


def kept_by(tokenizer: Tokenizer, gate: Gated, **options: Any) -> Service:
    """A service whose model is this script."""
    return Service(tokenizer, generate=gate, tool_format=FORMATS["hermes"], max_model_len=2000, **options)


async def ask(app: Any, method: str, path: str, body: Any = None, query: str = "", key: str = "") -> Answer:
    async with Connection(app, method, path, body, bearer(key) if key else {}, query, begins_work=True) as connection:
        return await connection.finished()


async def begin(app: Any, key: str = "", **fields: Any) -> dict[str, Any]:
    """A response that is kept, as it is when the call has been answered."""
    answer = await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True} | fields, key=key)
    assert answer.status == 200, answer.json
    return dict(answer.json)


async def ended(app: Any, response_id: str) -> dict[str, Any]:
    async def look() -> dict[str, Any]:
        return dict((await ask(app, "GET", f"/v1/responses/{response_id}")).json)

    return await until(look, lambda response: response["status"] not in ("queued", "in_progress"))


async def events_of(app: Any, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "stream=true" + ("" if after is None else f"&starting_after={after}")
    return (await ask(app, "GET", f"/v1/responses/{response_id}", query=query)).events


async def test_it_is_there_by_its_id_until_it_is_deleted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response = await begin(app, metadata={"a": "b"})
        assert (response["status"], response["store"], response["background"]) == ("completed", True, False)
        assert response["output"][0]["content"][0]["text"] == "3 4 5."
        path = f"/v1/responses/{response['id']}"
        assert (await ask(app, "GET", path)).json == response
        assert (await ask(app, "DELETE", path)).json == {"id": response["id"], "object": "response", "deleted": True}
        for method, of_it in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
            gone = await ask(app, method, path + of_it, {} if method == "POST" else None)
            assert (gone.status, gone.error["code"]) == (404, "response_not_found")


async def test_the_conversation_goes_on_behind_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        first = await begin(app, input="one", instructions="only of this one")
        second = await begin(app, input="two", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        third = await begin(
            app, input=[{"role": "user", "content": "three"}], previous_response_id=second["id"], store=False
        )
        turns = ["one", "3 4 5.", "two", "3 4 5.", "three"]
        chat = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        assert gate.requests[-1].prompt_token_ids == tokenizer.encode_chat(chat)
        assert (await ask(app, "GET", f"/v1/responses/{third['id']}")).status == 404, "it was not to be kept"

        async def items(query: str) -> Any:
            return (await ask(app, "GET", f"/v1/responses/{second['id']}/input_items", query=query)).json

        listed = await items("order=asc")
        assert [item["content"][0]["text"] for item in listed["data"]] == turns[:3]
        assert [item["content"][0]["type"] for item in listed["data"]] == ["input_text", "output_text", "input_text"]
        assert [item["id"] for item in (await items(""))["data"]] == [item["id"] for item in listed["data"]][::-1]
        behind = await items(f"order=asc&limit=1&after={listed['first_id']}")
        assert (behind["data"], behind["has_more"]) == (listed["data"][1:2], True)


async def test_a_background_response_is_answered_before_it_is_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        assert (begun["status"], begun["output"], begun["usage"]) == ("queued", [], None)
        gate.places.release()

        async def look() -> Any:
            return (await ask(app, "GET", f"/v1/responses/{begun['id']}")).json

        now = await until(look, lambda response: response["status"] == "in_progress")
        refused = await ask(app, "POST", "/v1/responses", {"input": "x", "previous_response_id": begun["id"]})
        assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
        gate.open()
        response = await ended(app, begun["id"])
        assert response["output"][0]["content"][0]["text"] == "3 4 5."
        assert response["output"][0]["id"] == now["output"][0]["id"]


async def test_its_client_may_go_and_read_on_elsewhere(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        body = {"input": "Hi", "stream": True, "store": True}
        async with Connection(app, "POST", "/v1/responses", body, {}, begins_work=True) as connection:
            gate.places.release()
            await until(lambda: b"output_text.delta" in b"".join(m.get("body", b"") for m in connection.messages))
            connection.hang_up()
            await connection.finished()
            read = connection.answer().events
        assert gate.num_open == 1, "it goes on"
        response_id, last = read[0]["response"]["id"], read[-1]["sequence_number"]
        following = asyncio.create_task(events_of(app, response_id, last))
        gate.open()
        events = read + await following
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event.get("delta", "") for event in events) == "3 4 5."
        assert events[-1]["response"] == (await ask(app, "GET", f"/v1/responses/{response_id}")).json
        assert await events_of(app, response_id) == events, "also when it has ended"
        assert await events_of(app, response_id, len(events) - 2) == events[-1:]


@pytest.mark.parametrize("stream", [True, False])
async def test_its_client_waits_for_the_process_that_follows(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate, process, clock = Gated(tokenizer), DyingProcess(), FakeClock()
    monkeypatch.setattr("app.api.endpoints.stored_responses._RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr("app.api.endpoints.stored_responses._OPENING_S", 0.0)
    monkeypatch.setattr("app.api.endpoints.stored_responses.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(LocalBatchService, "follow_response", process.follow)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        answering = asyncio.create_task(
            ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True} | {"stream": stream})
        )
        await until(lambda: gate.num_open)
        process.is_dead = True
        clock.advance(180.0)  # an answer may be silent for longer than a new process is waited for
        gate.places.release()  # the next part of the answer finds that the process is dead
        await until(lambda: process.num_refused >= 3 or answering.done())
        gate.open()  # the rest of the answer is there when the next process answers
        assert not answering.done()
        [file] = (tmp_path / "responses").iterdir()
        refused = await ask(app, "GET", f"/v1/responses/{file.name}")
        assert refused.status == 503, "a client that does not wait hears of it at once"
        process.is_dead = False
        answer = await answering
    response = answer.events[-1]["response"] if stream else answer.json
    assert response["output"][0]["content"][0]["text"] == "3 4 5."


async def test_it_does_not_wait_for_ever(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, process = Gated(tokenizer), DyingProcess(is_dead=True)
    monkeypatch.setattr("app.api.endpoints.stored_responses._RESTART_TIMEOUT_S", 0.0)
    monkeypatch.setattr(LocalBatchService, "follow_response", process.follow)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        answer = await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True})
    assert answer.status == 503
    assert process.num_refused <= 2


async def test_a_reader_that_leaves_while_the_process_is_gone_is_waited_for_no_longer(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, process = Gated(tokenizer), DyingProcess()
    gate.open()
    monkeypatch.setattr("app.api.endpoints.stored_responses._RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(LocalBatchService, "follow_response", process.follow)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response_id = (await ask(app, "POST", "/v1/responses", {"input": "Hi"} | STREAM)).events[0]["response"]["id"]
        process.is_dead = True
        path = f"/v1/responses/{response_id}"
        async with Connection(app, "GET", path, None, {}, "stream=true", begins_work=True) as connection:
            await until(lambda: process.num_refused)
            connection.hang_up()
            await connection.finished()
        num_refused = process.num_refused
        await asyncio.sleep(0.005)
        assert process.num_refused == num_refused


class DyingProcess:
    """The process of batches, which may be gone for a while."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.num_refused = 0

    @property
    def follow(self) -> Callable[..., AsyncIterator[AnswerPart]]:
        """The method of the service."""
        original = LocalBatchService.follow_response

        async def follow(service: LocalBatchService, *arguments: Any, **options: Any) -> AsyncIterator[AnswerPart]:
            self._check()
            async with aclosing(original(service, *arguments, **options)) as parts:
                async for part in parts:
                    self._check()
                    yield part

        return follow

    def _check(self) -> None:
        if self.is_dead:
            self.num_refused += 1
            raise Unavailable("the process is gone")


async def test_the_openai_package_reads_on_after_a_break(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app, openai_client(app) as client:
        events = [each async for each in await client.responses.create(model="demo", input="Hi", **STREAM)]
        response = events[0].response
        rest = [each async for each in await client.responses.retrieve(response.id, stream=True, starting_after=2)]
        assert rest == events[3:]
        assert await client.responses.retrieve(response.id) == events[-1].response
        items = await client.responses.input_items.list(response.id)
        assert [item.type for item in items.data] == ["message"]
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_it_ends_where_it_is_cancelled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        for _ in range(2):
            gate.places.release()
        path = f"/v1/responses/{begun['id']}"
        await until(lambda: gate.places.locked())
        cancelled = (await ask(app, "POST", path + "/cancel", {})).json
        assert (cancelled["status"], gate.num_open) == ("cancelled", 0)
        assert {item["status"] for item in cancelled["output"]} <= {"incomplete"}
        assert (await ask(app, "POST", path + "/cancel", {})).json == cancelled, "twice is once"
        assert (await ask(app, "GET", path)).json == cancelled
        gate.open()
        other = await begin(app)
        refused = await ask(app, "POST", f"/v1/responses/{other['id']}/cancel", {})
        assert (refused.status, "is completed" in refused.error["message"]) == (400, True)


async def test_one_that_is_deleted_while_it_runs_runs_no_more(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        await until(lambda: gate.num_open)
        assert (await ask(app, "DELETE", f"/v1/responses/{begun['id']}")).json["deleted"]
        assert gate.num_open == 0
        assert (await ask(app, "GET", f"/v1/responses/{begun['id']}")).status == 404


async def test_in_the_background_it_waits_for_room(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    gate.refusals = [Overloaded("full", retry_after_s=0.01), Overloaded("full", retry_after_s=0.01)]
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        assert (await ended(app, begun["id"]))["status"] == "completed"
        assert gate.refusals == []


@pytest.mark.parametrize("stream", [False, True])
async def test_its_client_gets_the_refusal_where_it_waits(tokenizer: Tokenizer, tmp_path: Path, stream: bool) -> None:
    gate = Gated(tokenizer)
    gate.refusals = [Overloaded("full", retry_after_s=7)]
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        refused = await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True, "stream": stream})
        assert (refused.status, refused.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_refusal_behind_the_first_comment_is_an_event(tokenizer: Tokenizer, tmp_path: Path, path: str) -> None:
    refuses = asyncio.Event()

    async def refuse(request: Request) -> AsyncIterator[TokenDelta]:
        await refuses.wait()
        raise Overloaded("full", retry_after_s=7)
        yield  # a generator

    limits = RequestLimits(heartbeat_s=0.001)
    async with served(Service(tokenizer, generate=refuse), tmp_path, limits=limits) as app:
        body = {"store": True, "stream": True}
        body |= {"input": "Hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Hi"}]}
        async with Connection(app, "POST", path, body, {}, begins_work=True) as connection:
            await until(lambda: any(HEARTBEAT in message.get("body", b"") for message in connection.messages))
            refuses.set()
            answer = await connection.finished()
    assert answer.status == 200
    *_, last = (line for line in answer.body.splitlines() if line.startswith(b"data: {"))
    event = json.loads(last.removeprefix(b"data: "))
    assert (event.get("response") or event)["error"]["message"] == "full"


async def test_another_key_has_no_part_in_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    alice, bob = "alice-0123456789abcdef0123456789", "bob-0123456789abcdef0123456789"
    gate = Gated(tokenizer)
    gate.open()
    keys = [entry(alice, "alice"), entry(bob, "bob")]
    async with served(kept_by(tokenizer, gate), tmp_path, keys=keys) as app:
        response = await begin(app, key=alice, **STREAM | {"stream": False})
        path = f"/v1/responses/{response['id']}"
        for method, of_it in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
            other = await ask(app, method, path + of_it, {} if method == "POST" else None, key=bob)
            assert (other.status, other.error["code"]) == (404, "response_not_found")
        for store in (False, True):
            body = {"input": "x", "previous_response_id": response["id"], "store": store}
            refused = await ask(app, "POST", "/v1/responses", body, key=bob)
            assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
        assert (await ask(app, "GET", path, key=alice)).status == 200


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("stream=true&starting_after=99", "starting_after is 99"),
        ("stream=true&starting_after=-1", "should be the sequence_number"),
        ("stream=true&starting_after=x", "should be the sequence_number"),
        ("starting_after=1", "send stream=true"),
    ],
)
async def test_a_place_that_there_is_not(tokenizer: Tokenizer, tmp_path: Path, query: str, words: str) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        body = {"input": "Hi"} | STREAM
        events = (await ask(app, "POST", "/v1/responses", body)).events
        refused = await ask(app, "GET", f"/v1/responses/{events[0]['response']['id']}", query=query)
        assert (refused.status, words in refused.error["message"]) == (400, True), refused.json


async def test_ids_of_clients_are_no_names_of_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        headers = {"x-request-id": "../../../x"}
        async with Connection(
            app, "POST", "/v1/responses", {"input": "Hi"} | STREAM, headers, begins_work=True
        ) as call:
            response_id = (await call.finished()).events[0]["response"]["id"]
        assert (tmp_path / "responses" / response_id).is_file()
        assert response_id.removeprefix("resp_").isalnum()


async def test_events_are_of_those_that_were_streamed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response = await begin(app)
        refused = await ask(app, "GET", f"/v1/responses/{response['id']}", query="stream=true")
        assert (refused.status, "stream: true" in refused.error["message"]) == (400, True)


@pytest.mark.parametrize(
    "fields", [{"store": True}, {"previous_response_id": "resp_1"}, {"store": True, "background": True}]
)
def test_a_service_that_keeps_nothing_says_so(service: Service, fields: dict[str, Any]) -> None:
    refused = service.call("POST", "/v1/responses", {"input": "Hi"} | fields)
    assert (refused.status, refused.error["param"]) == (400, next(iter(fields)))
    assert "`batches` in its config" in refused.error["message"]


async def test_a_mistake_is_refused_and_nothing_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        for fields, param in (
            ({"background": True, "store": False}, "background"),
            ({"store": True, "temperature": 9}, "temperature"),
            ({"store": "perhaps"}, "store"),
            ({"store": True, "max_output_tokens": 10**6}, "max_output_tokens"),
        ):
            refused = await ask(app, "POST", "/v1/responses", {"input": "Hi"} | fields)
            assert (refused.status, refused.error["param"]) == (400, param)
        for store in (False, True):
            body = {"input": "Hi", "previous_response_id": "resp_none", "store": store}
            unknown = await ask(app, "POST", "/v1/responses", body)
            assert (unknown.status, unknown.error["code"]) == (400, "previous_response_not_found")
    assert not list((tmp_path / "responses").iterdir())


@pytest.mark.parametrize("at_once", [1, 3])
async def test_it_goes_on_wherever_its_process_dies(tools_tokenizer: Tokenizer, tmp_path: Path, at_once: int) -> None:
    # The folder as it is before the last step, with the events cut off at any byte.
    tokenizer, text = tools_tokenizer, "Let me see.\n" + CALL
    gate, before = Gated(tokenizer, text), tmp_path / "before"
    fields = {"input": "Hi", "tools": [TOOL], "temperature": 1.0} | STREAM
    num_steps = len(tokenizer.encode(text, add_special_tokens=False)) + 1
    async with served(kept_by(tokenizer, gate), tmp_path / "whole") as app:
        answering = asyncio.create_task(ask(app, "POST", "/v1/responses", fields))
        log = await copied_before_the_end(gate, answering, num_steps, tmp_path / "whole", before)
        gate.open()
        whole = (await answering).events
    assert "function_call" in {item["type"] for item in whole[-1]["response"]["output"]}
    for folder, kept, num_known in cut_anywhere(before, log.name):
        again = Gated(tokenizer, text, at_once=at_once)
        again.open()
        async with served(kept_by(tokenizer, again), folder) as app:
            response = await ended(app, log.name)
            assert response["status"] == "completed", (kept, response["error"])
            events_now = await events_of(app, log.name)
        assert again.requests[0].sampling.seed == gate.requests[0].sampling.seed
        if at_once == 1:
            assert without(events_now, "call_id") == without(whole, "call_id"), kept
        assert events_now[:num_known] == whole[:num_known]
        assert [event["sequence_number"] for event in events_now] == list(range(len(events_now)))
        assert said(events_now) == said(whole)


async def copied_before_the_end(
    gate: Gated, answering: asyncio.Task[Answer], num_steps: int, folder: Path, copy: Path
) -> Path:
    """Copy the folder of a service as it is before the last of these steps; the file of the events there."""
    for _ in range(num_steps - 1):
        gate.places.release()
    await until(lambda: (gate.requests and gate.places.locked()) or answering.done())
    assert not answering.done(), answering.result().json
    shutil.copytree(folder, copy)
    [log] = (copy / "responses").iterdir()
    return log


def cut_anywhere(folder: Path, log: str) -> Iterator[tuple[Path, int, int]]:
    """Copies of a folder whose records are cut off behind the head, after how many bytes, and how many events are left.

    The head of a file is on the disk before the catalog names it.
    """
    written = (folder / "responses" / log).read_bytes()
    size, head = len(written), head_bytes(written)
    for num_bytes in [*range(head, size, max(1, (size - head) // 12)), size]:
        cut = folder.with_name(f"cut-{num_bytes}")
        shutil.copytree(folder, cut)
        os.truncate(cut / "responses" / log, num_bytes)
        events = StoredEvents()
        for _ in events.of(AnswerPart(written[:num_bytes]), after=-1):
            pass
        yield cut, num_bytes, events.number


def head_bytes(written: bytes) -> int:
    """The bytes of a file's first two records."""
    return sum(len(record(content)) for content in islice(RecordReader().feed(written), 2))


def without(value: Any, *names: str) -> Any:
    """A JSON value without these fields, such as the id that each attempt gives a call that is not known yet."""
    if isinstance(value, dict):
        return {name: without(each, *names) for name, each in value.items() if name not in names}
    return [without(each, *names) for each in value] if isinstance(value, list) else value


def said(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the deltas of each kind come to, and what the items are at their ends."""
    kinds = dict.fromkeys(event["type"] for event in events if "delta" in event)
    return [(kind, "".join(each["delta"] for each in events if each["type"] == kind)) for kind in kinds]


async def test_one_that_says_something_else_fails(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        answering = asyncio.create_task(ask(app, "POST", "/v1/responses", {"input": "Hi"} | STREAM))
        for _ in range(3):
            gate.places.release()
        await until(lambda: gate.requests and gate.places.locked())
    answering.cancel()
    other = Gated(tokenizer, "7 8 9.")
    other.open()
    async with served(kept_by(tokenizer, other), tmp_path) as app:
        [log] = (tmp_path / "responses").iterdir()
        response = await ended(app, log.name)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert (await events_of(app, log.name))[-1]["type"] == "response.failed"


async def test_its_end_waits_for_the_storage(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.stored_responses.STORAGE_PAUSE_S", 0.001)
    failures = [OSError(errno.ENOSPC, "full"), sqlite3.OperationalError("disk I/O error")]
    together = Catalog.together

    def failing(catalog: Catalog, changes: Sequence[Any]) -> list[Any]:
        if gate.requests and failures:
            raise failures.pop()
        return together(catalog, changes)

    monkeypatch.setattr(Catalog, "together", failing)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        gate.open()
        assert (await ended(app, begun["id"]))["status"] == "completed"
    assert not failures


async def test_one_that_cannot_be_kept_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Catalog, "together", failing)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        refused = await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True})
        assert (refused.status, gate.requests) == (503, [])


async def test_no_more_run_than_there_are_places(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path, batch_limits=BatchLimits(max_responses=1)) as app:
        begun = await begin(app, background=True)
        refused = await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True})
        assert (refused.status, "1 of at most 1 responses" in refused.error["message"]) == (429, True)
        gate.open()
        await ended(app, begun["id"])
        assert (await begin(app))["status"] == "completed"


async def test_one_whose_process_dies_again_and_again_is_given_up(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        await until(lambda: len(gate.requests) == 1)
    for partial_match_length in range(2, 8):  # a process that is stopped in order has not died
        async with served(kept_by(tokenizer, gate), tmp_path) as app:
            await until(lambda: len(gate.requests) == partial_match_length)  # noqa: B023
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection, connection:
        assert connection.execute("SELECT num_attempts FROM answers").fetchone() == (0,)
        connection.execute("UPDATE answers SET num_attempts = 4")
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response = await ended(app, begun["id"])
    assert (response["status"], "died 4 times" in response["error"]["message"]) == ("failed", True)


async def test_it_expires(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path, keep_s=1000) as app:
        response = await begin(app, **STREAM | {"stream": False})
        await ended(app, response["id"])
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection, connection:
        connection.execute("UPDATE answers SET expires_at = 1")
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        assert (await ask(app, "GET", f"/v1/responses/{response['id']}")).status == 404
        with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
            await until(lambda: connection.execute("SELECT count(*) FROM answers").fetchone() == (0,))


async def test_a_conversation_outlives_the_responses_that_it_goes_through(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        first = await begin(app, input="one")
        second = await begin(app, input="two", previous_response_id=first["id"])
        for _ in range(2):
            answer = await ask(app, "DELETE", f"/v1/responses/{first['id']}")
            first_status = answer.status
        assert first_status == 404, "it is deleted once"
        refused = await ask(
            app, "POST", "/v1/responses", {"input": "x", "store": True, "previous_response_id": first["id"]}
        )
        assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
        third = await begin(app, input="three", previous_response_id=second["id"], store=False)
        fourth = await begin(app, input="three", previous_response_id=second["id"])
        turns = ["one", "3 4 5.", "two", "3 4 5.", "three"]
        chat = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        assert [each.prompt_token_ids for each in gate.requests[-2:]] == [tokenizer.encode_chat(chat)] * 2
        assert third["output"][0]["content"] == fourth["output"][0]["content"]
        # Its file has its own input only, and the last response takes the text of the others with it.
        assert all(file.stat().st_size < 2500 for file in (tmp_path / "responses").iterdir())
        for response in (second, fourth):
            assert len(list((tmp_path / "responses").iterdir())) == 3
            assert (await ask(app, "DELETE", f"/v1/responses/{response['id']}")).status == 200
        assert not list((tmp_path / "responses").iterdir())


@pytest.mark.parametrize("goes_by", ["DELETE", "expiry"])
async def test_an_accepted_response_outlives_the_one_that_it_continues(
    tokenizer: Tokenizer, tmp_path: Path, goes_by: str
) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        first = await begin(app, input="one")
        gate.refusals = [Overloaded("full", retry_after_s=0.001)] * 10_000
        second = await begin(app, input="two", previous_response_id=first["id"], background=True)
        if goes_by == "DELETE":
            assert (await ask(app, "DELETE", f"/v1/responses/{first['id']}")).status == 200
            gate.refusals.clear()  # the next attempt is made behind the deletion
            assert (await ended(app, second["id"]))["status"] == "completed"
            return
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection, connection:
        connection.execute("UPDATE answers SET expires_at = 1 WHERE id = ?", (first["id"],))
    gate.refusals.clear()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        assert (await ended(app, second["id"]))["status"] == "completed"


async def test_items_are_listed_over_all_turns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response = await begin(app, input="0")
        for number in range(1, 4):
            response = await begin(app, input=f"{2 * number}", previous_response_id=response["id"])

        async def page(query: str) -> Any:
            return (await ask(app, "GET", f"/v1/responses/{response['id']}/input_items", query=query)).json

        texts = ["0", "3 4 5.", "2", "3 4 5.", "4", "3 4 5.", "6"]
        for order, expected in (("asc", texts), ("desc", texts[::-1])):
            after, listed = "", []
            while True:
                got = await page(f"order={order}&limit=2{after}")
                listed += [item["content"][0]["text"] for item in got["data"]]
                after = f"&after={got['last_id']}"
                if not got["has_more"]:
                    break
            assert listed == expected
        unknown = await ask(app, "GET", f"/v1/responses/{response['id']}/input_items", query="after=item_9_resp_x")
        assert (unknown.status, unknown.error["param"]) == (404, "after")


@pytest.mark.parametrize("store", [False, True])
async def test_a_conversation_that_is_too_long_is_refused_or_cut(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    monkeypatch.setattr("app.api.stored_answers.MAX_REQUEST_BYTES", 1200)
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        first = await begin(app, input="one " * 230)
        second = await begin(app, input="two", previous_response_id=first["id"])
        num_requests = len(gate.requests)
        body = {"input": "three", "previous_response_id": second["id"], "store": store}
        refused = await ask(app, "POST", "/v1/responses", body)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert len(gate.requests) == num_requests, "nothing is computed"
        await begin(app, **body | {"truncation": "auto"})
        turns = ["two", "3 4 5.", "three"]
        chat = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        assert gate.requests[-1].prompt_token_ids == tokenizer.encode_chat(chat)


async def test_a_response_is_stored_unless_it_says_no_where_the_service_says_so(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path, store_responses=True) as app:
        for fields, status in (({}, 200), ({"store": False}, 404), ({"store": True}, 200)):
            response = (await ask(app, "POST", "/v1/responses", {"input": "Hi"} | fields)).json
            assert response["store"] == (status == 200)
            assert (await ask(app, "GET", f"/v1/responses/{response['id']}")).status == status


async def test_a_storage_that_fails_while_it_is_taken_up_is_tried_again(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.stored_responses.STORAGE_PAUSE_S", 0.001)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        await until(lambda: gate.num_open)
    failures = [sqlite3.OperationalError("disk I/O error"), OSError(errno.ENOSPC, "full")]
    count = Catalog.count_response_attempt

    def failing(catalog: Catalog, response_id: str, *, by: int = 1) -> None:
        if failures:
            raise failures.pop()
        count(catalog, response_id, by=by)

    monkeypatch.setattr(Catalog, "count_response_attempt", failing)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        assert (await ended(app, begun["id"]))["status"] == "completed"
    assert not failures


async def test_it_fails_at_once_where_its_room_comes_too_late(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.refusals = [Overloaded("the budget of this month is spent", retry_after_s=20 * 86_400.0)]
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        response = await ended(app, begun["id"])
        assert response["error"] == {"code": "rate_limit_exceeded", "message": "the budget of this month is spent"}
        assert (await begin(app, background=True))["status"] in ("queued", "in_progress"), "its place is free"


async def test_one_that_has_just_ended_cannot_be_cancelled(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_ending, may_return = Gated(tokenizer), threading.Event(), threading.Event()
    end_response = Catalog.end_response

    def slowly(catalog: Catalog, response_id: str, *arguments: Any) -> AnswerEnd:
        end = end_response(catalog, response_id, *arguments)
        is_ending.set()
        may_return.wait(60)
        return end

    monkeypatch.setattr(Catalog, "end_response", slowly)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        gate.open()
        await until(is_ending.is_set)
        path = f"/v1/responses/{begun['id']}"
        cancelling = asyncio.create_task(ask(app, "POST", path + "/cancel", {}))
        for _ in range(10):
            await asyncio.sleep(0)
        may_return.set()
        answer = await cancelling
        assert (answer.status, "is completed" in answer.error["message"]) == (400, True)
        assert (await ask(app, "GET", path)).json["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_the_fields_that_had_no_effect(
    tokenizer: Tokenizer, tmp_path: Path, stream: bool
) -> None:
    gate = Gated(tokenizer)
    gate.open()

    async def generate(request: Request) -> AsyncIterator[TokenDelta]:
        # As a replica does that has dropped a keyword of a schema, before the first token.
        queued = Queued(position=0, estimated_wait_s=0.0)
        yield TokenDelta(request.request_id, (), queued=queued, ignored=("tools.f.not",))
        async for each in gate(request):
            yield each

    async with served(Service(tokenizer, generate=generate), tmp_path) as app:
        body: dict[str, Any] = {"input": "Hi", "store": True, "stream": stream, "keep_alive": "5m"}
        body["reasoning"] = {"effort": "low"}  # to a model that marks no reasoning
        answer = await ask(app, "POST", "/v1/responses", body)
        assert answer.headers["x-carousel-ignored"] == "keep_alive, reasoning.effort, tools.f.not"
        [file] = (tmp_path / "responses").iterdir()
        again = await ask(app, "GET", f"/v1/responses/{file.name}")
        assert again.headers["x-carousel-ignored"] == "keep_alive, reasoning.effort, tools.f.not"


async def test_a_token_takes_little_more_than_its_text_on_the_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer, "3 4 5 6 7 8 9 " * 40)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        response = await begin(app)
        written = (tmp_path / "responses" / response["id"]).read_bytes()
        assert len(written) - head_bytes(written) < 80 * response["usage"]["output_tokens"]


async def test_readers_hear_of_it_when_the_task_of_an_answer_dies(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.endpoints.stored_responses._RESTART_TIMEOUT_S", 0.0)
    gate = Gated(tokenizer)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        reading = asyncio.create_task(ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True}))
        await until(lambda: gate.num_open)
        monkeypatch.setattr(Catalog, "end_response", broken)
        gate.open()
        assert (await reading).status == 503
    monkeypatch.undo()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        [file] = (tmp_path / "responses").iterdir()
        assert (await ended(app, file.name))["status"] == "completed", "the next process finishes it"


async def test_readers_hear_of_an_answer_that_nothing_finishes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.endpoints.stored_responses._OPENING_S", 0.0)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        await until(lambda: gate.num_open)
        with monkeypatch.context() as broken:
            broken.setattr(Catalog, "end_response", lambda *_: (_ for _ in ()).throw(RuntimeError("a fault of ours")))
            gate.open()
            await until(lambda: not gate.num_open)
            path = f"/v1/responses/{begun['id']}"
            answer = await until(lambda: ask(app, "GET", path), lambda answer: answer.status != 200)
            answer = await ask(app, "GET", path)  # those that come later, too
        assert (answer.status, "cannot finish" in answer.error["message"]) == (503, True)


async def test_a_running_response_is_deleted_once_the_storage_takes_it(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.stored_responses.STORAGE_PAUSE_S", 0.001)
    failures: list[Exception] = []
    remove = Catalog.remove_responses

    def failing(catalog: Catalog, response_ids: Sequence[str]) -> list[str]:
        if failures:
            raise failures.pop()
        return remove(catalog, response_ids)

    monkeypatch.setattr(Catalog, "remove_responses", failing)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        begun = await begin(app, background=True)
        await until(lambda: gate.num_open)
        failures.append(sqlite3.OperationalError("disk I/O error"))
        path = f"/v1/responses/{begun['id']}"
        assert (await ask(app, "DELETE", path)).status == 200
        assert (await ask(app, "GET", path)).status == 404


async def test_one_whose_log_cannot_be_opened_is_not_stored(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("app.jobs.stored_responses.AnswerLog", failing)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        assert (await ask(app, "POST", "/v1/responses", {"input": "Hi", "store": True})).status == 503
        with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
            assert connection.execute("SELECT count(*) FROM answers").fetchone() == (0,)


async def test_a_process_ends_though_a_response_cannot_be_cancelled_yet(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_response, is_full = Catalog.end_response, True

    def failing(catalog: Catalog, *arguments: Any) -> Any:
        if is_full:
            raise OSError(errno.ENOSPC, "full")
        return end_response(catalog, *arguments)

    monkeypatch.setattr(Catalog, "end_response", failing)
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        responses = [await begin(app, background=True) for _ in range(3)]
        await until(lambda: gate.num_open == 3)
        path = f"/v1/responses/{responses[0]['id']}/cancel"
        cancelling = asyncio.create_task(ask(app, "POST", path, {}))
        await until(lambda: gate.num_open == 2)
        await asyncio.sleep(0)
    assert (await cancelling).status == 503
    is_full = False
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        for response in responses:
            assert (await ended(app, response["id"]))["status"] == "completed"


async def test_a_refusal_is_for_its_own_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    alice, bob = "alice-0123456789abcdef0123456789", "bob-0123456789abcdef0123456789"
    gate = Gated(tokenizer)
    gate.refusals = [Overloaded("full", retry_after_s=7)]
    made = uuid.UUID(int=5)
    async with served(kept_by(tokenizer, gate), tmp_path, keys=[entry(alice, "alice"), entry(bob, "bob")]) as app:
        with pytest.MonkeyPatch.context() as known:
            known.setattr("app.api.endpoints.stored_responses.uuid.uuid4", lambda: made)
            body = {"input": "Hi", "store": True}
            assert (await ask(app, "POST", "/v1/responses", body, key=alice)).status == 429
        path = f"/v1/responses/resp_{made.hex}"
        assert [(await ask(app, "GET", path, key=key)).status for key in (alice, bob)] == [429, 404]


@pytest.mark.parametrize("status", ["failed", "completed"])
async def test_a_running_answer_counts_for_its_share_and_leaves_the_reserve_of_the_disk(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr("app.jobs.stored_responses.LOOK_EVERY_BYTES", 500)
    monkeypatch.setattr("app.jobs.stored_responses.STORAGE_PAUSE_S", 0.001)
    shortages = ["the disk is full"] * 3

    def shortage(*_: object, share_of_reserve: float = 1.0) -> str | None:
        return shortages.pop() if share_of_reserve < 1 and shortages else None

    monkeypatch.setattr("app.jobs.local_service.shortage_of_disk", shortage)
    gate = Gated(tokenizer, "3 4 5 6 7 8 9 " * 40)
    gate.open()
    max_bytes = 5000 if status == "failed" else 10**6
    async with served(kept_by(tokenizer, gate), tmp_path, max_total_bytes=max_bytes) as app:
        response = await ended(app, (await begin(app, background=True))["id"])
        assert (response["status"], shortages) == (status, [])
        if status == "failed":
            assert "files, responses and batches use" in response["error"]["message"]
            assert (tmp_path / "responses" / response["id"]).stat().st_size < 7000
