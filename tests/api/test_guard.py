"""The auth matrix: every route, every odd way to ask for it or to send a key. No request gets in without one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.api.endpoints import live
from app.api.endpoints.table import ENDPOINTS
from app.text import Tokenizer
from tests.api.odd_requests import answered, exchange
from tests.benchmarks.servers import serving
from tests.kit.service import ADMIN_KEY, KEY, Connection, Service, bearer, check_error, entry, routes_of, say, served

OPEN = {"/health", "/ready", "/", "/page/page.css"}
ADMIN = {"/admin/keys", "/admin/usage", "/admin/fleet", "/admin/live", "/admin/scheduler", "/admin/adapters"}
COMPUTED = {path for endpoint in ENDPOINTS.values() for path in (endpoint.path, *endpoint.aliases)}
# Every other new route is listed here with the callers that may use it.
WHO_MAY = {
    "all": {"GET /health", "GET /ready", "GET /", "GET /page/{name}"},
    "keys": {
        *(f"POST {path}" for path in COMPUTED),
        "GET /v1/models", "GET /v1/models/{model_id:path}", "POST /tokenize", "POST /detokenize", "GET /tokenizer_info",
        "GET /version", "GET /openapi.json", "GET /metrics", "POST /v1/messages/count_tokens",
        "GET /load", "POST /v1/requests/{request_id}/cancel",
        "POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}",
        "POST /v1/batches/{batch_id}/cancel", "POST /v1/batch", "GET /v1/batch/stats", "GET /v1/batch/{batch_id}",
        "GET /v1/responses/{response_id}", "GET /v1/responses/{response_id}/input_items",
        "POST /v1/responses/{response_id}/cancel", "DELETE /v1/responses/{response_id}",
        "GET /v1/chat/completions/{response_id}", "DELETE /v1/chat/completions/{response_id}",
        "GET /v1/completions/{response_id}", "DELETE /v1/completions/{response_id}",
    },
    "admins": {
        "GET /admin/keys", "GET /admin/usage", "GET /admin/fleet", "GET /admin/live", "GET /admin/scheduler",
        "POST /admin/scheduler",
        "GET /admin/adapters", "POST /admin/adapters", "DELETE /admin/adapters/{name:path}",
    },
}  # fmt: skip
WITH_OTHER_BODIES = COMPUTED - {"/v1/chat/completions", "/v1/completions"} | {"/detokenize"}
ADAPTER = "/admin/adapters/demo"  # only to be deleted
CANCEL = "/v1/requests/demo/cancel"
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "get", "PROPFIND")
NO_KEYS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer sk-wrong"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": f"Bearer {entry()['sha256']}"},
    {"x-api-key": KEY.upper()},
    {"x-api-key": f"Bearer {KEY}"},
    {"api-key": KEY, "proxy-authorization": f"Bearer {KEY}", "cookie": f"Authorization=Bearer {KEY}"},
    {"host": "localhost/health?"},
    {"host": "[/health", "x-forwarded-host": "health", "x-forwarded-prefix": "/health"},
    {"x-original-url": "/health", "x-rewrite-url": "/health", "x-forwarded-path": "/health"},
    {"x-http-method-override": "GET", "x-method-override": "GET", "x-forwarded-for": "127.0.0.1"},
)


JSON_HEADER = (b"content-type", b"application/json")


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of the live view end soon."""
    monkeypatch.setattr(live, "STREAM_S", 0.05)


@pytest.fixture
def guarded_service(tokenizer: Tokenizer) -> Service:
    return Service(tokenizer, say(tokenizer, "3 4 5."), keys=[entry()])


def all_paths(service: Service) -> tuple[set[str], set[str]]:
    """The paths of the open routes and those of all others, with a model's name where one belongs."""
    open_routes, others = routes_of(service.app)
    return {in_use(route.path) for route in open_routes}, {in_use(route.path) for route in others}


def in_use(path: str) -> str:
    """A route's path with a name where it wants one."""
    return re.sub(r"\{[^}]*\}", "demo", path.replace("/page/{name}", "/page/page.css"))


def all_routes(app: Any) -> set[str]:
    """Every route of an app, by method and path."""
    routes = [route for routes in routes_of(app) for route in routes]
    return {f"{method} {route.path}" for route in routes for method in (route.methods or {"ANY"}) - {"HEAD"}}


def odd_forms(path: str) -> Iterator[str]:
    """The path, and what some server or proxy has once taken for it."""
    yield from (path, f"{path}/", f"/{path}", f"//{path}", path.upper(), path.title(), f"{path}//", f"{path}/.")
    yield from (f"/health/..{path}", f"/health/../..{path}", f"/v1/..{path}", f"/v1/.{path}", f"/./{path}")
    yield from (
        f"{path}/../health",
        f"{path}/../../health",
        f"{path}%2f..%2fhealth",
        f"/%2e%2e{path}",
        f"/health{path}",
    )
    yield from (f"/health%00{path}", f"{path}\0", f"{path};/health", f"{path}?/health", f"{path}#/health", f"{path}%20")
    yield from (
        f"http://127.0.0.1{path}",
        f"http://health{path}",
        path.replace("/", "\\"),
        path.replace("/", "%2f"),
        "",
    )


