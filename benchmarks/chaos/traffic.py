"""Clients that repeat the same requests, and the reference answers that they got without a fault."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.answer import Answer, follow, random_prompt, streamed
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target

TIMEOUT_S = 90.0  # a client that waits longer counts as hung
_AFTER_FAILURE_S = 0.2  # pause of a client after a failure, as real clients make


@dataclass(slots=True)
class Traffic:
    """One client for each request. Every sent request adds an item to `answers`, which is updated as parts arrive."""

    target: Target
    requests: Sequence[Asked]
    reference: dict[str, Answer]  # by the request's name
    timeout_s: float = TIMEOUT_S
    answers: list[Answer] = field(default_factory=list)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Run all clients until the end of the block, and then wait for their last answers."""
        is_over = asyncio.Event()
        clients = [asyncio.create_task(self._client(asked, is_over)) for asked in self.requests]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*clients)

    async def once(self) -> list[Answer]:
        """Send every request once, all at the same time; return the answers."""
        return list(await asyncio.gather(*map(self.ask, self.requests)))

    async def _client(self, asked: Asked, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            answer = await self.ask(asked)
            if not answer.is_complete:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def ask(self, asked: Asked) -> Answer:
        """Send one request; return its answer after the end of the answer."""
        answer = Answer(time.perf_counter(), name=asked.name)
        self.answers.append(answer)
        await follow(answer, self.target, self.target.request("completions", asked.body), timeout_s=self.timeout_s)
        return answer


async def with_reference(target: Target, requests: Sequence[Asked], clients: type[Traffic] = Traffic) -> Traffic:
    """Send all requests twice without a fault; return clients with the answers as reference.

    Requests of the kind `stop` get stop strings from an answer without stop strings.

    Raises:
        BenchmarkError: an answer is incomplete, or the two answers to a request differ.
    """
    plain = await _answers(target, [asked for asked in requests if asked.kind == "stop"])
    given = [with_stop(asked, plain[asked.name].texts[0]) if asked.kind == "stop" else asked for asked in requests]
    reference, again = await _answers(target, given, clients), await _answers(target, given, clients)
    for name, answer in reference.items():
        if answer.said != again[name].said:
            raise BenchmarkError(f"request {name!r} is answered differently each time, with no fault made")
    return clients(target, given, reference)


async def _answers(target: Target, requests: Sequence[Asked], clients: type[Traffic] = Traffic) -> dict[str, Answer]:
    answers = await clients(target, requests, {}).once()
    for answer in answers:
        if not answer.is_complete:
            raise BenchmarkError(f"request {answer.name!r} was not answered: {answer.in_words}")
    return {answer.name: answer for answer in answers}


async def moment(is_now: Callable[[], bool], *, look_s: float = 0.002) -> None:
    """Poll until a condition holds, because other processes and growing answers send no event."""
    while not is_now():  # noqa: ASYNC110
        await asyncio.sleep(look_s)


MODEL_NAME = "chaos"
KINDS = ("greedy", "seeded", "penalties", "stop", "min_tokens", "n=3")
_PROMPT_TOKENS = (5, 60)
_STOP_CHARACTERS = 7  # longer than most tokens, so that a stop string spans two or three tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Its name starts with its kind or, for other endpoints and pipelines, with their name."""

    name: str
    kind: str
    body: dict[str, Any]


def mixed(
    number: int, *, max_tokens: tuple[int, int], prompt_tokens: tuple[int, int] = _PROMPT_TOKENS, seed: int = 7
) -> list[Asked]:
    """Return requests of all kinds in turn, with random lengths. `with_stop` adds the stop strings of kind `stop`."""
    source = random.Random(seed)
    return [_asked(place, KINDS[place % len(KINDS)], source, max_tokens, prompt_tokens) for place in range(number)]


def alike(number: int, *, num_tokens: int, num_prompt_tokens: int = 20) -> list[Asked]:
    """Return requests of equal length, so that all streams are in the same phase at the same time."""
    source = random.Random(11)
    usual = {"model": MODEL_NAME, "ignore_eos": True, "temperature": 1}
    return [
        Asked(
            f"alike {place}",
            "seeded",
            streamed(random_prompt(source, num_prompt_tokens), num_tokens, **usual, seed=place),
        )
        for place in range(number)
    ]


def with_stop(asked: Asked, text: str) -> Asked:
    """Return the request with a stop string from the middle of `text`, the answer without stop strings."""
    place = max(1, 2 * len(text) // 3)
    return Asked(asked.name, asked.kind, {**asked.body, "stop": [text[place : place + _STOP_CHARACTERS]]})


def _asked(
    place: int, kind: str, source: random.Random, max_tokens: tuple[int, int], prompt_tokens: tuple[int, int]
) -> Asked:
    prompt = random_prompt(source, source.randint(*prompt_tokens))
    body = streamed(prompt, source.randint(*max_tokens), model=MODEL_NAME)
    if kind != "greedy":
        body |= {"temperature": 0.9, "seed": source.randrange(2**31)}
    if kind == "penalties":
        body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    if kind == "min_tokens":
        body |= {"min_tokens": body["max_tokens"] // 2}
    if kind == "n=3":
        body |= {"n": 3, "max_tokens": -(-body["max_tokens"] // 2)}
    return Asked(f"{kind} {place}", kind, body)
