"""Nobody gets past without a key: the guard stands behind the few open routes and before everything else.

It knows no paths. The router of the open routes hands over what none of them matched, so there is no second opinion on
what a URL means that could differ from the router's (that class of mistake is CVE-2026-48746 and CVE-2026-49468).
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.keys import Doorkeeper
from app.api.limits import Visit


class Guard:
    """An ASGI application in front of another, for those whom the doorkeeper knows, within their limits."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self.app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # nothing here speaks over a websocket
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        account = self._doorkeeper.account_of(scope["headers"])
        state = scope.setdefault("state", {})
        state["account"] = account
        with account.visit() as visit:
            state["visit"] = visit
            await self.app(scope, receive, send)


def guarded(open_routes: Sequence[BaseRoute], other_routes: Sequence[BaseRoute], doorkeeper: Doorkeeper) -> Router:
    """A router over both, with the guard before all but the open ones, unknown paths included."""
    inside = Router(other_routes, redirect_slashes=False)
    return Router(open_routes, redirect_slashes=False, default=Guard(inside, doorkeeper))


def visit_of(request: Request) -> Visit:
    """The visit that a request behind the guard is."""
    visit: Visit = request.state.visit
    return visit


def owner_of(request: Request) -> str:
    """Whose files and batches a request is about: its key's name, "" where no keys are needed."""
    return visit_of(request).account.name