async def status_of(app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """The status of one exchange, without a server's view of what a path may be."""
    sent: list[dict[str, Any]] = []

    bodies = [b'{"prompt": "Hi", "input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}']

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": f"key={KEY}".encode(), "headers": [*headers, JSON_HEADER], "scheme": "http",
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return int(sent[0]["status"])


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def test_nothing_but_the_open_routes_answers_without_a_key(guarded_service: Service) -> None:
    open_paths, other_paths = all_paths(guarded_service)
    assert open_paths == OPEN
    assert len(other_paths) >= 10
    headers = [encoded(each) for each in NO_KEYS]
    headers += [encoded(each) + encoded({"authorization": "Bearer sk-wrong"}) for each in (NO_KEYS[2], NO_KEYS[6])]

    forms = {form for path in open_paths | other_paths for form in odd_forms(path)}
    # Every form by every method and with every header; which of these come together goes round from form to form.
    asked = [
        (form, METHODS[(place + at) % len(METHODS)], sent)
        for place, form in enumerate(sorted(forms))
        for at, sent in enumerate(headers)
    ]
    assert len(METHODS) <= len(headers)
    assert len(asked) > 4_000
    successes = []
    for form, method, sent in asked:
        status = await status_of(guarded_service.app, method, form, sent)
        if status < 400 and not (form in OPEN and method in ("GET", "HEAD")):
            successes.append(f"{method} {form!r} with {sent}: {status}")
        assert status < 500, f"{method} {form!r} with {sent}: {status}"
    assert successes == []
    assert guarded_service.generate.requests == []


async def test_with_a_key_every_route_answers_and_odd_forms_are_still_no_routes(guarded_service: Service) -> None:
    _, paths = all_paths(guarded_service)

    async def statuses(path: str) -> set[int]:
        return {await status_of(guarded_service.app, method, path, encoded(bearer())) for method in ("GET", "POST")}

    for path in paths - ADMIN - WITH_OTHER_BODIES - {ADAPTER, CANCEL}:  # the last two want another id
        assert 200 in await statuses(path), path
    assert await statuses("//v1/models") == {404}
    assert await statuses("/health/../v1/models") == {404}


async def test_every_route_lets_in_the_keys_that_it_should_and_no_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5."))
    keys = [entry(), entry(ADMIN_KEY, "root", admin=True)]
    visitors = [("no key", {}), ("a stranger", bearer("sk-wrong")), ("key", bearer()), ("admin", bearer(ADMIN_KEY))]

    async def statuses(app: Any, route: str) -> dict[str, int]:
        method, _, path = route.partition(" ")
        return {name: await status_of(app, method, in_use(path), encoded(headers)) for name, headers in visitors}

    async with served(service, tmp_path, keys=keys) as app:
        routes, found = all_routes(app), {route: await statuses(app, route) for route in set().union(*WHO_MAY.values())}
    assert routes == set(found), "a route that is not listed with the callers that may use it"
    for callers, theirs in WHO_MAY.items():
        for route in theirs:
            inside = [name for name, status in found[route].items() if status not in (401, 403)]
            assert inside == [name for name, _ in visitors][{"all": 0, "keys": 2, "admins": 3}[callers] :], route
            assert not any(status >= 500 for status in found[route].values()), route
            assert [found[route][name] for name in ("no key", "a stranger")] == (
                [200] * 2 if callers == "all" else [401] * 2
            )
    assert {found[route]["key"] for route in WHO_MAY["admins"]} == {403}
    assert {found[route]["admin"] for route in WHO_MAY["admins"] if route.startswith("GET")} == {200}


async def test_no_form_of_an_admin_route_answers_an_ordinary_key(guarded_service: Service) -> None:
    # Some forms of these paths are /health in its own right, which needs no key.
    asked = itertools.product((form for path in ADMIN for form in odd_forms(path)), METHODS)
    statuses = {(form, method): await status_of(guarded_service.app, method, form, encoded(bearer()))
                for form, method in asked}  # fmt: skip
    assert len(statuses) > 400
    assert [f"{method} {form!r}" for (form, method), status in statuses.items() if status < 400] == []


def test_an_ordinary_key_is_told_that_a_route_is_for_admins(guarded_service: Service) -> None:
    answer = guarded_service.call("GET", "/admin/keys", headers=bearer())
    assert answer.status == 403
    assert (answer.error["type"], answer.error["code"]) == ("permission_error", "admin_key_required")


@pytest.mark.parametrize(("let_in", "status"), [(False, 200), (True, 403)])
def test_without_keys_admin_routes_are_open_where_no_other_machine_was_let_in(
    tokenizer: Tokenizer, let_in: bool, status: int
) -> None:
    service = Service(tokenizer, allow_unauthenticated=let_in)
    assert service.call("GET", "/v1/models").status == 200
    assert {service.call("GET", path).status for path in ADMIN} == {status}


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/page", "/metrics", "/openapi.json"])
def test_a_caller_without_a_key_learns_only_that(guarded_service: Service, path: str) -> None:
    answer = guarded_service.call("GET", path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (answer.error["type"], answer.error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["x-request-id"]


async def test_a_body_is_not_read_before_the_key_is_known(guarded_service: Service) -> None:
    async with Connection(guarded_service.app, "POST", "/v1/completions", [], {}) as connection:  # never sends one
        assert (await connection.finished()).status == 401


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, [401, 200, 200]),
        ({"metrics_for": "public"}, [200, 200, 200]),
        ({"metrics_for": "keys"}, [401, 200, 200]),
        ({"metrics_for": "admins"}, [401, 403, 200]),
    ],
)
def test_metrics_are_for_whom_the_settings_say(
    tokenizer: Tokenizer, settings: dict[str, str], statuses: list[int]
) -> None:
    keys = [entry(), entry(ADMIN_KEY, "root", admin=True)]
    service = Service(tokenizer, say(tokenizer, "3"), keys=keys, **settings)
    headers = ({}, bearer(), bearer(ADMIN_KEY))
    for path in ("/metrics", "/load"):
        assert [service.call("GET", path, headers=each).status for each in headers] == statuses
    assert service.call("GET", "/v1/models").status == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/"])
