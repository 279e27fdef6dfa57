"""Makes requests that no honest client sends, and sends them. The body of every endpoint is made wrong, huge, deep or
broken, and the HTTP itself is broken."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.endpoints.table import ENDPOINTS
from benchmarks.harness.http_call import Target
from benchmarks.service.field_bodies import minimal_bodies

HOST = "127.0.0.1"
MAX_TEXT = 1_000_000  # characters of one string: many such strings fit into the default limit of a body
MAX_DEPTH = 100_000
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # may come before an answer
_SMALL, _OFTEN = 20_000, 0.98  # most strings have at most `_SMALL` characters: a run should not only copy bytes

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 2, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1, "n": 1,
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "stream": False,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "tool_choice": "none", "chat_template_kwargs": {}, "documents": ["one", {"text": "two"}],
    },
    "/v1/completions": {
        "prompt": ["one two", "three"], "max_tokens": 2, "logprobs": 1, "echo": True, "best_of": 1, "stop": "y",
        "stop_token_ids": [7], "bad_words": ["bad"], "ignore_eos": True, "truncate_prompt_tokens": 50, "priority": 0,
        "truncation_side": "right", "no_stop_trim": True,
        "stream": True, "stream_options": {"include_usage": True}, "user": "a-user", "deadline_s": 30,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": "Hi"}], "instructions": "Be short.", "max_output_tokens": 2,
        "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "store": False, "documents": ["one"],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "data": "one"}, "title": "two"},
            {"type": "text", "text": "Hi"},
        ]}], "system": "Be short.",
        "max_tokens": 2, "stop_sequences": ["x"], "metadata": {"user_id": "a"}, "tool_choice": {"type": "none"},
        "tools": [{"name": "look", "input_schema": {"type": "object"}}], "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}], "system": "Be short."},
    "/v1/embeddings": {
        "input": ["one", "two"], "encoding_format": "base64", "dimensions": 4, "normalize": False,
        "truncate_prompt_tokens": 3, "truncation_side": "left",
    },
    "/v1/rerank": {
        "query": "one", "documents": ["one two", {"text": "three"}], "top_n": 1, "return_documents": True,
        "max_tokens_per_doc": 5, "truncate_prompt_tokens": -1, "use_activation": False,
    },
    "/v1/score": {"queries": "one", "documents": ["one two", "three"], "truncate_prompt_tokens": 9},
    "/v1/decisions": {
        "input": [{"role": "user", "content": "one two"}],
        "questions": [
            {"type": "predicate", "instructions": "one?", "name": "a"},
            {"type": "choice", "instructions": "?", "choices": [{"value": "x", "description": "y"}, {"value": True}]},
            {"type": "score", "instructions": "how?", "levels": [{"label": "low"}, {"label": "high"}]},
        ],
    },
    "/admin/adapters": {"name": "support", "path": "/nowhere", "model": "simulated"},
    "/tokenize": {"prompt": "one two", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}  # fmt: skip
VALID |= {path: body for path, body in minimal_bodies().items() if path in ENDPOINTS.keys() - VALID}
_GENERATING = [path for path, endpoint in ENDPOINTS.items() if endpoint.generates]
_HEADERS = (
    "x-carousel-deadline-s: nan", "x-carousel-deadline-s: -1", "x-carousel-deadline-s: 1e999", "x-strict: true",
    "Authorization: Bearer \x80\xff", "Authorization: ", "x-request-id: " + "r" * 5000, "Content-Encoding: gzip",
    "Content-Type: text/plain; charset=utf-16", "Content-Type: multipart/form-data", "Expect: 100-continue",
    "Accept: application/xml", "x-forwarded-for: " + "1," * 2000, "x-session-id: \xe9\xe8", "Range: bytes=0-1",
    "Connection: upgrade\r\nUpgrade: h2c", "Cookie: " + "c" * 3000,
)  # fmt: skip
_BROKEN_HEADS = (
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: abc", "Transfer-Encoding: chunked\r\nContent-Length: 5", "Transfer-Encoding: gibberish",
    "no colon here", "\x00: \x01", "Transfer-Encoding: chunked, chunked", "h: " + "h" * 100_000,
)  # fmt: skip


# More bodies, also for endpoints that begin jobs or change settings. Only `odd_bodies` uses them; an attack does not.
_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,5}$", "minLength": 1, "maxLength": 5, "format": "date"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 2},
        "c": {"anyOf": [{"const": 1}, {"enum": ["x", 2, None]}, {"type": "null"}]},
    },
    "required": ["b"], "additionalProperties": False, "patternProperties": {"^x": {"type": "boolean"}},
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 1}},
}  # fmt: skip
_SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
_FUNCTION = {"name": "look", "description": "Looks.", "parameters": _SCHEMA, "strict": False}
_BATCH_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo", **_SAID}}
FILE_ID = "the last file"  # stands for the id of an uploaded file
_MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    *((alias, VALID[path]) for path, endpoint in ENDPOINTS.items() for alias in endpoint.aliases),
    ("/v1/batch", {"prompts": ["one", "two"], "max_tokens": 2, "stream": False, "seed": 1, "stop": ["x"]}),
    ("/v1/batch", {"prompts": ["one"], "max_tokens": 2, "async": True, "metadata": {"a": "b"}, "user": "u"}),
    ("/v1/batches", {
        "input_file_id": FILE_ID, "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }),
    ("/v1/files", _BATCH_LINE),
    ("/admin/scheduler", {"model": "demo", "strategy": {"name": "continuous"}, "policy": {"name": "fcfs"}}),
    ("/v1/chat/completions", _SAID | {"response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": False},
    }}),
    ("/v1/chat/completions", _SAID | {"stream": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True},
    }}),
    ("/v1/chat/completions", _SAID | {"structured_outputs": {"json": _SCHEMA}, "stream": True}),
    ("/v1/chat/completions", _SAID | {
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}},
            ]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ],
    }),
    ("/v1/responses", {
        "input": "Hi", "max_output_tokens": 4, "metadata": {"a": "b"}, "store": True, "background": False,
        "tools": [{"type": "function", **_FUNCTION}], "stream": True,
    }),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "text": {"format": {
        "type": "json_schema", "name": "a", "schema": _SCHEMA, "strict": False,
    }}}),
    ("/v1/messages", {**_SAID, "tools": [{"name": "look", "input_schema": _SCHEMA}], "tool_choice": {"type": "any"}}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "grammar": 'root ::= "A" [b-d]', "store": True}),
)  # fmt: skip
# JSON values as no library writes them: `_REFUSED` is invalid in every body, `_READ` is valid JSON.
_REFUSED = ("1e999", "-1E+999", "9" * 400, "123456789e400", "NaN", "-Infinity", r'"\ud800"', r'"a\udc00b"')
_READ = (
    "1.0", "2.0e0", "-0.0", "1e-999", "1E308", "18446744073709551616", "9007199254740993", "5e-324", r'"\u2028"',
    r'"\u0000"', '"a\u2028b\u2029c\u0085d"', "null", "[null]", '{"": null}', "true", '{"$ref": "#/$defs/\u7c7b[int]"}',
    r'{"pattern": "^(?!a)\\bb\\Z$"}', '{"type": "INTEGER", "minimum": -9223372036854775808}',
)  # fmt: skip
_RAW = {f"raw value {number}": written for number, written in enumerate(_REFUSED + _READ)}  # by placeholder
_KEYWORDS = (
    "$ref", "$schema", "additionalProperties", "const", "enum", "format", "items", "maxLength", "maximum", "metadata",
    "minLength", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "properties", "required", "type",
    "uniqueItems", "unknown", "a\u2028b",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OddBody:
    """A body with values that many parsers and writers get wrong, and its path; for /v1/files, a line of the file."""

    path: str
    data: bytes


def odd_bodies(seed: int) -> Iterator[OddBody]:
    """Yield endless bodies for every endpoint that takes a body, deterministic for a seed.

    The bodies have numbers beyond float, lone surrogates, Unicode line ends, floats with integer values, and nulls.
    """
    source = random.Random(seed)
    valid = [*VALID.items(), *_MORE]
    while True:
        path, body = copy.deepcopy(source.choice(valid))
        marks = [*_RAW][len(_REFUSED) * source.choice((0, 1, 1)) :]
        for _ in range(source.randint(1, 3)):
            _make_odd(source, body, marks)
        written = json.dumps(body)
        for mark, raw in _RAW.items():
            written = written.replace(f'"{mark}"', raw)
        yield OddBody(path, written.encode())


def _make_odd(source: random.Random, body: Any, marks: Sequence[str]) -> None:
    """Replace, change or add one value at a random depth of `body`."""
    inside = body
    while True:
        places = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        place = source.choice(places) if places else None
        if place is not None and isinstance(inside[place], dict | list) and source.random() < 0.75:
            inside = inside[place]
            continue
        kind = source.random()
        if isinstance(inside, dict) and (place is None or kind < 0.3):
            inside[source.choice(_KEYWORDS)] = source.choice(marks)
        elif place is None:
            inside.append(source.choice(marks))
        elif type(inside[place]) is int and kind < 0.7:
            inside[place] = float(inside[place])
        elif isinstance(inside[place], str) and kind < 0.5:
            inside[place] += source.choice(("\u2028", "\u0085", "\x00", "e999", "\u2029 "))
        else:
            inside[place] = source.choice(marks)
        return


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """The bytes sent on one connection. `is_cut` marks an incomplete request, for which an answer may never come."""

    kind: str
    data: bytes
    is_cut: bool = False


def hostile_requests(seed: int, models: Sequence[str] = ()) -> Iterator[HostileRequest]:
    """Yield endless requests, deterministic for a seed. Half of the generating requests name one of `models`."""
    source = random.Random(seed)
    makers: tuple[tuple[int, Callable[[random.Random, str, Any], HostileRequest]], ...] = (
        (60, _mutated), (10, _not_json), (8, _broken_text), (8, _twice_the_same_key), (6, _odd_header), (4, _cut_short),
        (2, _broken_head), (2, _stopped_chunks),
    )  # fmt: skip
    weights = [weight for weight, _ in makers]
    while True:
        path = source.choice(list(VALID))
        [(_, make)] = source.choices(makers, weights)
        body = copy.deepcopy(VALID[path])
        if models and path in _GENERATING and source.random() < 0.5:
            body["model"] = source.choice(models)
        yield make(source, path, body)


def _mutated(source: random.Random, path: str, body: Any) -> HostileRequest:
    """Delete or replace one to three fields at random depths."""
    for _ in range(source.randint(1, 3)):
        _mutate(source, body)
    return _post("mutated", path, json.dumps(body).encode())


def _mutate(source: random.Random, body: Any) -> None:
    inside = body
    while True:
        places = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not places:
            return
        place = source.choice(places)
        if isinstance(inside[place], dict | list) and inside[place] and source.random() < 0.6:
            inside = inside[place]
            continue
        if source.random() < 0.1:
            del inside[place]
        else:
            inside[place] = _hostile_value(source)
        return


def _hostile_value(source: random.Random) -> Any:
    numbers = (0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -1e-320, float("nan"), float("inf"), True)
    kind = source.randrange(6)
    if kind == 0:
        return source.choice(numbers)
    if kind == 1:
        return _text(source)
    if kind == 2:
        return [source.choice(numbers) for _ in range(source.choice((0, 1, 100, 5_000)))]
    if kind == 3:
        return {_text(source)[:50]: source.choice(numbers) for _ in range(source.choice((0, 1, 50, 2_000)))}
    if kind == 4:
        nested: Any = 1
        for _ in range(source.choice((5, 50, 300))):
            nested = [nested] if source.random() < 0.5 else {"a": nested}
        return nested
    return source.choice((None, "", "null", [], {}, [[]], [None], [{}], {"type": None}, "inf", "1"))


def _text(source: random.Random) -> str:
    unit = source.choice(("a", "\x00", "\ud800", "\U0001f9ff", "é", "<|end|>", "{{", "\u202e", "\\", '"', " ", "(a*)*"))
    most = _SMALL if source.random() < _OFTEN else MAX_TEXT
    return unit * (source.randint(1, most) // len(unit))


def _not_json(source: random.Random, path: str, body: Any) -> HostileRequest:
    written = json.dumps(body)
    depth = source.choice((100, 1_000, 10_000, MAX_DEPTH if source.random() > _OFTEN else 500))
    texts = (
        written[: source.randrange(len(written))], "", "null", "[]", '"text"', "1", "{", "{}", "}" + written,
        written + written, written.replace(":", "=", 1), "[" * depth, '{"a":' * depth, "[" * depth + "]" * depth,
        written.replace("2", "1" * source.choice((20, 400, 5_000))), written.replace("2", "NaN"), "\ufeff" + written,
        written.replace('"', "'"), written[:-1] + ",}", "9" * depth,
    )  # fmt: skip
    return _post("not_json", path, source.choice(texts).encode())


def _broken_text(source: random.Random, path: str, body: Any) -> HostileRequest:
    """Return a body with bytes that are not UTF-8, or in another character set."""
    written = json.dumps(body)
    data = bytearray(written.encode())
    if source.random() < 0.1:
        return _post("broken_text", path, written.encode(source.choice(("utf-16", "utf-32", "cp037"))))
    for _ in range(source.randint(1, 8)):
        data[source.randrange(len(data))] = source.randrange(256)
    data[source.randrange(len(data)) : 0] = source.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5", b"\x00"))
    return _post("broken_text", path, bytes(data))


def _twice_the_same_key(source: random.Random, path: str, body: Any) -> HostileRequest:
    name = source.choice(list(body))
    again = f',"{name}":{json.dumps(_hostile_value(source))}' + f',"{name}":1' * source.choice((0, 1, 500))
    return _post("same_key", path, (json.dumps(body)[:-1] + again + "}").encode())


def _odd_header(source: random.Random, path: str, body: Any) -> HostileRequest:
    lines = source.sample(_HEADERS, source.randint(1, 3))
    if not any(line.startswith("Content-Type") for line in lines):  # without it, the service reads nothing else
        lines.append("Content-Type: application/json")
    return _post("odd_header", path, json.dumps(body).encode(), "\r\n".join(lines))


def _cut_short(source: random.Random, path: str, body: Any) -> HostileRequest:
    data = _post("cut_short", path, json.dumps(body).encode()).data
    return HostileRequest("cut_short", data[: source.randrange(len(data))], is_cut=True)


def _broken_head(source: random.Random, path: str, body: Any) -> HostileRequest:
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{source.choice(_BROKEN_HEADS)}\r\n\r\n"
    return HostileRequest("broken_head", head.encode("latin-1") + json.dumps(body).encode(), is_cut=True)


def _stopped_chunks(source: random.Random, path: str, body: Any) -> HostileRequest:
    written = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"%x\r\n%s\r\n" % (len(written), written)
    ends = (b"", b"zz\r\n", b"ffffffffffffffffff\r\n", b"-5\r\n", b"5\r\nab", b"0\r\nbad trailer\r\n\r\n")
    return HostileRequest("stopped_chunks", head + chunk + source.choice(ends), is_cut=True)


def _post(kind: str, path: str, body: bytes, more: str = "Content-Type: application/json") -> HostileRequest:
    return HostileRequest(kind, post(path, body, more))


def post(path: str, body: bytes, more: str = "Content-Type: application/json") -> bytes:
    """Return the bytes of a POST that closes its connection; `more` are further header lines."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{more}\r\n\r\n"
    return head.encode("latin-1") + body


