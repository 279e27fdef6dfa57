"""POST /v1/requests/{id}/cancel: a request that runs ends as if its client had hung up, and its client is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.live import WatchedFleet
from app.api.http.guard import reservation_of
from app.api.http.operations import Operation, RouteGroup
from app.api.request_context import RequestContext
from app.errors import NotFound

# Ends a request by its id, for an account of this name, for None whatever account has sent it; whether it was found.
Cancel = Callable[[str, str | None], Awaitable[bool]]


class RunningCalls:
    """The calls that clients of this process wait for."""

    def __init__(self, fleets: Mapping[str, WatchedFleet]) -> None:
        """`fleets` by the model's name."""
        self._fleets = fleets
        self.contexts: set[RequestContext] = set()

    async def cancel(self, request_id: str, account: str | None) -> bool:
        """See `Cancel`; only what this process has.

        By the id of the request, by that of the response, and by the ids that engines know: the live view has those.
        All calls are looked through: a cancellation is rare, and a request has nothing to note for it.
        """
        ended = [
            self._fleets[prepared.model.base].cancel(each.request_id)
            for context in self.contexts
            if account in (None, context.reservation.account.name)
            for prepared in context.begun
            if prepared.model.base in self._fleets
            and request_id
            in (context.request_id, prepared.response_id, *(each.request_id for each in prepared.requests))
            for each in prepared.requests
        ]
        return any(ended)


class CancelRoutes(RouteGroup):
    """The route. A request of another account is not found, except by an admin."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel

    @Operation("post", "/v1/requests/{request_id}/cancel", "End a request that runs", "Cancelled", ("404",))
    async def cancel(self, request: Request) -> Response:
        """Cancel one request. Raises NotFound."""
        account, request_id = reservation_of(request).account, request.path_params["request_id"]
        if not await self._cancel(request_id, None if account.may_administer else account.name):
            raise NotFound(
                f"no request {request_id[:100]!r} of this key runs now: it has ended, waits for a replica, or is in a "
                f"batch, which is cancelled as a whole",
                code="request_not_found",
            )
        return JSONResponse({"id": request_id, "object": "request", "status": "cancelled"})