async def test_a_websocket_is_closed_before_it_is_accepted(guarded_service: Service, path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": path, "headers": encoded(bearer()), "query_string": b"", "scheme": "ws"}
    await guarded_service.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_nothing_answers_without_a_key_over_a_socket_either(guarded_service: Service) -> None:
    with serving(guarded_service.app) as url:
        assert answered(url) == {"GET http://x/health?/v1/models HTTP/1.1"}, "a question about health, with a query"
        key = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        assert exchange(url, f"GET /v1/models HTTP/1.1\r\n{key}") == [200]
        assert exchange(url, f"GET /v1/%6dodels HTTP/1.1\r\n{key}") == [200]


def test_a_request_hidden_behind_an_open_one_needs_its_own_key(guarded_service: Service) -> None:
    hidden = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with serving(guarded_service.app) as url:
        assert exchange(url, f"GET /health HTTP/1.1\r\nHost: x\r\n\r\n{hidden}") == [200, 401]
        with_key = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        assert exchange(url, with_key + hidden) == [200, 401], "a key is for its request, not for its connection"
        smuggled = f"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: {len(hidden) + 5}\r\n"
        assert 200 not in exchange(url, f"{smuggled}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}")


CANARY = "the-canary-sings-at-dawn"


def test_no_log_line_metric_or_error_shows_a_key_or_a_prompt(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Exception):
        pass

    service = Service(tokenizer, say(tokenizer, "3 4 5."), keys=[entry(requests_per_minute=1000)])
    bodies: list[Any] = [
        {"prompt": CANARY}, {"prompt": CANARY, "stream": True}, {"prompt": {"text": CANARY}}, {"prompt": [CANARY, 3]},
        f'{{"prompt": "{CANARY}'.encode(), f'["{CANARY}"]'.encode(), {"prompt": CANARY, "n": CANARY},
        {"prompt": CANARY, "stop": {"a": CANARY}}, {"prompt": CANARY * 100}, {"prompt": CANARY, "user": 3},
        {"prompt": CANARY, "temperature": CANARY}, {"messages": CANARY}, {"messages": [CANARY]},
        {"messages": [{"role": CANARY, "content": CANARY}]}, {"messages": [{"role": "user", "content": CANARY}]},
        {"messages": [{"role": "user", "content": CANARY}], "chat_template_kwargs": {"messages": CANARY}},
        {"input": CANARY}, {"input": CANARY, "stream": True}, {"input": [CANARY, 3]}, {"input": [{"type": CANARY}]},
        {"input": CANARY, "previous_response_id": CANARY}, {"input": "Hi", "tools": [{"type": CANARY}]},
    ]  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        answers = [
            service.call("POST", path, body, headers)
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize")
            for body in bodies
            for headers in (bearer(), {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"})
        ]
        service.generate.script = lambda request: [Broken("a step failed")]
        answers += [service.call("POST", "/v1/completions", {"prompt": CANARY}, bearer())]
        metrics = service.call("GET", "/metrics", headers=bearer())
    assert {200, 400, 401, 500} <= {answer.status for answer in answers}
    for answer in answers:
        if answer.status >= 400:
            check_error(answer.error)
        assert KEY.encode() not in answer.body
        assert not any(KEY in value for value in answer.headers.values())
        assert answer.status < 500 or CANARY.encode() not in answer.body
    for text in (caplog.text, metrics.body.decode()):
        assert len(text) > 1000
        assert KEY not in text
        assert CANARY not in text


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_of_a_failure_shows_no_text_that_it_was_about(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The repr of this error is the whole text."""
    failure = UnicodeEncodeError("utf-8", CANARY + "\ud800", 10, 11, "surrogates not allowed")
    service = Service(tokenizer, lambda request: [failure])
    with caplog.at_level(logging.DEBUG):
        answer = service.call("POST", "/v1/completions", {"prompt": "Hi", "stream": stream})
    assert answer.status == 500
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "UnicodeEncodeError at service.py:" in line
    assert CANARY not in caplog.text
