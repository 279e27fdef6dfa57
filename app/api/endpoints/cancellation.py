"""POST /v1/requests/{id}/cancel: cancels a running request as a disconnect would, but sends an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.live import WatchedFleet
from app.api.http.guard import reservation_of
from app.api.http.operations import Operation, RouteGroup
from app.api.request_context import RequestContext
from app.errors import NotFound

# Cancels the request with this id if the named account sent it (None means any account). Returns whether it was found.
Cancel = Callable[[str, str | None], Awaitable[bool]]


class RunningCalls:
    """The calls that this process is answering."""

    def __init__(self, fleets: Mapping[str, WatchedFleet]) -> None:
        """`fleets` maps model names to fleets."""
        self._fleets = fleets
        self.contexts: set[RequestContext] = set()

    async def cancel(self, request_id: str, account: str | None) -> bool:
        """Cancel a call of this process; see `Cancel`.

        `request_id` identifies the request, its response, or one of its engine requests, whose ids the live view shows.
        Searches all calls, because cancellations are rare and an index would add work to every request.
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
    """The cancel route. Only admins may cancel requests of another account; other clients receive NotFound."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel

    @Operation("post", "/v1/requests/{request_id}/cancel", "Cancel a running request", "Cancelled", ("404",))
    async def cancel(self, request: Request) -> Response:
        """Cancel one request. Raises NotFound."""
        account, request_id = reservation_of(request).account, request.path_params["request_id"]
        if not await self._cancel(request_id, None if account.may_administer else account.name):
            raise NotFound(
                f"this key has no running request {request_id[:100]!r}; the request may have ended, be waiting for a "
                f"replica, or belong to a batch, which can only be cancelled as a whole",
                code="request_not_found",
            )
        return JSONResponse({"id": request_id, "object": "request", "status": "cancelled"})
