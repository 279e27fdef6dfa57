"""Honest clients of several tenants, and the judgement of what they get: right, in time, nothing lost or doubled.

Every request is fixed by its number, and is answered once while nothing is wrong. With `batch_invariant` each later
answer must say the same, token for token, whatever else the service does meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.figures import percentile
from benchmarks.harness.http_call import EventStream, Target, call

Json = dict[str, Any]

ONLINE_KINDS = ("stream", "tools", "schema", "logprobs")
TIMEOUT_S = 60.0
_CHAT = "chat/completions"
_NUM_DIFFERENT = 24  # requests of each kind; they come again and again
_MAX_TRIES = 8  # of a request that is refused with a 429, as client libraries retry
_BATCH_POLL_S = 1.0
_AFTER_REFUSAL_S = 2.0
_PLACES = ("Oslo", "Lima", "Cairo", "Quito", "Delhi", "Paris", "Sofia", "Tunis")


@dataclass(frozen=True, slots=True)
class HonestRequest:
    """One request that always has the same answer."""

    kind: str
    number: int
    endpoint: str
    body: Json


@dataclass(slots=True)
class Tenant:
    """What one tenant got."""

    name: str
    key: str
    outcomes: Counter[str] = field(default_factory=Counter)
    times_s: list[float] = field(default_factory=list)  # of answers, from the first try to the last byte
    ended_s: list[float] = field(default_factory=list)  # when, by time.monotonic, one for each of `times_s`
    findings: list[Json] = field(default_factory=list)

    def count(self, outcome: str, **details: Any) -> None:
        """Count an outcome; those with details are told, the first twenty of them."""
        self.outcomes[outcome] += 1
        if details and len(self.findings) < 20:
            self.findings.append({"outcome": outcome, **details})

    def times_ms(self, percent: float, from_s: float = 0.0, to_s: float = float("inf")) -> float | None:
        """A percentile of the times of answers that ended in this span."""
        times = [1000 * took for took, at in zip(self.times_s, self.ended_s, strict=True) if from_s <= at < to_s]
        return percentile(times, percent)


def requests_of(kind: str, model: str) -> list[HonestRequest]:
    """The requests of a kind, always the same ones."""
    return [_request(kind, number, model) for number in range(_NUM_DIFFERENT)]


def _request(kind: str, number: int, model: str) -> HonestRequest:
    source = random.Random(f"{kind} {number}")
    place = source.choice(_PLACES)
    question = f"Tell me {number} things about {place}, and what the weather in {place} is like today."
    drawn: Json = {"model": model, "temperature": 0.8, "seed": source.randrange(2**31)}
    chat: Json = drawn | {"messages": [{"role": "user", "content": question}]}
    length = source.randint(16, 64)
    bodies: dict[str, tuple[str, Json]] = {
        "stream": (_CHAT, chat | {"max_completion_tokens": length, "stream": True}),
        "tools": (
            _CHAT,
            chat | {"max_completion_tokens": 64, "tools": [_TOOL], "tool_choice": "required"} | {"stream": number > 9},
        ),
        "schema": (_CHAT, chat | {"max_completion_tokens": 64, "response_format": _SCHEMA}),
        "logprobs": (
            "completions", drawn | {"prompt": question, "max_tokens": length // 2, "logprobs": 3, "n": 2, "echo": True},
        ),
    }  # fmt: skip
    endpoint, body = bodies[kind]
    return HonestRequest(kind, number, endpoint, body)


_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"enum": list(_PLACES)}}, "required": ["place"],
                       "additionalProperties": False},
    },
}  # fmt: skip
_SCHEMA: Json = {
    "type": "json_schema",
    "json_schema": {
        "name": "report",
        "schema": {
            "type": "object",
            "properties": {"place": {"enum": list(_PLACES)}, "warm": {"type": "boolean"}},
            "required": ["place", "warm"],
            "additionalProperties": False,
        },
    },
}


class Reply:
    """Reads one answer into its bytes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.data = bytearray()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        self.data += data

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.data)
        return found

    def said(self) -> Json:
        """What must be the same whenever the request is answered: by choice, the text, calls, tokens and the end.

        Raises:
            ValueError: it is no whole answer.
        """
        if "text/event-stream" not in self.headers.get("content-type", ""):
            return said_by([self.json])
        contents = EventStream().feed(bytes(self.data))
        if not contents or contents[-1] != b"[DONE]" or contents.count(b"[DONE]") != 1:
            raise ValueError("the stream does not end with one [DONE]")
        return said_by([json.loads(content) for content in contents[:-1]])


