"""Send one request of a case on its own connection, byte for byte as it was reported, and read its answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from benchmarks.harness.http_call import EventStream, Target

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service under test, and its names for `$MODEL`, `$TOOLS` and `$KEY` in requests."""

    target: Target
    model: str
    tools_model: str  # a model whose chat template has tools
    key: str = ""

    def filled(self, text: str) -> str:
        """Return a text of a case with the names of this service filled in."""
        return text.replace("$MODEL", self.model).replace("$TOOLS", self.tools_model).replace("$KEY", self.key)


@dataclass(frozen=True, slots=True)
class Got:
    """An answer. If no answer came, the status is 0 and the text is the reason."""

    status: int
    headers: Mapping[str, str]  # by names in lower case
    text: str

    @property
    def content(self) -> Any:
        """The JSON of the body; `{"events": [...]}` for a stream. Raises ValueError if there is no JSON."""
        if "text/event-stream" in self.headers.get("content-type", ""):
            lines = EventStream().feed(self.text.encode())
            return {"events": [_json(line.decode()) for line in lines if line != b"[DONE]"]}
        return _json(self.text)


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def sent(request: Mapping[str, Any], service: Service) -> Got:
    """Send a request and read its answer to the end.

    `request` has a `path` and perhaps a `body` (JSON) or `raw` (text), otherwise it is a GET. Its `headers` (lines)
    replace the usual headers of equal names; `version` is that of HTTP. If the connection fails, the status is 0.
    """
    try:
        with socket.create_connection((service.target.host, service.target.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(_bytes(request, service))
            response = HTTPResponse(connection)
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Got(response.status, headers, response.read().decode("utf-8", "replace"))
    except (OSError, HTTPException) as error:
        return Got(0, {}, f"{type(error).__name__}: {error}")


def _bytes(request: Mapping[str, Any], service: Service) -> bytes:
    text = request.get("raw") or (json.dumps(request["body"]) if "body" in request else "")
    data = service.filled(text).encode()
    given = list(request.get("headers", ()))
    usual = ["Content-Type: application/json", *(["Authorization: Bearer $KEY"] if service.key else [])]
    named = {_name(line) for line in given}
    lines = [
        f"{'POST' if data else 'GET'} {request['path']} HTTP/{request.get('version', '1.1')}",
        f"Host: {service.target.host}:{service.target.port}",
        *(["Connection: close"] if "connection" not in named else []),
        f"Content-Length: {len(data)}",
        *(line for line in usual if _name(line) not in named),
        *given,
    ]
    return service.filled("\r\n".join([*lines, "", ""])).encode() + data


def _name(line: str) -> str:
    return line.partition(":")[0].lower()
