"""Answers of megabytes hold little memory until they are sent, and are sent without holding the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from app.api.auth.limits import Account
from app.api.endpoints.table import ENDPOINTS
from app.api.request_context import RequestContext
from app.engine.request import FinishReason, Pooling, Request, TokenDelta, TokenLogprobs
from app.errors import LimitReached
from app.json_pieces import PIECE_BYTES
from app.text import Tokenizer
from tests.kit.service import WAIT, Answer, Connection, Service, Step, last, served
from tests.waiting import until

NUM_TOKENS = 1000
NUM_TOP = 20
MOST_BYTES = 2 * PIECE_BYTES  # of one piece
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": NUM_TOKENS}
TOP = {"logprobs": True, "top_logprobs": NUM_TOP}
RESPONSE = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP}


def score(number: int) -> TokenLogprobs:
    """Numbers of its own for each token, as they come from a frame."""
    return TokenLogprobs(
        -0.125 - number,
        1 + number,
        tuple(5 + (number + each) % 700 for each in range(NUM_TOP)),
        tuple(-number - each / 7 for each in range(NUM_TOP)),
    )


def scoring(*, num_at_once: int = 1) -> Callable[[Request], Iterable[Step]]:
    """A script that generates what is asked for, with scores; so many tokens, or all of a prompt, in each delta."""

    def script(request: Request) -> Iterable[Step]:
        if request.sampling.prompt_logprobs is not None:
            scores = tuple(map(score, range(len(request.prompt_token_ids) - 1)))
            yield TokenDelta(request.request_id, (), prompt_logprobs=scores)
        num_tokens = request.sampling.max_tokens
        for first in range(0, num_tokens, num_at_once):
            numbers = range(first, min(first + num_at_once, num_tokens))
            found = () if request.sampling.logprobs is None else tuple(map(score, numbers))
            yield TokenDelta(request.request_id, tuple(5 + number % 700 for number in numbers), logprobs=found)
        yield last(request, (), FinishReason.LENGTH)

    return script


def large(tokenizer: Tokenizer, *, num_at_once: int = 1, **settings: Any) -> Service:
    return Service(tokenizer, scoring(num_at_once=num_at_once), max_model_len=100_000, **settings)


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | TOP),
    "streamed chat": ("/v1/chat/completions", CHAT | TOP | {"stream": True}),
    "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": NUM_TOKENS, "logprobs": NUM_TOP, "n": 2}),
    "echo": ("/v1/completions", {"prompt": [5] * NUM_TOKENS, "max_tokens": 1, "logprobs": NUM_TOP, "echo": True}),
    "streamed echo": (
        "/v1/completions",
        {"prompt": [5] * NUM_TOKENS, "max_tokens": 1, "logprobs": NUM_TOP, "echo": True, "stream": True},
    ),
    "prompt": ("/v1/completions", {"prompt": [5] * NUM_TOKENS, "max_tokens": 1, "prompt_logprobs": NUM_TOP}),
    "ids": ("/v1/completions", {"prompt": [555] * 90_000, "max_tokens": 1, "return_token_ids": True}),
    "response": ("/v1/responses", RESPONSE | {"max_output_tokens": NUM_TOKENS}),
    "streamed response": ("/v1/responses", RESPONSE | {"max_output_tokens": NUM_TOKENS, "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "1 2 3 " * 20_000, "return_token_strs": True}),
}


@pytest.mark.parametrize("num_at_once", [1, 10_000], ids=["token by token", "at once"])
@pytest.mark.parametrize("name", CALLS)
def test_a_large_answer_is_sent_in_pieces(tokenizer: Tokenizer, name: str, num_at_once: int) -> None:
    path, body = CALLS[name]
    answer = large(tokenizer, num_at_once=num_at_once).call("POST", path, body)
    assert answer.status == 200
    if not body.get("stream"):
        assert json.loads(answer.body)
    assert max(map(len, answer.parts)) < MOST_BYTES < len(answer.body)


def test_the_pieces_together_are_the_answer_of_many_small_ones(tokenizer: Tokenizer) -> None:
    [choice] = large(tokenizer).complete(max_tokens=500, logprobs=3, return_token_ids=True).json["choices"]
    assert choice["token_ids"] == [5 + number for number in range(500)]
    found = choice["logprobs"]
    assert found["token_logprobs"] == [-0.125 - number for number in range(500)]
    assert [len(top) for top in found["top_logprobs"]] == [3] * 500
    assert len(found["tokens"]) == len(found["text_offset"]) == 500
    assert found["text_offset"] == sorted(found["text_offset"])


def test_a_small_answer_is_sent_at_once_with_its_length(tokenizer: Tokenizer) -> None:
    answer = large(tokenizer).call("POST", "/v1/chat/completions", CHAT | TOP | {"max_tokens": 3})
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert len(answer.parts) == 1


@pytest.mark.parametrize("name", ["chat", "completion", "prompt", "echo", "response"])
def test_a_log_probability_takes_few_bytes_until_it_is_sent(tokenizer: Tokenizer, name: str) -> None:
    path, body = CALLS[name]

    async def held(service: Service) -> int:
        with Account(None, lambda: 0.0).reserve() as reservation:
            context = RequestContext(reservation=reservation, request_id="r")
            state = await service.handler.handle(ENDPOINTS[path], body, context)
            answer = await state.full_response()
            gc.collect()
            num_bytes = tracemalloc.get_traced_memory()[0]
            assert answer
            return num_bytes

    service = large(tokenizer)
    asyncio.run(held(service))  # what is remembered of tokens and code is not the answer's
    tracemalloc.start()
    try:
        num_bytes = asyncio.run(held(service))
    finally:
        tracemalloc.stop()
    num_tokens = body.get("n", 1) * NUM_TOKENS
    assert num_bytes / num_tokens / (1 + NUM_TOP) < 40  # one in a dict of its own takes 350


async def turns_during(call: Awaitable[object]) -> int:
    """How often the event loop comes round while the call is answered."""
    task, num_turns = asyncio.ensure_future(call), 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    await task
    return num_turns


@pytest.mark.parametrize("name", ["chat", "streamed chat", "echo", "prompt", "streamed response"])
def test_the_event_loop_goes_on_while_much_has_come_at_once(tokenizer: Tokenizer, name: str) -> None:
    path, body = CALLS[name]
    service = large(tokenizer, num_at_once=NUM_TOKENS)
    num_turns = asyncio.run(turns_during(service.answer("POST", path, body)))
    assert num_turns > NUM_TOKENS / 64


async def test_of_many_large_answers_one_piece_is_written_at_a_time(tokenizer: Tokenizer) -> None:
    num_sent: list[int] = []

    service = large(tokenizer, num_at_once=NUM_TOKENS)
    path, body = CALLS["chat"]
    connections = [Connection(service.app, "POST", path, body, {}) for _ in range(8)]
    for connection in connections:
        await connection.__aenter__()
    tasks = [asyncio.create_task(connection.finished()) for connection in connections]
    while not all(task.done() for task in tasks):
        before = sum(len(connection.messages) for connection in connections)
        await asyncio.sleep(0)
        num_sent.append(sum(len(connection.messages) for connection in connections) - before)
    for connection in connections:
        assert connection.answer().status == 200
    assert max(num_sent) <= 8 + 3, "each answer may begin, and one of them has a piece written"
    assert sum(num > 1 for num in num_sent) < len(num_sent) / 4


def test_two_thousand_embeddings_are_sent_in_pieces(tokenizer: Tokenizer) -> None:
    vector = bytes(4 * 1024 - 4) + b"\0\0\x80\x3f"

    def script(request: Request) -> Iterable[Step]:
        yield TokenDelta(request.request_id, (), FinishReason.LENGTH, embedding=vector)

    service = Service(tokenizer, script, pooling=Pooling.LAST)
    answer: Answer = service.call("POST", "/v1/embeddings", {"input": [[5]] * 2048})
    assert max(map(len, answer.parts)) < MOST_BYTES < len(answer.body)
    assert [each["index"] for each in answer.json["data"]] == list(range(2048))


async def test_the_answers_to_a_list_of_prompts_are_sent_in_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = {"prompts": ["a"] * 4, "max_tokens": NUM_TOKENS, "logprobs": NUM_TOP}
    async with (
        served(large(tokenizer), tmp_path) as app,
        Connection(app, "POST", "/v1/batch", body, {}) as connection,
    ):
        answer = await connection.finished()
    found = [each["response"]["choices"][0]["logprobs"]["tokens"] for each in answer.json["results"]]
    assert [len(tokens) for tokens in found] == [NUM_TOKENS] * 4
    assert max(map(len, answer.parts)) < MOST_BYTES < len(answer.body)


async def test_answers_under_way_hold_a_bounded_number_of_logprobs(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(5,), WAIT], max_model_len=100_000)
    path, body = "/v1/chat/completions", CHAT | TOP | {"max_tokens": 47_000}  # 987,000 of 4,000,000

    async def answer(body: dict[str, Any]) -> Answer:
        service.generate.script = lambda request: [last(request, (), FinishReason.LENGTH)]
        async with Connection(service.app, "POST", path, body, {}) as connection:
            return await connection.finished()

    waiting = [asyncio.create_task(service.answer("POST", path, body)) for _ in range(4)]
    await until(lambda: len(service.generate.open) == 4)
    refused = await answer(body)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"]
    with pytest.raises(LimitReached):  # a line of a batch waits
        await service.handler.handle_item("", path, body)
    assert (await answer(body | {"max_tokens": 100})).status == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await answer(body)).status == 200
    assert (await service.handler.handle_item("", path, body)).status_code == 200
