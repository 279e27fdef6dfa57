"""What depends on Ray's private names: all of it in one file, headers of any bytes, and the errors of HAProxy."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from ray.serve._private import http_util
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig, get_haproxy_binary
from ray.serve.config import HTTPOptions

from app.api.http.errors import error_response
from app.errors import Unavailable
from deployments.ray_internals import headers_as_utf8, leave_request_ids_alone
from tests.api.odd_requests import exchange
from tests.deployments.conftest import Service, free_port
from tests.waiting import PATIENCE_S, eventually

PROJECT = Path(__file__).parents[2]


def test_what_is_utf8_stays_as_it_is() -> None:
    plain = [(b"host", b"a"), (b"x-session-id", b"b")]
    assert headers_as_utf8(plain) is plain
    assert headers_as_utf8([(b"a", "é".encode()), (b"b", b"c")]) == [(b"a", "é".encode()), (b"b", b"c")]


def test_what_is_not_becomes_what_latin_1_makes_of_it() -> None:
    assert headers_as_utf8([(b"a", b"\xe9\xff"), (b"b", b"c")]) == [(b"a", "éÿ".encode()), (b"b", b"c")]


def test_the_service_answers_whatever_bytes_serves_own_headers_have(service: Service) -> None:
    for name in ("x-session-id", "x-request-id", "serve-multiplexed-model-id", "x-request-timeout-seconds"):
        for value in ("\xe9\xe8", "\xff" * 500):
            head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: {value}\r\n\r\n"
            [status] = exchange(service.url, head, stays=True)
            assert status == 200, (name, value[:5])


PRIVATE = re.compile(r"ray\S*\._private|import _get_|\b(handle|broadcast\(\w+\))\._(?!_)|super\(\)\._(?!_)")


def test_private_names_of_ray_are_in_one_file_and_in_the_start_of_a_cluster() -> None:
    sources = (PROJECT / "deployments").rglob("*.py")
    found = {path.relative_to(PROJECT).as_posix() for path in sources if PRIVATE.search(path.read_text())}
    assert found == {"deployments/ray_internals.py", "deployments/launcher/own_cluster.py"}


def test_serve_gives_no_id_beside_the_apis(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own middlewares around an application that gives one itself."""
    monkeypatch.setattr(http_util.RequestIdMiddleware, "__call__", http_util.RequestIdMiddleware.__call__)  # put back
    seen, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"mine")]})

    async def send(message: Any) -> None:
        sent.append(message)

    leave_request_ids_alone()
    asyncio.run(http_util._apply_middlewares(app, [])({"type": "http", "headers": []}, None, send))
    assert (seen, sent[0]["headers"]) == ([], [(b"x-request-id", b"mine")])


class _Dying(BaseHTTPRequestHandler):
    """An ingress, or Serve's own proxy, that closes the connection without an answer unless the path ends otherwise."""

    answers = MappingProxyType({
        "/healthz": (200, "text/plain"),
        "/plain-404": (404, "text/plain; charset=utf-8"), "/plain-500": (500, "text/plain; charset=utf-8"),
        "/json-500": (500, "application/json"),
    })  # fmt: skip

    def do_GET(self) -> None:
        for path, (status, content_type) in self.answers.items():
            if self.path.endswith(path):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def haproxy(folder: Path, *backends: BackendConfig) -> Iterator[str]:
    """HAProxy as Serve configures it with these backends, for the length of a block; gives its address."""
    port = free_port()
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port), stats_port=free_port(), metrics_port=free_port(),
        socket_path=f"{folder}/admin.sock",
    )  # fmt: skip
    api = HAProxyApi(config, {each.name: each for each in backends}, config_file_path=f"{folder}/haproxy.cfg")
    api._generate_config_file_internal()
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", api.config_file_path], stderr=subprocess.DEVNULL)
    try:
        eventually(partial(_listens, port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HAProxy before a dying ingress; for `/none` before none, and for `/proxy` before Serve's own proxy."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dying) as ingress:
        threading.Thread(target=ingress.serve_forever, daemon=True).start()
        address = ingress.server_address
        proxy = ServerConfig("SERVE_PROXY_ACTOR-fallback-1", *address)
        backends = (
            BackendConfig("all", "/", servers=[ServerConfig("SERVE_REPLICA__ingress", *address)]),
            BackendConfig("none", "/none"),
            BackendConfig("proxy", "/proxy", fallback_server=proxy),
        )
        with haproxy(tmp_path_factory.mktemp("haproxy"), *backends) as url:
            yield url
        ingress.shutdown()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("fault", ["", "/none", "/proxy"])
def test_what_no_ingress_answers_haproxy_answers_as_the_api(failing: str, fault: str, path: str) -> None:
    _assert_unavailable(httpx.get(failing + fault + path), path)


@pytest.mark.parametrize("error", ["/plain-404", "/plain-500"])
def test_what_serves_own_proxy_says_is_an_error_of_the_api(failing: str, error: str) -> None:
    _assert_unavailable(httpx.get(f"{failing}/proxy{error}"), error)


def test_before_there_is_an_application_haproxy_says_that_it_is_worth_another_try(tmp_path: Path) -> None:
    with haproxy(tmp_path) as url:
        _assert_unavailable(httpx.get(f"{url}/v1/models"), "/v1/models")
    other = BackendConfig("other", "/other")
    with haproxy(tmp_path, other) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 404


def test_other_errors_stay_as_they_are(failing: str) -> None:
    assert httpx.get(f"{failing}/proxy/json-500").status_code == 500
    assert [httpx.get(f"{failing}/{name}").status_code for name in ("plain-404", "plain-500")] == [404, 500]


def _assert_unavailable(answer: httpx.Response, path: str) -> None:
    assert answer.status_code == 503
    error = answer.json()
    expected = error_response(Unavailable(error["error"]["message"]), error.get("request_id", ""), path)
    assert answer.content == expected.body
    assert dict(answer.headers).items() >= dict(expected.headers).items()