@dataclass(slots=True)
class Tally:
    """The results of an attack. `outcomes` counts answers by status, and two outcomes without an answer.

    `closed`: the service ended the connection. `hung_up`: the attacker ended the connection after 2 s, or after 0.2 s
    if the request was cut.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    server_errors: list[dict[str, Any]] = field(default_factory=list)  # answers of 500 and above


async def attack(target: Target, cases: Iterable[HostileRequest], tally: Tally, *, rate: float, at_once: int) -> None:
    """Send the cases at `rate` a second, with at most `at_once` open connections."""
    began, free = time.perf_counter(), asyncio.Semaphore(at_once)
    async with asyncio.TaskGroup() as tasks:
        for number, case in enumerate(cases):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            await free.acquire()
            tally.by_kind[case.kind] += 1
            tasks.create_task(_send(target, case, tally)).add_done_callback(lambda _: free.release())


async def _send(target: Target, case: HostileRequest, tally: Tally) -> None:
    outcome, answer = "closed", b""
    try:
        async with asyncio.timeout(0.2 if case.is_cut else 2.0):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(case.data)
                while data := await reader.read(65_536):
                    answer = answer or data.removeprefix(_CONTINUE)
            finally:
                writer.close()
    except TimeoutError:
        outcome = "hung_up"
    except OSError:
        pass  # the server closed before it read the whole request
    if answer:
        outcome = answer[9:12].decode(errors="replace")
    tally.outcomes[outcome] += 1
    if outcome.startswith("5"):
        said = {"kind": case.kind, "request": repr(case.data[:300]), "answer": repr(answer[-300:])}
        tally.server_errors.append({**said, "at_s": time.monotonic()})
