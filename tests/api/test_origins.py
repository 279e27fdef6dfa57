"""Web pages and the API: whose requests are answered, with keys and without, and what CORS lets a page read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.api.http.origins import OriginPolicy
from app.config import ApiConfig
from app.errors import NotPermitted
from app.text import Tokenizer
from tests.kit.service import Answer, Service, bearer, entry, http_client, say

PAGE = "https://chat.example.com"
FOREIGN = ("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8001", "file://", "")
LOOPBACK_HOSTS = (
    "localhost", "localhost:8000", "LOCALHOST:80", "localhost.:8000", "chat.localhost", "127.0.0.1", "127.0.0.1:8000",
    "127.1.2.3:9", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:1", "0.0.0.0:8000",
)  # fmt: skip
OTHER_HOSTS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "notlocalhost", "192.0.2.1:8000",
    "[2001:db8::1]:8000", "[::1", "localhost:80:80", "localhost/x", "localhost@evil.example", "127.0.0.1:x",
)  # fmt: skip
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def build(tokenizer: Tokenizer, **api: Any) -> Service:
    return Service(tokenizer, say(tokenizer, "3 4 5."), **api)


def complete(service: Service, **headers: str) -> Answer:
    return service.call("POST", "/v1/completions", {"prompt": "Hi"}, headers)


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_without_keys_any_name_of_this_machine_is_answered_on_any_port(service: Service, host: str) -> None:
    assert complete(service, host=host).status == 200
    assert complete(service, host=host, origin=f"http://{host.lower()}").status == 200, "a page of its own address"


@pytest.mark.parametrize("host", OTHER_HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/admin/keys", "/metrics", "/nowhere"])
def test_without_keys_another_name_is_refused_whichever_path(service: Service, host: str, path: str) -> None:
    """Also as its own origin: this is DNS rebinding."""
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        answer = service.call("GET", path, headers=headers)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "localhost, 127.0.0.1 and [::1]" in answer.error["message"]


def test_without_keys_forwarding_headers_neither_help_nor_harm(service: Service) -> None:
    forwarded = {"x-forwarded-host": "localhost", "forwarded": "host=localhost", "x-forwarded-for": "127.0.0.1"}
    assert complete(service, host="evil.example", **forwarded).status == 403
    forwarded = {"x-forwarded-host": "chat.example.com", "x-forwarded-proto": "https"}
    assert complete(service, host="127.0.0.1:8000", **forwarded).status == 200


@pytest.mark.parametrize("api", [{"keys": [entry()]}, {"allow_unauthenticated": True}])
def test_a_service_for_other_machines_is_answered_by_any_name(tokenizer: Tokenizer, api: dict[str, Any]) -> None:
    service = build(tokenizer, **api)
    for host in (*OTHER_HOSTS, *LOOPBACK_HOSTS):
        assert complete(service, host=host, **bearer()).status == 200
    assert complete(service, host="chat.example.com", origin=PAGE, **bearer()).status == 200, "a proxy took TLS off"


@pytest.mark.parametrize("api", [{}, {"keys": [entry()]}, {"allow_unauthenticated": True}, {"allowed_origins": [PAGE]}])
@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_page_is_refused_before_its_body_is_read(
    tokenizer: Tokenizer, api: dict[str, Any], origin: str
) -> None:
    service = build(tokenizer, **api)
    headers = {"host": "localhost:8000", "origin": origin, **bearer()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/health"), ("OPTIONS", "/x")):
        answer = service.call(method, path, {}, headers | (ASKS if method == "OPTIONS" else {}))
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "api.allowed_origins" in answer.error["message"]
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert not service.generate.requests


@pytest.mark.parametrize("api", [{}, {"keys": [entry()]}])
@pytest.mark.parametrize(
    "declared",
    ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "",
     "text/plain;application/json"],
)  # fmt: skip
def test_a_body_that_a_page_can_send_unasked_is_no_json(
    tokenizer: Tokenizer, api: dict[str, Any], declared: str
) -> None:
    """A form can declare these three types, and a fetch none at all. So does `curl -d` without a header."""
    service = build(tokenizer, **api)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
        answer = service.call("POST", path, {"prompt": "Hi"}, {"content-type": declared, **bearer()})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
        assert "send the header `Content-Type: application/json`" in answer.error["message"]


@pytest.mark.parametrize("declared", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_a_body_that_is_declared_as_json_is_read(service: Service, declared: str) -> None:
    assert complete(service, **{"content-type": declared}).status == 200


async def test_a_foreign_form_uploads_no_file_and_begins_no_batch(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        assert (await client.post("/v1/files", headers={"origin": "https://evil.example"}, **form)).status_code == 403
        assert (await client.get("/v1/files")).json()["data"] == []
        for path in ("/v1/batches", "/v1/batch"):
            sent = await client.post(path, content=json.dumps({}), headers={"content-type": "text/plain"})
            assert sent.status_code == 415


@pytest.mark.parametrize("api", [{}, {"keys": [entry()]}])
def test_a_page_that_is_allowed_asks_without_a_key_and_reads_answers_and_errors(
    tokenizer: Tokenizer, api: dict[str, Any]
) -> None:
    service = build(tokenizer, allowed_origins=[PAGE], **api)
    page = {"host": "localhost:8000", "origin": PAGE}
    asked = service.call("OPTIONS", "/v1/chat/completions", headers=page | ASKS)
    assert (asked.status, asked.body) == (204, b"")
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert not service.generate.requests
    streamed = service.call("POST", "/v1/completions", {"prompt": "Hi", "stream": True}, page | bearer())
    refused = complete(service, **page, **({} if api else {"content-type": "text/plain"}))
    assert (streamed.status, refused.status) == (200, 401 if api else 415)
    for answer in (streamed, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "*"
        assert answer.headers["vary"] == "Origin"
    assert service.call("GET", "/v1/models", headers=bearer()).headers["vary"] == "Origin", "caches keep them apart"


def test_all_pages_may_be_allowed(tokenizer: Tokenizer) -> None:
    service = build(tokenizer, allowed_origins=["*"])
    for origin in FOREIGN:
        answer = complete(service, host="localhost", origin=origin)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert complete(service, host="evil.example", origin=PAGE).status == 403, "its name is still checked"


def test_a_question_that_is_no_preflight_is_routed(tokenizer: Tokenizer) -> None:
    service = build(tokenizer, allowed_origins=[PAGE])
    assert service.call("OPTIONS", "/v1/models", headers={"origin": PAGE}).status == 405
    assert service.call("OPTIONS", "/v1/models", headers=ASKS).status == 405


def test_ordinary_clients_see_no_new_header(service: Service) -> None:
    answer = complete(service, host="localhost:8000")
    assert not {name for name in answer.headers if name.startswith("access-control") or name == "vary"}


@pytest.mark.parametrize(
    "wrong", ["chat.example.com", "https://a.example/", "https://a.example/x", "null", "", "https://"]
)
def test_what_no_browser_sends_is_refused_as_a_setting(wrong: str) -> None:
    with pytest.raises(ValidationError, match="write an origin as browsers send it"):
        ApiConfig(allowed_origins=(wrong,))


def test_origins_in_the_settings_are_compared_as_browsers_write_them() -> None:
    [origin] = ApiConfig(allowed_origins=("HTTPS://Chat.Example.com",)).allowed_origins
    policy = OriginPolicy([origin], loopback_only=True)
    policy.preflight("GET", {"host": "localhost", "origin": PAGE})
    with pytest.raises(NotPermitted):
        policy.preflight("GET", {"host": "localhost", "origin": f"{PAGE}.evil.example"})
