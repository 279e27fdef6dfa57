"""The guard protects all routes except the few open ones: no request passes it without a valid key.

The guard does not parse paths. The router of the open routes hands every unmatched request to the guard, so no second
URL parser can disagree with the router's (CVE-2026-48746 and CVE-2026-49468 are mistakes of that class).
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
    """ASGI middleware that finds the account of a request and applies the account's limits."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self.app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no route accepts WebSockets
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        account = self._authenticator.account_of(scope["headers"])
        state = scope.setdefault("state", {})
        state["account"] = account
        await account.wait_for_slot()
        with account.reserve() as reservation:
            state["reservation"] = reservation
            await self.app(scope, receive, send)


class AdminsOnly:
    """ASGI middleware around a single route that refuses keys without `admin: true`."""

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
    """All routes, grouped by the key that they require."""

    open: Sequence[Route]  # require no key
    keys: Sequence[Route]  # accept any key
    admin: Sequence[Route]  # require an admin key

    def guarded_by(self, authenticator: Authenticator) -> Router:
        """Return a router for all routes. Unknown paths and all routes that are not open are behind the guard."""
        inside = Router([*self.keys, *map(_for_admins, self.admin)], redirect_slashes=False)
        return Router(self.open, redirect_slashes=False, default=Guard(inside, authenticator))

    def __iter__(self) -> Iterator[Route]:
        return iter((*self.open, *self.keys, *self.admin))


def _for_admins(route: Route) -> Route:
    # Starlette adds HEAD to GET.
    return Route(route.path, route.endpoint, methods=list(route.methods or ()), middleware=[Middleware(AdminsOnly)])


def reservation_of(request: Request) -> Reservation:
    """Return the reservation of a request that has passed the guard."""
    reservation: Reservation = request.scope["state"]["reservation"]  # `request.state` would create an object
    return reservation


def owner_of(request: Request) -> str:
    """Return the owner of a request's files and batches: the name of its key, or "" if the service needs no keys."""
    return reservation_of(request).account.name
