"""What a client sees of one streamed answer: its status, and when tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.http_call import EventStream, Target, call

TIMEOUT = "timeout"
MAX_KEPT_BYTES = 4096  # of an answer that is no stream


@dataclass(slots=True)
class Answer:
    """One request and what came of it. Times are in seconds of one clock."""

    begun_s: float  # when the client turned to it; the connection is made after that
    status: int | None = None  # None: no answer at all
    headers: Mapping[str, str] = field(default_factory=dict)
    delivered_s: list[float] = field(default_factory=list)  # once for each arrival of one or more pieces of text
    num_pieces: int = 0
    num_reported_tokens: int | None = None  # as the server's usage says
    is_whole: bool = False
    failure: str | None = None  # in the server's words or the client's
    ended_s: float = 0.0

    @property
    def has_succeeded(self) -> bool:
        return self.status == 200 and self.is_whole and self.failure is None and bool(self.delivered_s)

    @property
    def num_tokens(self) -> int:
        """As the server counts them; where it does not, pieces of text."""
        return self.num_pieces if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def outcome(self) -> str:
        """`answered`, the status that refused it, or what went wrong."""
        if self.has_succeeded:
            return "answered"
        if self.failure == TIMEOUT:
            return TIMEOUT
        if self.status is None:
            return "no_connection"
        if self.status != 200:
            return str(self.status)
        return "no_text" if self.is_whole and self.failure is None else "broken_stream"

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one delivery and the next."""
        return [after - before for before, after in zip(self.delivered_s, self.delivered_s[1:], strict=False)]


async def ask(target: Target, request: bytes, *, timeout_s: float) -> Answer:
    """Send a streaming request of the OpenAI API and follow its answer to the end. Never raises for the server's part.

    request: as `Target.request` makes it.
    """
    answer = Answer(begun_s=time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s):
            await call(target, request, _AnswerReader(answer))
    except TimeoutError:
        answer.failure = TIMEOUT
    except OSError as error:
        answer.failure = str(error) or type(error).__name__
    answer.ended_s = time.perf_counter()
    return answer


class _AnswerReader:
    """Fills in an answer from its bytes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = EventStream()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._answer.status, self._answer.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        answer = self._answer
        if answer.status != 200:
            answer.failure = ((answer.failure or "") + data.decode(errors="replace"))[:MAX_KEPT_BYTES]
            return
        num_pieces = answer.num_pieces
        for content in self._events.feed(data):
            self._read(content)
        if answer.num_pieces > num_pieces:
            answer.delivered_s.append(at_s)

    def _read(self, content: bytes) -> None:
        if content == b"[DONE]":
            self._answer.is_whole = True
            return
        try:
            chunk: Any = json.loads(content)
        except ValueError:
            self._answer.failure = f"an event is no JSON: {content[:200]!r}"
            return
        if "error" in chunk:
            self._answer.failure = json.dumps(chunk["error"])[:MAX_KEPT_BYTES]
        if any(map(_has_text, chunk.get("choices") or ())):
            self._answer.num_pieces += 1
        usage = chunk.get("usage")
        if usage:
            self._answer.num_reported_tokens = usage.get("completion_tokens")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
