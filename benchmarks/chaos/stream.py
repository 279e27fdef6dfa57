"""One streamed answer in full: what it said, when, and how it ended. Speed alone: `benchmarks.harness.answer`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.harness.http_call import EventStream, Target, call

TIMEOUT = "timeout"
_MAX_KEPT_BYTES = 4096  # of an answer that is no stream


@dataclass(slots=True)
class Stream:
    """What a client has received of one answer. Times are in seconds of `time.perf_counter`."""

    name: str  # of the request
    begun_s: float
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)  # of events, of all choices
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    num_tokens: int | None = None  # as the server's usage says
    num_ends: Counter[str] = field(default_factory=Counter)  # finish reasons by choice, [DONE]s, events after it
    error: dict[str, Any] | None = None  # the server's error event, or the body that refused the request
    failure: str | None = None  # of the connection, in the client's words
    ended_s: float | None = None  # None: it still runs

    @property
    def said(self) -> tuple[Any, ...]:
        """All that must be the same whenever the same request is answered."""
        return (sorted(self.texts.items()), sorted(self.finish_reasons.items()), self.num_tokens)

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts.values()))

    @property
    def is_complete(self) -> bool:
        """Every choice has its end, and the stream its [DONE]."""
        return self.is_well_formed and self.error is None and self.num_tokens is not None

    @property
    def is_well_formed(self) -> bool:
        """It ended as a client's library expects: with a status of its own, or with one [DONE] and nothing after it."""
        if self.status is None or self.failure is not None:
            return False
        if self.status != 200:
            return self.error is not None
        return self.num_ends == Counter({"done": 1}) + Counter({f"choice {index}": 1 for index in self.finish_reasons})

    @property
    def outcome(self) -> str:
        """`completed`, or in a few words what else."""
        if self.is_complete:
            return "completed"
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"status {self.status}"
        if self.error is not None:
            return f"error event: {self.error.get('code') or self.error.get('type')}"
        return "malformed"

    def longest_pause_s(self, from_s: float, to_s: float) -> float:
        """The longest time without an event, of the pauses that touch this span; from the request to the first, too."""
        moments = [self.begun_s, *self.arrivals_s]
        pauses = [after - before for before, after in pairwise(moments) if after >= from_s and before <= to_s]
        return max(pauses, default=0.0)


async def follow(stream: Stream, target: Target, body: Mapping[str, Any], *, timeout_s: float) -> None:
    """Ask for a completion and fill in the stream as it comes. Never raises for the server's part.

    Cancelling it closes the connection.
    """
    request = target.request("completions", json.dumps(body).encode())
    try:
        async with asyncio.timeout(timeout_s):
            await call(target, request, _StreamReader(stream))
    except TimeoutError:
        stream.failure = TIMEOUT
    except OSError as error:
        stream.failure = "no connection" if stream.status is None else f"cut off: {type(error).__name__}"
    finally:
        stream.ended_s = time.perf_counter()


async def moment(is_now: Callable[[], bool], *, look_s: float = 0.002) -> None:
    """Poll until a condition holds: other processes and answers that fill up send no event."""
    while not is_now():  # noqa: ASYNC110
        await asyncio.sleep(look_s)


class _StreamReader:
    """Fills in a stream from its bytes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events = EventStream()
        self._refusal = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._stream.status, self._stream.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        if self._stream.status != 200:
            self._refusal = (self._refusal + data)[:_MAX_KEPT_BYTES]
            self._stream.error = _error_in(self._refusal)
            return
        for content in self._events.feed(data):
            self._read(content, at_s)

    def _read(self, content: bytes, at_s: float) -> None:
        stream = self._stream
        if stream.num_ends["done"]:
            stream.num_ends["after [DONE]"] += 1
        if content == b"[DONE]":
            stream.num_ends["done"] += 1
            return
        chunk: dict[str, Any] = json.loads(content)
        stream.error = chunk.get("error", stream.error)
        for choice in chunk.get("choices") or ():
            self._read_choice(choice, at_s)
        if chunk.get("usage"):
            stream.num_tokens = chunk["usage"]["completion_tokens"]

    def _read_choice(self, choice: dict[str, Any], at_s: float) -> None:
        stream, index = self._stream, choice["index"]
        stream.arrivals_s.append(at_s)
        stream.texts[index] = stream.texts.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            stream.finish_reasons[index] = choice["finish_reason"]
            stream.num_ends[f"choice {index}"] += 1


def _error_in(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None
