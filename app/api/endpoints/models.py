"""GET /v1/models: the models and cascades that a key may use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api.handler import RequestHandler
from app.api.http.guard import reservation_of


class ModelRoutes:
    """The list of models, and one of them."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    def routes(self) -> list[Route]:
        """All of them. A model's id may have slashes."""
        return [
            Route("/v1/models", self.list, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.retrieve, methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        """All that the key may use."""
        account, handler = reservation_of(request).account, self._handler
        entries = [model.entry(name) for name, model in handler.models.items() if account.may_use(model.name)]
        entries += [cascade.entry() for cascade in handler.cascades.values() if cascade.is_for(account)]
        return JSONResponse({"object": "list", "data": entries})

    async def retrieve(self, request: Request) -> Response:
        """One of them, by its name or an alias."""
        name, account = request.path_params["model_id"], reservation_of(request).account
        cascade = self._handler.cascades.get(name)
        if cascade is not None and cascade.is_for(account):
            return JSONResponse(cascade.entry())
        return JSONResponse(self._handler.model(name, account).entry(name))
