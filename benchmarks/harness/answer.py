"""What a client sees of one streamed answer: what it says, when its parts came, and how it ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.harness.http_call import EventStream, Target, call
from benchmarks.harness.timeline import Deliveries

TIMEOUT = "timeout"
_MAX_KEPT_BYTES = 4096  # of an answer that is no stream


@dataclass(slots=True)
class Answer(Deliveries):
    """One request and what came of it; it fills up as that comes. Times are of `time.perf_counter`."""

    name: str = ""  # of the request
    begun_s: float = field(default_factory=time.perf_counter)  # when the client turned to it, to connect after that
    status: int | None = None  # None: no answer at all
    headers: Mapping[str, str] = field(default_factory=dict)
    events_s: list[float] = field(default_factory=list)  # of all choices, also those without text
    num_pieces: int = 0  # of text
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    num_reported_tokens: int | None = None  # as the server's usage says
    is_done: bool = False  # its [DONE] came
    has_surplus: bool = False  # events after that, or a second end of a choice
    refusal: bytes = b""  # what came with another status than 200
    error: dict[str, Any] | None = None  # the server's error event, or that in the refusal
    failure: str | None = None  # of the connection, in the client's words
    ended_s: float = 0.0  # 0: it still runs

    @property
    def said(self) -> tuple[Any, ...]:
        """All that must be the same whenever the same request is answered."""
        return (sorted(self.texts.items()), sorted(self.finish_reasons.items()), self.num_reported_tokens)

    @property
    def num_tokens(self) -> int:
        """As the server counts them; where it does not, pieces of text."""
        return self.num_pieces if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def has_succeeded(self) -> bool:
        """It came to its end with some text, as any server of the API tells it."""
        is_whole = self.status == 200 and self.is_done and self.failure is None and self.error is None
        return is_whole and bool(self.delivered_s)

    @property
    def is_complete(self) -> bool:
        """It is well-formed, and the server has counted its tokens."""
        return self.is_well_formed and self.error is None and self.num_reported_tokens is not None

    @property
    def is_well_formed(self) -> bool:
        """It ended as a client's library expects: refused in the API's words, or each choice once and one [DONE]."""
        if self.status is None or self.failure is not None:
            return False
        if self.status != 200:
            return self.error is not None
        return self.is_done and not self.has_surplus

    @property
    def outcome(self) -> str:
        """`completed`, or in a few words what else."""
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"status {self.status}"
        if self.error is not None:
            return f"error event: {self.error.get('code') or self.error.get('type')}"
        if self.is_done and not self.delivered_s:
            return "no text"
        return "completed" if self.is_complete else "malformed"

    @property
    def in_words(self) -> str:
        """The outcome with what the server says of it."""
        return f"{self.outcome} {self.error or self.refusal.decode(errors='replace')}".strip()

    def longest_pause_s(self, from_s: float, to_s: float) -> float:
        """The longest time without an event, of the pauses that touch this span; from the request to the first, too."""
        moments = [self.begun_s, *self.events_s]
        pauses = [after - before for before, after in pairwise(moments) if after >= from_s and before <= to_s]
        return max(pauses, default=0.0)


def streamed(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a completion of which the answer is streamed, with the count of its tokens; greedy by default."""
    asked = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    return asked | {"stream": True, "stream_options": {"include_usage": True}} | more


def random_prompt(source: random.Random, num_tokens: int) -> list[int]:
    """Ids that are text in most vocabularies."""
    return source.choices(range(300, 600), k=num_tokens)


async def ask(target: Target, request: bytes, *, timeout_s: float, arrival_s: float | None = None) -> Answer:
    """Send a streaming request of the OpenAI API and follow its answer to the end. Never raises for the server's part.

    request: as `Target.request` makes it. arrival_s: when it was to be sent; None: now.
    """
    answer = Answer(time.perf_counter() if arrival_s is None else arrival_s)
    await follow(answer, target, request, timeout_s=timeout_s)
    return answer


async def follow(answer: Answer, target: Target, request: bytes, *, timeout_s: float) -> None:
    """The same, seen while it comes. Cancelling it closes the connection."""
    try:
        async with asyncio.timeout(timeout_s):
            await call(target, request, AnswerReader(answer))
    except TimeoutError:
        answer.failure = TIMEOUT
    except OSError as error:
        answer.failure = "no connection" if answer.status is None else f"cut off: {type(error).__name__}"
    finally:
        answer.ended_s = time.perf_counter()


class AnswerReader:
    """Fills in an answer from its bytes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = EventStream()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._answer.status, self._answer.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        answer = self._answer
        if answer.status != 200:
            answer.refusal = (answer.refusal + data)[:_MAX_KEPT_BYTES]
            answer.error = _error_in(answer.refusal)
            return
        num_pieces = answer.num_pieces
        for content in self._events.feed(data):
            self._read(content, at_s)
        if answer.num_pieces > num_pieces:
            answer.delivered_s.append(at_s)

    def _read(self, content: bytes, at_s: float) -> None:
        answer = self._answer
        answer.has_surplus |= answer.is_done
        if content == b"[DONE]":
            answer.is_done = True
            return
        chunk: dict[str, Any] = json.loads(content)
        answer.error = chunk.get("error", answer.error)
        for choice in chunk.get("choices") or ():
            self._read_choice(choice, at_s)
        if usage := chunk.get("usage"):
            answer.num_reported_tokens = usage.get("completion_tokens")

    def _read_choice(self, choice: dict[str, Any], at_s: float) -> None:
        answer, index, delta = self._answer, choice.get("index", 0), choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        answer.events_s.append(at_s)
        answer.num_pieces += bool(text)
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice.get("finish_reason") is not None:
            answer.has_surplus |= index in answer.finish_reasons
            answer.finish_reasons[index] = choice["finish_reason"]


def _error_in(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None
