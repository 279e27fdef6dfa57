"""No request without a valid key passes the guard, which stands behind the few open routes and before all others.

The guard knows no paths. The router of the open routes hands over what none of them matched, so that no second parser
of URLs could differ from the router's (that class of mistake is CVE-2026-48746 and CVE-2026-49468).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.auth.keys import Authenticator
from app.api.auth.limits import Account, Reservation
from app.errors import NotPermitted


class Guard:
    """An ASGI application in front of another: finds the account of a request and applies the account's limits."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self.app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no route has websockets
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        account = self._authenticator.account_of(scope["headers"])
        state = scope.setdefault("state", {})
        state["account"] = account
        await account.wait_for_place()
        with account.reserve() as reservation:
            state["reservation"] = reservation
            await self.app(scope, receive, send)


class AdminsOnly:
    """An ASGI application in front of one route, which the router has chosen: refuses keys that are not an admin's."""

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
    """All routes, by the key that they need. A path that is in none of the lists is not served."""

    open: Sequence[Route]  # without a key
    keys: Sequence[Route]  # with any
    admin: Sequence[Route]  # with an admin's

    def guarded_by(self, authenticator: Authenticator) -> Router:
        """A router over all, with the guard before all but the open ones, unknown paths included."""
        inside = Router([*self.keys, *map(_for_admins, self.admin)], redirect_slashes=False)
        return Router(self.open, redirect_slashes=False, default=Guard(inside, authenticator))

    def __iter__(self) -> Iterator[Route]:
        return iter((*self.open, *self.keys, *self.admin))


def _for_admins(route: Route) -> Route:
    # HEAD comes with GET by itself.
    return Route(route.path, route.endpoint, methods=list(route.methods or ()), middleware=[Middleware(AdminsOnly)])


def reservation_of(request: Request) -> Reservation:
    """The reservation of a request behind the guard."""
    reservation: Reservation = request.scope["state"]["reservation"]  # `request.state` would be made for it
    return reservation


def owner_of(request: Request) -> str:
    """The owner of the files and batches of a request: its key's name, "" where no keys are needed."""
    return reservation_of(request).account.name
