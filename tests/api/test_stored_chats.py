"""Chats and completions that are kept: their streams go on behind the last event that came."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from app.errors import Failure, Overloaded
from app.jobs.catalog import Catalog
from app.text import Tokenizer
from tests.api.test_stored_responses import Gated, copied_before_the_end, cut_anywhere, kept_by, without
from tests.kit.service import CALL, Answer, Connection, Service, bearer, entry, openai_client, served
from tests.waiting import until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KEPT = {"stream": True, "store": True, "temperature": 1.0}
TALK = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "chat": (CHAT, TALK | {"stream_options": {"include_usage": True}}),
    "two choices": (CHAT, TALK | {"n": 2}),
    "calls": (CHAT, TALK | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    "log-probabilities": (
        CHAT,
        TALK
        | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "completion": (COMPLETION, {"prompt": ["Hi", "Ho"], "echo": True, "max_tokens": 100}),
}
every_body = pytest.mark.parametrize(("path", "fields"), BODIES.values(), ids=BODIES)


async def ask(
    app: Any, method: str, path: str, body: Any = None, query: str = "", headers: Mapping[str, str] | None = None
) -> Answer:
    async with Connection(app, method, path, body, dict(headers or {}), query, begins_work=True) as connection:
        return await connection.finished()


def read_by(received: bytes) -> tuple[bytes, str]:
    """The whole events in what a client received, and the id of the last."""
    whole = received[: received.rfind(b"\n\n") + 2] if b"\n\n" in received else b""
    return whole, whole.rpartition(b"id: ")[2].partition(b"\n")[0].decode()


@every_body
async def test_it_goes_on_wherever_its_connection_breaks(
    tools_tokenizer: Tokenizer, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    gate = Gated(tools_tokenizer, "Let me see.\n" + CALL)
    gate.open()
    async with served(kept_by(tools_tokenizer, gate), tmp_path) as app:
        whole = await ask(app, "POST", path, fields | KEPT)
        [response_id] = {chunk["id"] for chunk in whole.chunks}
        assert [event["id"] for event in whole.event_fields] == [f"{response_id}:{n}" for n in range(len(whole.data))]
        for size in range(0, len(whole.body), len(whole.body) // 20):
            read, last_id = read_by(whole.body[:size])
            if not last_id:
                continue  # it knows of nothing to go on with
            for method, asked_at, body in (("GET", f"{path}/{response_id}", None), ("POST", path, fields | KEPT)):
                rest = await ask(app, method, asked_at, body, headers={"last-event-id": last_id})
                assert read + rest.body == whole.body, (method, size)
        assert len(gate.requests) == len(fields.get("prompt", [0])) * fields.get("n", 1), "it was computed once"
        by_number = await ask(app, "GET", f"{path}/{response_id}", query="stream=true&starting_after=1")
        assert by_number.data == whole.data[2:]
        assert (await ask(app, "GET", f"{path}/{response_id}", query="stream=true")).body == whole.body


async def test_its_client_may_go_and_read_on_while_it_runs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        async with Connection(app, "POST", CHAT, TALK | KEPT, {}, begins_work=True) as connection:
            gate.places.release()
            await until(lambda: b"content" in b"".join(m.get("body", b"") for m in connection.messages))
            connection.hang_up()
            await connection.finished()
            read, last_id = read_by(connection.answer().body)
        assert gate.num_open == 1, "it goes on"
        response_id = last_id.partition(":")[0]
        assert (await ask(app, "GET", f"{CHAT}/{response_id}")).json["status"] == "in_progress"
        following = asyncio.create_task(ask(app, "POST", CHAT, TALK, headers={"last-event-id": last_id}))
        gate.open()
        rest = await following
        whole = await ask(app, "GET", f"{CHAT}/{response_id}", query="stream=true")
        assert read + rest.body == whole.body
        deltas = [chunk["choices"][0]["delta"] for chunk in whole.chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == "3 4 5."


@every_body
@pytest.mark.parametrize("at_once", [1, 3])
async def test_it_goes_on_wherever_its_process_dies(
    tools_tokenizer: Tokenizer, tmp_path: Path, path: str, fields: dict[str, Any], at_once: int
) -> None:
    # The folder as it is before the last step, with the events cut off at any byte.
    text = "Let me see.\n" + CALL
    gate, before = Gated(tools_tokenizer, text), tmp_path / "before"
    num_choices = len(fields.get("prompt", [0])) * fields.get("n", 1)
    num_steps = (len(tools_tokenizer.encode(text, add_special_tokens=False)) + 1) * num_choices
    async with served(kept_by(tools_tokenizer, gate), tmp_path / "whole") as app:
        answering = asyncio.create_task(ask(app, "POST", path, fields | KEPT))
        log = await copied_before_the_end(gate, answering, num_steps, tmp_path / "whole", before)
        gate.open()
        whole = await answering
        kept = (await ask(app, "GET", f"{path}/{log.name}")).json
    for folder, num_bytes, num_known in cut_anywhere(before, log.name):
        again = Gated(tools_tokenizer, text, at_once=at_once)
        again.open()
        async with served(kept_by(tools_tokenizer, again), folder) as app:
            now = await ask(app, "GET", f"{path}/{log.name}", query="stream=true")
            assert now.data[:num_known] == whole.data[:num_known]
            assert said(now) == said(whole), num_bytes
            ended = (await ask(app, "GET", f"{path}/{log.name}")).json
            assert without(ended, "call_id", "id") == without(kept, "call_id", "id")
        assert {each.sampling.seed for each in again.requests} == {each.sampling.seed for each in gate.requests}


def said(answer: Answer) -> dict[tuple[int, str], Any]:
    """What the chunks of each choice come to."""
    come_to: dict[tuple[int, str], Any] = {}
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            calls = [call["function"] for call in delta.get("tool_calls", ())]
            texts = {"text": delta.get("content") or delta.get("text") or ""}
            texts |= {"name": "".join(call.get("name", "") for call in calls)}
            texts |= {"arguments": "".join(call["arguments"] for call in calls), "end": choice["finish_reason"] or ""}
            for kind, text in texts.items():
                come_to[choice["index"], kind] = come_to.get((choice["index"], kind), "") + text
    return come_to | {(0, "usage"): answer.chunks[-1].get("usage")}


@every_body
async def test_it_is_there_by_its_id_until_it_is_deleted(
    tools_tokenizer: Tokenizer, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    gate = Gated(tools_tokenizer, "Let me see.\n" + CALL)
    gate.open()
    fields = {name: value for name, value in fields.items() if name != "stream_options"}
    async with served(kept_by(tools_tokenizer, gate), tmp_path) as app:
        plain = (await ask(app, "POST", path, fields)).json
        kept = (await ask(app, "POST", path, fields | {"store": True})).json
        assert without(kept, "id") | {"created": 0} == without(plain, "id") | {"created": 0, "status": "completed"}
        at = f"{path}/{kept['id']}"
        assert (await ask(app, "GET", at)).json == kept
        kind = "chat.completion" if path == CHAT else "text_completion"
        assert (await ask(app, "DELETE", at)).json == {"id": kept["id"], "object": f"{kind}.deleted", "deleted": True}
        for method in ("GET", "DELETE"):
            assert (await ask(app, method, at)).error["code"] == "response_not_found"


async def test_log_probabilities_are_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    fields = TALK | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        plain = (await ask(app, "POST", CHAT, fields)).json
        streamed = await ask(app, "POST", CHAT, fields | KEPT)
        kept = (await ask(app, "GET", f"{CHAT}/{streamed.chunks[0]['id']}")).json
    assert (kept["choices"], kept["prompt_token_ids"]) == (plain["choices"], plain["prompt_token_ids"])


async def test_the_openai_package_reads_what_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = Gated(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app, openai_client(app) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], stream=True, store=True
        )
        chunks = [chunk async for chunk in stream]
        kept = await client.chat.completions.retrieve(chunks[0].id)
        assert kept.choices[0].message.content == "3 4 5."
        assert (await client.chat.completions.delete(kept.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.retrieve(kept.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_its_client_gets_the_refusal(tokenizer: Tokenizer, tmp_path: Path, stream: bool) -> None:
    gate = Gated(tokenizer)
    gate.refusals = [Overloaded("full", retry_after_s=7)]
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        # `background` is a field of responses only.
        body = TALK | {"store": True, "stream": stream, "background": True}
        refused = await ask(app, "POST", CHAT, body)
        assert (refused.status, refused.headers["retry-after"]) == (429, "7")
        wrong = await ask(app, "POST", CHAT, body | {"temperature": 9})
        assert (wrong.status, wrong.error["param"]) == (400, "temperature")
        assert (await ask(app, "POST", CHAT, body | {"store": "yes"})).error["param"] == "store"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_says_so(tokenizer: Tokenizer, tmp_path: Path, stream: bool) -> None:
    class Failing(Gated):
        async def __call__(self, request: Any) -> Any:
            num_deltas = 0
            async for each in super().__call__(request):
                if num_deltas == 2:
                    raise Failure("broken")
                num_deltas += 1
                yield each

    gate = Failing(tokenizer)
    gate.open()
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        answer = await ask(app, "POST", CHAT, TALK | {"store": True, "stream": stream})
        if not stream:
            assert (answer.status, answer.error["type"]) == (500, "server_error")
            return
        *_, failed, done = answer.event_fields
        assert ("server_error" in failed["data"], done["data"]) == (True, "[DONE]")
        response_id = failed["id"].partition(":")[0]
        assert (await ask(app, "GET", f"{CHAT}/{response_id}", query="stream=true")).body == answer.body
        assert (await ask(app, "GET", f"{CHAT}/{response_id}")).json["status"] == "failed"


async def test_events_that_there_are_not(tokenizer: Tokenizer, tmp_path: Path) -> None:
    alice, bob = "alice-0123456789abcdef0123456789", "bob-0123456789abcdef0123456789"
    gate = Gated(tokenizer)
    gate.open()
    keys = [entry(alice, "alice"), entry(bob, "bob")]
    async with served(kept_by(tokenizer, gate), tmp_path, keys=keys) as app:
        whole = await ask(app, "POST", CHAT, TALK | KEPT, headers=bearer(alice))
        kept = whole.chunks[0]["id"]
        silent = await ask(app, "POST", CHAT, TALK | {"store": True}, headers=bearer(alice))
        for last_id, key, path, status, words in (
            (f"{kept}:0", bob, CHAT, 404, "there is no response"),
            (f"{kept}:0", alice, COMPLETION, 404, "ids of /v1/completions begin with cmpl-"),
            (f"{kept}:0", alice, "/v1/responses", 404, "ids of /v1/responses begin with resp_"),
            ("chatcmpl-none:0", alice, CHAT, 404, "there is no response"),
            (f"{kept}:{len(whole.data)}", alice, CHAT, 400, f"the last event so far is {len(whole.data) - 1}"),
            (f"{kept}:-1", alice, CHAT, 400, f"such as {kept}:0"),
            (f"{kept}:x", alice, CHAT, 400, f"such as {kept}:0"),
            (f"{silent.json['id']}:0", alice, CHAT, 400, "created without stream: true"),
        ):
            headers = bearer(key) | {"last-event-id": last_id}
            for method, at in (("POST", path), ("GET", f"{path}/{last_id.partition(':')[0]}")):
                refused = await ask(app, method, at, TALK if method == "POST" else None, headers=headers)
                assert (refused.status, words in refused.error["message"]) == (status, True), refused.json
        other = await ask(app, "GET", f"{CHAT}/{kept}x", headers=bearer(alice) | {"last-event-id": f"{kept}:0"})
        assert (other.status, other.error["param"]) == (400, "last-event-id")
        for method, at in (("GET", f"/v1/responses/{kept}/input_items"), ("POST", f"/v1/responses/{kept}/cancel")):
            assert (await ask(app, method, at, {} if method == "POST" else None, headers=bearer(alice))).status == 404
        for store in (False, True):
            body = {"input": "x", "previous_response_id": kept, "store": store}
            refused = await ask(app, "POST", "/v1/responses", body, headers=bearer(alice))
            assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")


def test_where_nothing_is_kept_it_has_no_effect(service: Service) -> None:
    answer = service.call("POST", CHAT, TALK | KEPT, {"last-event-id": "chatcmpl-a:1"})
    assert all("id" not in event for event in answer.event_fields)


@pytest.mark.parametrize(
    ("path", "fields"), [BODIES["chat"], ("/v1/responses", {"input": "Hi"})], ids=["chat", "response"]
)
async def test_what_ends_it_is_not_shown_before_its_end_is_kept(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    gate = Gated(tokenizer)
    failed = asyncio.Event()
    end_response = Catalog.end_response

    def failing(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Catalog, "end_response", failing)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        async with Connection(app, "POST", path, fields | KEPT, {}, begins_work=True) as connection:
            gate.open()
            await until(failed.is_set)
            [log] = (tmp_path / "responses").iterdir()
            written = log.read_bytes()
            await until(lambda: b"5" in b"".join(each.get("body", b"") for each in connection.messages))
            connection.cancel()
        shown = b"".join(each.get("body", b"") for each in connection.messages)
        assert not any(end in shown for end in (b'"finish_reason":"stop"', b"output_text.done", b"response.completed"))
    monkeypatch.setattr(Catalog, "end_response", end_response)
    async with served(kept_by(tokenizer, gate), tmp_path) as app:
        whole = await ask(app, "GET", f"{path}/{log.name}", query="stream=true")
        assert (await ask(app, "GET", f"{path}/{log.name}")).json["status"] == "completed"
    assert whole.body.startswith(shown)
    assert log.read_bytes() == written, "nothing is written again"
    assert len(gate.requests) == 1, "nothing is computed again"
    assert [int(event["id"].rpartition(":")[2]) for event in whole.event_fields] == list(range(len(whole.event_fields)))
    if path == CHAT:
        assert sum(chunk["usage"] is not None for chunk in whole.chunks) == 1
