"""Clients of stored responses, chats and completions, which resume a broken stream after the last event received."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.chaos.traffic import KINDS, MODEL_NAME, Asked, Traffic
from benchmarks.harness.answer import TIMEOUT, Answer, AnswerReader
from benchmarks.harness.http_call import EventStream, Target, call

_RESPONSES, _CHATS, _COMPLETIONS = "responses", "chat/completions", "completions"
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_GO_ON_AFTER_S = 0.2


def kept(requests: Sequence[Asked]) -> list[Asked]:
    """Return requests for stored answers: for each kind in turn a response, a chat and a completion. Completions equal
    the given requests. Responses and chats have a new text, a seed and the length of the given request."""
    endpoints = (_RESPONSES, _CHATS, _COMPLETIONS)
    return [
        _kept(endpoints[place // len(KINDS) % len(endpoints)], place, asked) for place, asked in enumerate(requests)
    ]


def _kept(endpoint: str, place: int, asked: Asked) -> Asked:
    name, text, length = f"{endpoint} {asked.name}", f"Tell of {place}.", asked.body["max_tokens"]
    usual = {"model": MODEL_NAME, "stream": True, "store": True, "temperature": 1, "seed": place}
    if endpoint == _RESPONSES:
        return Asked(name, "kept", usual | {"input": text, "background": True, "max_output_tokens": length})
    if endpoint == _CHATS:
        more = {"messages": [{"role": "user", "content": text}], "max_tokens": length}
        return Asked(name, "kept", usual | more | {"stream_options": {"include_usage": True}})
    return replace(asked, name=name, body=asked.body | {"store": True})


def _endpoint_of(body: Mapping[str, Any]) -> str:
    return _RESPONSES if "input" in body else _CHATS if "messages" in body else _COMPLETIONS


def going_on(target: Target, endpoint: str, last_id: str, headers: Mapping[str, str]) -> bytes:
    """Return the request for the events that follow the event with this id."""
    path = f"{endpoint}/{last_id.rpartition(':')[0]}"
    return target.request(path, b"", {**headers, "Last-Event-ID": last_id}, method="GET")


@dataclass(slots=True)
class KeptTraffic(Traffic):
    """Clients that resume broken streams. `num_breaks` counts connections that broke before the end of an answer."""

    num_breaks: int = 0

    async def ask(self, asked: Asked) -> Answer:
        """Send one request and follow its answer to the end, over several connections if necessary."""
        answer = Answer(time.perf_counter(), name=asked.name)
        self.answers.append(answer)
        reader, endpoint = _EventReader(answer), _endpoint_of(asked.body)
        request = self.target.request(endpoint, asked.body)
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
                    if not reader.last_id:  # no event has arrived: the client may send the request again
                        if broken is not None:
                            answer.failure = "no connection"
                        return answer
                    self.num_breaks += 1
                    await asyncio.sleep(_GO_ON_AFTER_S)
                    request = going_on(self.target, endpoint, reader.last_id, {})
        except TimeoutError:
            answer.failure = TIMEOUT
        finally:
            answer.ended_s = time.perf_counter()
        return answer


class _EventReader(AnswerReader):
    """Updates an answer from its events, over several connections."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.last_id = ""
        self._num_read = 0
        self._status = 0

    def begin(self) -> None:
        """Prepare for a new connection."""
        self._events = EventStream()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        if not self.last_id:
            super().head(status, headers)

    def body(self, data: bytes, *, at_s: float) -> None:
        if self.last_id and self._status != 200:
            return  # the client asks again
        super().body(data, at_s=at_s)
        if self._events.last_id:
            self.last_id = self._events.last_id
            # If the numbers differ, an event is missing or has arrived twice.
            self._answer.has_surplus |= self.last_id.rpartition(":")[2] != f"{self._num_read - 1}"

    def _read(self, content: bytes, at_s: float) -> None:
        self._num_read += 1
        event = {} if content == b"[DONE]" else json.loads(content)
        if not event.get("type", "").startswith("response."):
            super()._read(content, at_s)
            return
        answer = self._answer
        answer.events_s.append(at_s)
        if event["type"] == "response.output_text.delta":
            answer.texts[0] = answer.texts.get(0, "") + event["delta"]
            answer.num_pieces += 1
        if event["type"] in _ENDS:
            answer.is_done = True
            answer.finish_reasons[0] = event["response"]["status"]
            answer.error = event["response"]["error"]
            answer.num_reported_tokens = (event["response"]["usage"] or {}).get("output_tokens")
