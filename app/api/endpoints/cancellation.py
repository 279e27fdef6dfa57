"""POST /v1/requests/{id}/cancel: a request that runs ends as if its client had hung up, and its client is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api.endpoints.live import WatchedFleet
from app.api.http.guard import reservation_of
from app.api.prepared_request import PreparedRequest
from app.api.request_context import RequestContext
from app.errors import NotFound

# Ends a request by its id, for an account of this name, for None whatever account has sent it; whether it was found.
Cancel = Callable[[str, str | None], Awaitable[bool]]


class RunningCalls:
    """The calls that clients of this process wait for.

    By the id of the request, by that of the response, and by the ids that engines know: the live view has those.
    """

    def __init__(self, fleets: Mapping[str, WatchedFleet]) -> None:
        """`fleets` by the model's name."""
        self._fleets = fleets
        self._calls: dict[str, list[tuple[str, PreparedRequest]]] = {}  # with the account's name

    @contextmanager
    def noting(self, context: RequestContext) -> Iterator[None]:
        """While the block runs, what the request of this context computes is noted as it begins."""
        noted: list[tuple[str, tuple[str, PreparedRequest]]] = []

        def note(prepared: PreparedRequest) -> None:
            entry = (context.reservation.account.name, prepared)
            for each in {context.request_id, prepared.response_id, *(each.request_id for each in prepared.requests)}:
                self._calls.setdefault(each, []).append(entry)
                noted.append((each, entry))

        context.on_begin = note
        try:
            yield
        finally:
            for each, entry in noted:
                self._calls[each].remove(entry)
                if not self._calls[each]:
                    del self._calls[each]

    async def cancel(self, request_id: str, account: str | None) -> bool:
        """See `Cancel`; only what this process has."""
        calls = [prepared for owner, prepared in self._calls.get(request_id, ()) if account in (None, owner)]
        ended = [
            self._fleets[prepared.model.base].cancel(each.request_id)
            for prepared in calls
            if prepared.model.base in self._fleets
            for each in prepared.requests
        ]
        return any(ended)


class CancelRoute:
    """The route. A request of another account is not found, except by an admin."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel

    def route(self) -> Route:
        return Route("/v1/requests/{request_id}/cancel", self.cancel, methods=["POST"])

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
