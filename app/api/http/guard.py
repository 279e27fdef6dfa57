"""Nobody gets past without a key: the guard stands behind the few open routes and before everything else.

It knows no paths. The router of the open routes hands over what none of them matched, so there is no second opinion on
what a URL means that could differ from the router's (that class of mistake is CVE-2026-48746 and CVE-2026-49468).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.auth.keys import Doorkeeper
from app.api.auth.limits import Account, Visit
from app.errors import NotPermitted


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


class AdminsOnly:
    """An ASGI application in front of one route, which the router has chosen, for those whose key is an admin's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account: Account = scope["state"]["account"]
        if not account.may_administer:
            raise NotPermitted(
                "this route is for administrators: send a key that has `admin: true`", code="admin_key_required"
            )
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Routes:
    """All routes, by who may use them. What is in none of the lists is nobody's."""

    open: Sequence[Route]  # without a key
    keys: Sequence[Route]  # with any
    admin: Sequence[Route]  # with an admin's

    def guarded_by(self, doorkeeper: Doorkeeper) -> Router:
        """A router over all, with the guard before all but the open ones, unknown paths included."""
        inside = Router([*self.keys, *map(_for_admins, self.admin)], redirect_slashes=False)
        return Router(self.open, redirect_slashes=False, default=Guard(inside, doorkeeper))

    def __iter__(self) -> Iterator[Route]:
        return iter((*self.open, *self.keys, *self.admin))


def _for_admins(route: Route) -> Route:
    # HEAD comes with GET by itself.
    return Route(route.path, route.endpoint, methods=list(route.methods or ()), middleware=[Middleware(AdminsOnly)])


def visit_of(request: Request) -> Visit:
    """The visit that a request behind the guard is."""
    visit: Visit = request.state.visit
    return visit


def owner_of(request: Request) -> str:
    """Whose files and batches a request is about: its key's name, "" where no keys are needed."""
    return visit_of(request).account.name
