"""Clients of responses that are kept: where their connection breaks they read on behind the last event that came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic
from benchmarks.harness.answer import TIMEOUT, Answer
from benchmarks.harness.http_call import EventStream, call

_ENDS = ("response.completed", "response.incomplete", "response.failed")
_READ_ON_AFTER_S = 0.2


def kept(requests: Sequence[Asked]) -> list[Asked]:
    """The same prompts and lengths as responses that are kept, each with a seed."""
    return [
        Asked(
            asked.name,
            "kept",
            {
                "model": MODEL_NAME, "input": f"Tell {place} of {len(requests)}.", "stream": True, "store": True,
                "background": True, "temperature": 1, "seed": place, "max_output_tokens": asked.body["max_tokens"],
            },
        )
        for place, asked in enumerate(requests)
    ]  # fmt: skip


@dataclass(slots=True)
class KeptTraffic(Traffic):
    """`num_breaks` counts connections that broke before the end of a response."""

    num_breaks: int = 0

    async def ask(self, asked: Asked) -> Answer:
        """One response, to its end, over as many connections as that takes."""
        answer = Answer(time.perf_counter(), name=asked.name)
        self.answers.append(answer)
        reader = _EventReader(answer)
        request = self.target.request("responses", asked.body)
        try:
            async with asyncio.timeout(self.timeout_s):
                while not answer.is_done:
                    reader.begin()
                    broken: OSError | None = None
                    try:
                        await call(self.target, request, reader)
                    except OSError as error:
                        broken = error
                    if answer.is_done:
                        break
                    if reader.response_id is None:  # nothing is known of it: it may be sent again
                        if broken is not None:
                            answer.failure = "no connection"
                        return answer
                    self.num_breaks += 1
                    await asyncio.sleep(_READ_ON_AFTER_S)
                    path = f"responses/{reader.response_id}?stream=true&starting_after={reader.last_number}"
                    request = self.target.request(path, b"", method="GET")
        except TimeoutError:
            answer.failure = TIMEOUT
        finally:
            answer.ended_s = time.perf_counter()
        return answer


class _EventReader:
    """Fills in an answer from the events of a response, over all its connections."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.response_id: str | None = None
        self.last_number = -1
        self.begin()

    def begin(self) -> None:
        """Another connection."""
        self._events = EventStream()
        self._status = 0

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        if self.response_id is None:
            self._answer.status, self._answer.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        if self._status != 200:
            if self.response_id is None:
                self._answer.refusal += data
            return
        for content in self._events.feed(data):
            self._read(json.loads(content), at_s)

    def _read(self, event: dict[str, Any], at_s: float) -> None:
        answer = self._answer
        answer.has_surplus |= event["sequence_number"] != self.last_number + 1  # one is missing, or came twice
        self.last_number = event["sequence_number"]
        answer.events_s.append(at_s)
        if "response" in event:
            self.response_id = event["response"]["id"]
        if event["type"] == "response.output_text.delta":
            answer.texts[0] = answer.texts.get(0, "") + event["delta"]
            answer.num_pieces += 1
            answer.delivered_s.append(at_s)
        if event["type"] in _ENDS:
            answer.is_done = True
            answer.finish_reasons[0] = event["response"]["status"]
            answer.error = event["response"]["error"]
            answer.num_reported_tokens = (event["response"]["usage"] or {}).get("output_tokens")
