"""Header values that are no UTF-8, which HTTP allows, before Serve reads them.

Ray 2.60 decodes some headers as UTF-8 (`x-session-id`, `x-request-id` and others) before any code of an application
runs, and answers 500 when it cannot. There is no setting for it, so they are written as UTF-8 here: what Latin-1, as
HTTP reads such bytes, makes of them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve._private import replica as serve_replica

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
Answer = Callable[[Any, Any, Any, Any], Awaitable[None]]


def accept_odd_headers() -> None:
    """Let Serve read headers of any bytes in this process. Call it in the constructor of the HTTP deployment."""
    answer: Answer | None = getattr(serve_replica.Replica, "_direct_ingress_asgi", None)
    if answer is None:
        logger.warning(
            "this version of Ray takes HTTP in another way; headers that are no UTF-8 may be answered by 500"
        )
        return
    if getattr(answer, "accepts_odd_headers", False):
        return

    async def answer_any(replica: Any, scope: Any, receive: Any, send: Any) -> None:
        if "headers" in scope:
            scope["headers"] = readable(scope["headers"])
        await answer(replica, scope, receive, send)

    answer_any.accepts_odd_headers = True  # type: ignore[attr-defined]
    serve_replica.Replica._direct_ingress_asgi = answer_any


def readable(headers: Headers) -> Headers:
    """The same headers, all of them UTF-8; as a rule the same list."""
    if all(value.isascii() for _, value in headers):
        return headers
    return [(name, _as_utf8(value)) for name, value in headers]


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
