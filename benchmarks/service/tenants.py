"""Honest tenants: they send requests of all kinds and judge the answers.

Each request has words of its own (`canaries.py`), and all other answers are searched for these words. Half of the
requests repeat an earlier one: with `batch_invariant` both answers must be equal, token for token, under any load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from app.text import Tokenizer
from app.usage import Used
from benchmarks.chaos.kept import going_on
from benchmarks.harness.figures import percentile
from benchmarks.harness.http_call import EventStream, Target, call
from benchmarks.service.canaries import (
    GREEDY_TEXT,
    KEPT,
    KINDS,
    Heard,
    Json,
    Prefixes,
    Question,
    Secrets,
    heard,
    question,
)

BLOCK_SIZE = 16
DOCUMENTS = "documents"  # the pipeline that selects some of the documents of a request
# Good outcomes. `gone_on`: a broken stream was resumed behind its last event. `sent_again`: the request was repeated
# because the connection broke before any event, or because no process could take the request.
FINE = frozenset(("right", "left", "batch_right", "items_right", "tried_again", "gone_on", "sent_again"))
TIMEOUT_S = 60.0
_RETRY_S = 0.25  # after a refusal or a broken connection
_MOST_CALLS = 8  # upper bound of model calls for one request
_MAX_EARLIER = 300  # requests that a tenant remembers to send again
_MAX_TOLD = 20  # findings reported for a tenant
_BATCH_POLL_S, _AFTER_REFUSAL_S = 1.0, 2.0
_CHAT = "chat/completions"
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class ItemResponse:
    """A right answer: when it was complete, and the time since the first try after the last broken connection."""

    at_s: float
    took_s: float
    kind: str
    model: str
    num_tries: int


@dataclass(slots=True)
class Found:
    """The results of one tenant."""

    outcomes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)  # searched answers, by kind
    own: Counter[str] = field(default_factory=Counter)  # searched answers in which their own secret was found
    answered: list[ItemResponse] = field(default_factory=list)
    details: list[Json] = field(default_factory=list)
    num_cached: int = 0  # answers with `cached_tokens`
    num_greedy: int = 0
    num_sang: int = 0  # greedy answers that say their own secret word by word
    used: Used = field(default_factory=Used)  # the sum of the usage in answers
    may_have_used: Used = field(default_factory=Used)  # upper bound for tries without an answer

    def count(self, outcome: str, **details: Any) -> None:
        """Count an outcome, and store the details of the first outcomes."""
        self.outcomes[outcome] += 1
        if len(self.details) < _MAX_TOLD:
            self.details.append({"outcome": outcome, **details})

    def times_ms(self, percent: float, from_s: float = 0.0, to_s: float = float("inf")) -> float | None:
        """Return a percentile of the times of answers that ended from `from_s` until before `to_s`."""
        return percentile([1000 * each.took_s for each in self.answered if from_s <= each.at_s < to_s], percent)


class Reply:
    """Reads the bytes of one answer until its client disconnects."""

    def __init__(self, leaves_after: int | None = None, known: bytes = b"") -> None:
        """`known` holds the events of an earlier, broken connection."""
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.data = bytearray(known)
        self.on_enough: Any = lambda: None
        self._leaves_after = leaves_after

    @property
    def has_enough(self) -> bool:
        return self._leaves_after is not None and len(self.data) >= self._leaves_after

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        self.data += data
        if self.has_enough:
            self.on_enough()

    @property
    def events(self) -> bytes:
        """The bytes of the complete events."""
        return bytes(self.data[: self.data.rfind(b"\n\n") + 2]) if b"\n\n" in self.data else b""

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.data)
        return found

    def heard(self, asked: Question) -> Heard:
        """Return the content, incomplete if the client has left. Raises ValueError if the answer is malformed."""
        if not asked.is_stream:
            return heard([self.json]) if not self.has_enough else Heard()
        stream = EventStream()
        events = stream.feed(bytes(self.data))
        if asked.is_kept and stream.last_id.rpartition(":")[2] != f"{len(events) - 1}":
            raise ValueError("an event of a stored stream is missing, or came twice")
        found = heard(json.loads(content) for content in events if content.startswith(b"{"))
        if not self.has_enough and asked.endpoint in (_CHAT, "completions"):
            if events[-1:] != [b"[DONE]"] or events.count(b"[DONE]") != 1:
                raise ValueError("the stream does not end with one [DONE]")
            if not found.num_ends or set(found.num_ends.values()) != {1}:
                raise ValueError("a choice has no end, or two")
        return found


class Tenants:
    """All tenants, in one event loop."""

    def __init__(
        self,
        target: Target,
        keys: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        models: Sequence[str],
        pipelines: Mapping[str, Sequence[str]] = MappingProxyType({}),
        kinds: Sequence[str] = KINDS,
        seed: int,
        keeps: bool = False,
    ) -> None:
        """`keys` are by tenant. Requests name one of `models`, or a pipeline: `pipelines` maps names to their models.

        `keeps` stores all streams whose kind can be stored.
        """
        self.found = {name: Found() for name in keys}
        self.patience_ends_s = float("inf")  # by time.monotonic; later, batches count as lost and refusals are final
        self.may_break = False  # whether connections may break, because an ingress was killed
        self._keeps = keeps
        self._target = target
        self._keys = keys
        self._tokenizer = tokenizer
        self._models = models
        self._pipelines = tuple(pipelines)
        self._kinds = kinds
        self._source = random.Random(seed)
        self._secrets = Secrets(self._source)
        self._prefixes = Prefixes(BLOCK_SIZE, {**{each: (each,) for each in models}, **pipelines})
        self._earlier: dict[str, list[Question]] = {name: [] for name in keys}
        self._said: dict[int, Heard] = {}  # the first answer, by the number of the question
        self._num_secrets = 0

    async def keep_asking(self, tenant: str, *, pause_s: float, until: asyncio.Event) -> None:
        """Send requests one after the other until `until` is set, with pauses of `pause_s` on average."""
        while not until.is_set():
            await self.ask(self.next_question(tenant))
            await asyncio.sleep(self._source.uniform(0, 2 * pause_s))

    def next_question(self, tenant: str) -> Question:
        """Return a new question or, half of the time, an earlier one."""
        kind, earlier = self._source.choice(self._kinds), self._earlier[tenant]
        if earlier and self._source.random() < 0.5:
            return self._source.choice(earlier)
        is_kept = self._keeps and kind in KEPT
        secrets = []
        for _ in range(2 if kind == "batch" else 1):
            self._num_secrets += 1
            secrets.append(self._secrets.new(self._num_secrets))
        # Half of the new questions have an unused salt: none of their tokens may be cached.
        salt = self._source.choice([None, "mine", f"{self._num_secrets}", f"{self._num_secrets}"])
        asked = question(
            kind, number=self._num_secrets, tenant=tenant, salt=salt, secrets=secrets, source=self._source,
            model=self._source.choice(self._models if is_kept else self._names_for(kind)),
            prompt_ids=self._tokenizer.encode_chat(secrets[0].messages), is_kept=is_kept,
        )  # fmt: skip
        if kind != "abort" and len(earlier) < _MAX_EARLIER:
            earlier.append(asked)
        return asked

    def _names_for(self, kind: str) -> Sequence[str]:
        """Return the names that a request of a kind may ask for. Background and aborted requests use no pipeline: no
        answer would report the steps that ran before a retry or before the client left."""
        if kind == "documents" and self._pipelines:
            return (DOCUMENTS,)
        if kind in ("ranking", "background", "abort"):
            return self._models
        return (*self._models, *(name for name in self._pipelines if name != DOCUMENTS))

    async def ask(self, asked: Question) -> None:
        """Send one request, repeat it if it is refused, and judge its answer."""
        found = self.found[asked.tenant]
        tools = asked.body.get("tools")
        prompts = [self._tokenizer.encode_chat(each, tools=tools) for each in asked.conversations]
        self._prefixes.add(asked, prompts)
        num_prompt, num_output = sum(map(len, prompts)), max(map(asked.body.get, _MAX_TOKENS, itertools.repeat(0)))
        unknown = Used(num_prompt_tokens=_MOST_CALLS * num_prompt, num_output_tokens=_MOST_CALLS * num_output)
        try:
            reply, num_tries, began_s = await self._answer(asked, prompts, unknown)
        except TimeoutError:
            found.count("hung", kind=asked.kind)
            return
        except OSError as error:
            found.count("cut_off", kind=asked.kind, error=str(error))
            return
        if reply.status != 200:
            found.count(f"status {reply.status}", kind=asked.kind, answer=reply.data[:300].decode(errors="replace"))
            return
        try:
            answer = reply.heard(asked)
        except (ValueError, KeyError) as error:
            found.count("broken", kind=asked.kind, error=str(error))
            return
        if reply.has_enough:
            answer.used = Used(num_prompt_tokens=num_prompt)
            found.may_have_used += Used(num_output_tokens=num_output)
        found.used += answer.used
        self._search(asked, answer, max(self._prefixes.num_explained(asked, each) for each in prompts))
        if reply.has_enough:
            found.outcomes["left"] += 1
            return
        expected = self._said.setdefault(asked.number, answer)
        if (answer.texts, answer.ids) != (expected.texts, expected.ids):
            found.count("wrong", kind=asked.kind, said=answer.texts, expected=expected.texts)
            return
        found.outcomes["right"] += 1
        now = time.monotonic()
        found.answered.append(ItemResponse(now, now - began_s, asked.kind, asked.body["model"], num_tries))

    def _search(self, asked: Question, answer: Heard, num_explained: int) -> None:
        """Search an answer for words of other requests, and for cached tokens that no own request explains."""
        found, own = self.found[asked.tenant], {each.owner for each in asked.secrets}
        texts = [*answer.texts, answer.around, *(self._tokenizer.decode(each) for each in answer.ids)]
        owners = set().union(*map(self._secrets.owners_in, texts))
        found.answers[asked.kind] += 1
        found.own[asked.kind] += owners >= own
        if owners - own:
            found.count("leaked", kind=asked.kind, owners=sorted(owners - own)[:5], texts=texts[:3])
        if answer.cached_tokens:
            found.num_cached += 1
            if answer.cached_tokens > num_explained:
                told = {"cached": answer.cached_tokens, "explained": num_explained, "salt": asked.salt}
                found.count("unexplained", kind=asked.kind, **told)
        if asked.kind in GREEDY_TEXT and asked.leaves_after is None:
            found.num_greedy += 1
            found.num_sang += answer.first == asked.secrets[0].sentence

    async def _answer(
        self, asked: Question, prompts: Sequence[Sequence[int]], unknown: Used
    ) -> tuple[Reply, int, float]:
        """Return the last reply, the number of tries, and the start of the first try after the last broken connection.

        `unknown` is the most that a try without an answer can have used. Raises OSError or TimeoutError if the last try
        got no reply.
        """
        found, headers = self.found[asked.tenant], self._auth(asked.tenant)
        first = request = self._target.request(asked.endpoint, asked.body, headers)
        began_s, known, num_tries = time.monotonic(), b"", 0
        while True:
            num_tries += 1
            reply, broken = Reply(asked.leaves_after, known), None
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    sending = asyncio.create_task(call(self._target, request, reply))
                    reply.on_enough = sending.cancel
                    try:
                        await sending
                    except asyncio.CancelledError:
                        if not reply.has_enough:
                            raise
            except OSError as error:
                if isinstance(error, TimeoutError) and not asked.is_kept:
                    raise
                broken = error
            is_refused = broken is None and reply.status == 429
            is_gone = self.may_break or (asked.is_kept and (broken is not None or reply.status == 503))
            is_answered = broken is None and reply.status == 200
            if is_answered or not (is_refused or is_gone) or time.monotonic() > self.patience_ends_s:
                break
            if is_refused:
                found.outcomes["tried_again"] += 1
            else:
                began_s = began_s if isinstance(broken, TimeoutError) else time.monotonic()
                self._prefixes.add(asked, prompts)  # the broken try may have filled the cache
                if asked.is_kept and reply.status == 200:
                    known = reply.events
                last_id = _last_id(known)
                request = going_on(self._target, asked.endpoint, last_id, headers) if last_id else first
                found.outcomes["gone_on" if last_id else "sent_again"] += 1
            if request is first and (broken is not None or self.may_break or asked.body["model"] not in self._models):
                found.may_have_used += unknown  # earlier steps of a pipeline may have run
            await asyncio.sleep(_AFTER_REFUSAL_S if is_gone and request is first else _RETRY_S)
        if broken is not None:
            raise broken
        return reply, num_tries, began_s

    def _auth(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[tenant]}"}

    # ------------------------------------------------------------------ batches

    async def keep_batching(self, tenant: str, num_items: int, *, until: asyncio.Event) -> None:
        """Run one batch after the other until `until` is set, of requests that were answered before."""
        number = 0
        while not until.is_set():
            items = [each for each in self._earlier[tenant] if each.kind == "whole" and each.number in self._said]
            if items:
                await self.batch(tenant, number, [items[at % len(items)] for at in range(num_items)])
                number += 1
            else:
                await asyncio.sleep(_BATCH_POLL_S)

    async def batch(self, tenant: str, number: int, items: Sequence[Question]) -> None:
        """Run one batch from upload to output file; each item must be answered like the same request alone."""
        url, expected = f"/v1/{_CHAT}", {f"{number}-{at}": self._said[each.number] for at, each in enumerate(items)}
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": url, "body": each.body})
            for name, each in zip(expected, items, strict=True)
        ]
        try:
            batch, output = await self._ended_batch(tenant, "\n".join(lines), url)
        except TimeoutError:
            self.found[tenant].count("batch_not_ended", number=number)
        else:
            self.judge_batch(tenant, batch, output, expected)

    async def _ended_batch(self, tenant: str, lines: str, url: str) -> tuple[Json, str]:
        """Return the ended batch object and the content of the output file; delete both files."""
        file = (await self._patiently(tenant, "POST", "files", *_form(lines.encode()))).json
        asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = (await self._patiently(tenant, "POST", "batches", json.dumps(asked).encode())).json
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(_BATCH_POLL_S)
            batch = (await self._patiently(tenant, "GET", f"batches/{batch['id']}")).json
        output_id, output = batch.get("output_file_id"), ""
        if output_id:
            output = (await self._patiently(tenant, "GET", f"files/{output_id}/content")).data.decode()
        for file_id in filter(None, (file["id"], output_id)):
            await self._patiently(tenant, "DELETE", f"files/{file_id}", fine=(200, 404))
        return batch, output

    async def _patiently(
        self, tenant: str, method: str, path: str, body: bytes = b"", kind: str = "application/json",
        fine: Sequence[int] = (200,),
    ) -> Reply:  # fmt: skip
        """Send a request until its status is in `fine`. Raises TimeoutError at `patience_ends_s`."""
        request = self._target.request(path, body, self._auth(tenant) | {"Content-Type": kind}, method=method)
        found = self.found[tenant]
        while time.monotonic() < self.patience_ends_s:
            reply = Reply()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await call(self._target, request, reply)
            except (OSError, TimeoutError):
                pass
            else:
                if reply.status in fine:
                    return reply
                if reply.status == 500 and not self.may_break:
                    found.count("batch_call: 500", call=f"{method} {path}", answer=reply.data[:300].decode())
            found.outcomes["tried_again"] += 1
            await asyncio.sleep(_AFTER_REFUSAL_S)
        raise TimeoutError

    def judge_batch(self, tenant: str, batch: Json, output: str, expected: Mapping[str, Heard]) -> None:
        """Check that each item has one line with the expected answer, and count the outcome."""
        records = [json.loads(line) for line in output.splitlines()]
        found = Counter(record["custom_id"] for record in records)
        faults = {
            "lost": sum(custom_id not in found for custom_id in expected),
            "doubled": sum(number > 1 for number in found.values()),
            "wrong": sum(not _says(record, expected) for record in records),
        }
        bodies = [(record.get("response") or {}).get("body") for record in records]
        self.found[tenant].used += sum((heard([body]).used for body in bodies if body and "error" not in body), Used())
        if batch["status"] == "completed" and not any(faults.values()):
            self.found[tenant].outcomes["batch_right"] += 1
            self.found[tenant].outcomes["items_right"] += len(expected)
        else:
            self.found[tenant].count("batch_wrong", status=batch["status"], errors=batch.get("errors"), **faults)


def _last_id(events: bytes) -> str:
    stream = EventStream()
    stream.feed(events)
    return stream.last_id


def _says(record: Json, expected: Mapping[str, Heard]) -> bool:
    try:
        return heard([record["response"]["body"]]).texts == expected[record["custom_id"]].texts
    except (ValueError, KeyError):
        return False


def _form(content: bytes) -> tuple[bytes, str]:
    """Return the body of a file upload, and its content type."""
    border = uuid.uuid4().hex
    part = f'--{border}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="lines.jsonl"')
    return head.encode() + content + f"\r\n--{border}--\r\n".encode(), f"multipart/form-data; boundary={border}"