def said_by(documents: Sequence[Json]) -> Json:
    """See `Reply.said`: of an answer, or of all chunks of a stream. Raises ValueError."""
    said: Json = {}
    for document in documents:
        if "error" in document:
            raise ValueError(f"an error event: {document['error']}")
        for choice in document.get("choices", ()):
            own = said.setdefault(str(choice["index"]), {"text": "", "calls": "", "tokens": [], "ends": []})
            message = choice.get("message") or choice.get("delta") or choice
            own["text"] += message.get("content") or message.get("text") or ""
            for each in message.get("tool_calls") or ():
                function = each["function"]
                own["calls"] += (function.get("name") or "") + (function.get("arguments") or "")
            own["tokens"] += (choice.get("logprobs") or {}).get("tokens") or ()
            own["ends"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    if not said or any(len(own["ends"]) != 1 for own in said.values()):
        raise ValueError("a choice has no end, or two")
    return said


class Client:
    """Sends the requests of one tenant and judges what comes back. In one event loop."""

    def __init__(self, target: Target, tenant: Tenant, *, model: str) -> None:
        self.tenant = tenant
        self.patience_ends_s = float("inf")  # by time.monotonic: when batches that have not ended count as lost
        self._target = target
        self._model = model
        self._auth = {"Authorization": f"Bearer {tenant.key}"}
        self._reference: dict[tuple[str, int], Json] = {}

    async def learn(self, kinds: Sequence[str]) -> None:
        """Ask everything once while nothing is wrong. Raises BenchmarkError when something is not answered."""
        for kind in kinds:
            for request in requests_of(kind, self._model):
                reply = await self._sent(request)
                try:
                    self._reference[kind, request.number] = reply.said()
                except (ValueError, KeyError) as error:
                    text = f"{kind} {request.number}: status {reply.status}, {error}: {bytes(reply.data[:500])!r}"
                    raise BenchmarkError(text) from error

    async def keep_asking(self, kind: str, *, pause_s: float, until: asyncio.Event) -> None:
        """One request after the other, with pauses between them."""
        requests, source = requests_of(kind, self._model), random.Random(f"{self.tenant.name} {kind}")
        while not until.is_set():
            await self.ask(source.choice(requests))
            await asyncio.sleep(source.uniform(0, 2 * pause_s))

    async def ask(self, request: HonestRequest) -> None:
        """One request, again where it is refused, and the judgement of its answer."""
        began = time.monotonic()
        for _ in range(_MAX_TRIES):
            try:
                reply = await self._sent(request)
            except TimeoutError:
                self.tenant.count("hung", kind=request.kind)
                return
            except OSError as error:
                self.tenant.count("cut_off", kind=request.kind, error=str(error))
                return
            if reply.status != 429:
                break
            self.tenant.count("refused_and_tried_again")
            await asyncio.sleep(min(5.0, float(reply.headers.get("retry-after", 1))))
        self._judge(request, reply, time.monotonic() - began)

    def _judge(self, request: HonestRequest, reply: Reply, took_s: float) -> None:
        if reply.status != 200:
            self.tenant.count(f"status {reply.status}", kind=request.kind, answer=reply.data[:300].decode())
            return
        try:
            said = reply.said()
        except (ValueError, KeyError) as error:
            self.tenant.count("broken", kind=request.kind, error=str(error))
            return
        expected = self._reference[request.kind, request.number]
        if said != expected:
            self.tenant.count("wrong", kind=request.kind, number=request.number, said=said, expected=expected)
            return
        self.tenant.count("right")
        self.tenant.times_s.append(took_s)
        self.tenant.ended_s.append(time.monotonic())

    async def _sent(self, request: HonestRequest) -> Reply:
        return await self._call(self._target.request(request.endpoint, json.dumps(request.body).encode(), self._auth))

    async def _call(self, request: bytes) -> Reply:
        reply = Reply()
        async with asyncio.timeout(TIMEOUT_S):
            await call(self._target, request, reply)
        return reply

    async def keep_batching(self, num_items: int, *, until: asyncio.Event) -> None:
        """One batch after the other."""
        number = 0
        while not until.is_set():
            await self.batch(number, num_items)
            number += 1

    async def batch(self, number: int, num_items: int) -> None:
        """One batch from upload to its output file; each item's answer should be that of the same request alone."""
        requests, url = requests_of("schema", self._model), f"/v1/{_CHAT}"
        lines: list[Json] = [
            {"custom_id": f"{number}-{item}", "method": "POST", "url": url, "body": requests[item % len(requests)].body}
            for item in range(num_items)
        ]
        try:
            batch, output = await self._ended_batch("\n".join(map(json.dumps, lines)), url)
        except TimeoutError:
            self.tenant.count("batch_not_ended", number=number)
        else:
            self._judge_batch(batch, output, [line["custom_id"] for line in lines])

    async def _ended_batch(self, lines: str, url: str) -> tuple[Json, str]:
        """The batch object, and the output file; both files are deleted then."""
        file = (await self._patiently(self._upload(lines.encode()))).json
        asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        body = json.dumps(asked).encode()
        batch = (await self._patiently(self._target.request("batches", body, self._auth))).json
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(_BATCH_POLL_S)
            batch = (await self._patiently(self._request("GET", f"batches/{batch['id']}"))).json
        output_id, output = batch.get("output_file_id"), ""
        if output_id:
            output = (await self._patiently(self._request("GET", f"files/{output_id}/content"))).data.decode()
        for file_id in filter(None, (file["id"], output_id)):
            await self._patiently(self._request("DELETE", f"files/{file_id}"), fine=(200, 404))
        return batch, output

    async def _patiently(self, request: bytes, *, fine: Sequence[int] = (200,)) -> Reply:
        """A fine answer; after any other the request is sent again. Raises TimeoutError when the patience ends."""
        while time.monotonic() < self.patience_ends_s:
            try:
                reply = await self._call(request)
            except (OSError, TimeoutError):
                outcome = "no answer"
            else:
                if reply.status in fine:
                    return reply
                outcome = f"{reply.status}"
                if reply.status == 500:
                    self.tenant.count(
                        "batch_call: 500", request=request[:60].decode(), answer=reply.data[:300].decode()
                    )
            self.tenant.outcomes[f"batch_call_tried_again: {outcome}"] += 1
            await asyncio.sleep(_AFTER_REFUSAL_S)
        raise TimeoutError

    def _judge_batch(self, batch: Json, output: str, custom_ids: Sequence[str]) -> None:
        records = [json.loads(line) for line in output.splitlines()]
        found = Counter(record["custom_id"] for record in records)
        faults = {
            "lost": sum(custom_id not in found for custom_id in custom_ids),
            "doubled": sum(number > 1 for number in found.values()),
            "wrong": sum(not self._is_right(record) for record in records),
        }
        if batch["status"] == "completed" and not any(faults.values()):
            self.tenant.outcomes["batch_right"] += 1
            self.tenant.outcomes["items_right"] += len(custom_ids)
        else:
            self.tenant.count("batch_wrong", status=batch["status"], errors=batch.get("errors"), **faults)

    def _is_right(self, record: Json) -> bool:
        """Whether a line of an output file says what the same request says alone."""
        number = int(record["custom_id"].partition("-")[2]) % _NUM_DIFFERENT
        try:
            return said_by([record["response"]["body"]]) == self._reference["schema", number]
        except (ValueError, KeyError):
            return False

    def _upload(self, content: bytes) -> bytes:
        border = uuid.uuid4().hex
        part = f'--{border}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
        head = part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="lines.jsonl"')
        body = head.encode() + content + f"\r\n--{border}--\r\n".encode()
        as_json, as_form = "application/json", f"multipart/form-data; boundary={border}"
        request = self._target.request("files", body, self._auth)
        return request.replace(as_json.encode(), as_form.encode(), 1)

    def _request(self, method: str, path: str) -> bytes:
        head = (
            f"{method} {self._target.path}/{path} HTTP/1.1\r\nHost: {self._target.host}:{self._target.port}\r\n"
            f"Authorization: Bearer {self.tenant.key}\r\nConnection: close\r\n\r\n"
        )
        return head.encode()
