"""Streams over a fleet whose server sends events at once: the same events as where a task sends each of them."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from typing import Any

import pytest

from app.api import RequestHandler, ServedModel, build_app
from app.api.http.sse import SEND_NOW
from app.api.output.response_state import ResponseState
from app.build import build_engine
from app.config import ApiConfig, EngineConfig, ModelConfig
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.fleet import LocalFleet
from tests.kit.garbage import in_memory
from tests.waiting import until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "3 4"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("/v1/chat/completions", CHAT),
    "usage of each chunk": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2, "seed": 3}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "a stop string": ("/v1/chat/completions", CHAT | {"stop": ["zzz"]}),
    "a completion": ("/v1/completions", {"prompt": "3 4"}),
    "an echo": ("/v1/completions", {"prompt": "3 4", "echo": True}),
    "a message": ("/v1/messages", CHAT),
    "a response": ("/v1/responses", {"input": "3 4", "store": False}),
}
# Those whose events in the middle of the text go the direct way.
NOT_DIRECT = {"two choices", "tools", "a stop string"}
NUM_TOKENS = 40


class Client:
    """Reads one answer. Without `rng` it has read everything at once, else it falls behind now and then."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_blocked = True
        self.sent_at = 0.0
        self.received: list[bytes] = []
        self.num_direct = 0
        self._rng = rng

    def may_send(self) -> bool:
        return not self.is_blocked and (self._rng is None or self._rng.random() < 0.7)

    def send(self, data: bytes) -> None:
        assert not self.is_blocked
        self.num_direct += 1
        self.received.append(data)

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if self._rng is not None and self._rng.random() < 0.3:
                await asyncio.sleep(0.002)
            self.received.append(message["body"])

    @property
    def events(self) -> list[Any]:
        """Without the ids and times that differ from one answer to the next."""
        lines = b"".join(self.received).decode().splitlines()
        assert b"data: " in b"".join(self.received), self.received
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [each if each == "[DONE]" else _without_ids(json.loads(each)) for each in data]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        own = ("id", "item_id", "created", "created_at", "completed_at", "sequence_number")
        return {name: _without_ids(each) for name, each in value.items() if name not in own}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def joined(events: list[Any]) -> list[Any]:
    """Texts that follow each other as one: a client that is behind gets several tokens in one event."""
    whole: list[Any] = []
    for each in events:
        text = _text(each)
        if text is None or not whole or not isinstance(whole[-1], str):
            whole.append(each if text is None else text)
        else:
            whole[-1] += text
    return whole


def _text(event: Any) -> str | None:
    if isinstance(event, dict) and isinstance(event.get("delta"), str):  # of a response
        return str(event["delta"])
    if isinstance(event, dict) and event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    [choice] = (event.get("choices") or [None]) if isinstance(event, dict) else [None]
    if choice is None or choice["finish_reason"] is not None or choice.get("delta", {}).get("role"):
        return None
    return str(choice["delta"]["content"] if "delta" in choice else choice["text"])


def fleet_of(num_replicas: int) -> LocalFleet:
    """Of simulated engines, which draw tokens that have text."""
    local = LocalFleet(num_replicas)
    for replica in local.replicas:
        replica.engine.shutdown()
        replica.engine = build_engine(EngineConfig(model=ModelConfig(simulated={"step_ms": 1.0})))
    return local


def app_over(local: LocalFleet, tokenizer: Tokenizer) -> Any:
    model_info = local.replicas[0].engine.model_info
    model = ServedModel(name="demo", tokenizer=tokenizer, model_info=model_info, generate=local.fleet.generate,
                        created=0, tool_format=FORMATS["hermes"])  # fmt: skip

    async def is_ready() -> bool:
        return True

    return build_app(RequestHandler([model], ApiConfig()), is_ready)


async def streamed(app: Any, path: str, body: dict[str, Any], client: Client, *, is_direct: bool) -> list[Any]:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    sent = [json.dumps(body | {"stream": True, "temperature": 0, limit: NUM_TOKENS}).encode()]

    async def receive() -> Any:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        return await asyncio.Event().wait()

    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("127.0.0.1", 80),
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1024),
    }  # fmt: skip
    if is_direct:
        scope["extensions"] = {SEND_NOW: client}
    await app(scope, receive, client.take)
    return client.events


@pytest.mark.parametrize("name", BODIES)
async def test_the_events_are_the_same(tokenizer: Tokenizer, name: str) -> None:
    path, body = BODIES[name]
    async with fleet_of(1) as local:
        app, client = app_over(local, tokenizer), Client()
        expected = await streamed(app, path, body, Client(), is_direct=False)
        assert len(expected) > NUM_TOKENS / 4, expected
        if name == "two choices":
            await streamed(app, path, body, client, is_direct=True)  # which choice comes first may differ
        else:
            assert joined(await streamed(app, path, body, client, is_direct=True)) == joined(expected)
        assert (client.num_direct == 0) == (name in NOT_DIRECT)
        assert client.num_direct > NUM_TOKENS / 4 or name in NOT_DIRECT
        if name in ("a chat", "a completion", "a message", "a response"):
            behind = Client(random.Random(1))
            assert joined(await streamed(app, path, body, behind, is_direct=True)) == joined(expected)
            assert behind.num_direct < client.num_direct


async def test_log_probabilities_are_the_same(tokenizer: Tokenizer) -> None:
    body = {"prompt": [3, 4], "logprobs": 2}
    found = []
    async with LocalFleet(1) as local:  # these engines have log-probabilities
        for is_direct in (False, True):
            client = Client()
            events = await streamed(app_over(local, tokenizer), "/v1/completions", body, client, is_direct=is_direct)
            assert bool(client.num_direct) == is_direct
            parts = [each["choices"][0]["logprobs"] for each in events[:-1] if each["choices"][0]["logprobs"]]
            found.append([row for part in parts for row in part["top_logprobs"]])
    assert len(found[0]) == NUM_TOKENS
    assert found[0] == found[1]


async def test_nothing_is_lost_when_the_replica_of_a_stream_dies(tokenizer: Tokenizer) -> None:
    path, body = BODIES["a chat"]
    async with fleet_of(1) as alone:
        expected = await streamed(app_over(alone, tokenizer), path, body, Client(), is_direct=False)
    async with fleet_of(2) as local:
        client = Client()
        streaming = asyncio.create_task(streamed(app_over(local, tokenizer), path, body, client, is_direct=True))
        await until(lambda: client.num_direct >= 3)
        [busy] = [each for each in local.replicas if each.served]
        busy.kill()
        assert joined(await streaming) == joined(expected)
        assert sum(local.counts.resumes.values()) == 1


async def test_nothing_of_a_stream_stays_without_the_garbage_collector(tokenizer: Tokenizer) -> None:
    path, body = BODIES["a chat"]
    async with fleet_of(1) as local:
        app = app_over(local, tokenizer)
        await streamed(app, path, body, Client(), is_direct=True)
        gc.collect()
        of_other_tests = in_memory(ResponseState)  # which this list keeps
        gc.disable()
        try:
            client = Client()
            is_there = weakref.ref(client)
            await streamed(app, path, body, client, is_direct=True)
            assert client.num_direct
            del client
            await asyncio.sleep(0)
            assert is_there() is None
            assert len(in_memory(ResponseState)) == len(of_other_tests)
        finally:
            gc.enable()
