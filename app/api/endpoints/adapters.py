"""GET, POST and DELETE /admin/adapters: list, load and unload the LoRA adapters of models without a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.admin import Answers
from app.api.handler import RequestHandler
from app.api.http.body import read_json_object
from app.api.http.guard import reservation_of
from app.api.http.operations import BODY_REFUSALS, Operation, RouteGroup
from app.api.schemas.fields import Schema
from app.config import Name
from app.engine.request import Adapter
from app.errors import InvalidRequest, NotFound, UnsupportedAdapter
from app.json_pieces import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapters:
    """The digests of the adapters that one replica has loaded."""

    replica_id: str
    loaded: Sequence[str]
    max_loaded: int


class AdapterFleet(Protocol):
    """Loads adapters on all replicas of one model."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters that this process serves. `loaded` updates them from all replicas."""

    async def loaded(self) -> Answers[LoadedAdapters]:
        """Ask all replicas for the adapters that they have loaded."""
        ...

    async def load(self, name: str, path: str) -> Adapter:
        """Have one replica load an adapter, then serve the adapter on all replicas. Raises UnsupportedAdapter."""
        ...

    async def unload(self, name: str) -> None:
        """Stop serving an adapter. Requests that already use the adapter are completed."""
        ...


class AdapterToLoad(Schema):
    """The body of POST /admin/adapters."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    path: str = Field(min_length=1, max_length=4096)
    model: str | None = None


class AdapterRoutes(RouteGroup):
    """The routes of `/admin/adapters`, for admins."""

    def __init__(self, handler: RequestHandler, fleets: Mapping[str, AdapterFleet]) -> None:
        """`fleets` maps model names to fleets. A model without a fleet offers only the configured adapters."""
        self._handler = handler
        self._fleets = fleets

    @Operation("get", "/admin/adapters", "The LoRA adapters, and the replicas that have loaded them", "AdapterList")
    async def show(self, request: Request) -> Response:
        found = {model: await fleet.loaded() for model, fleet in self._fleets.items()}
        entries = [_entry(model, each, of) for model, of in found.items() for each in self._fleets[model].adapters]
        replicas = [
            {"model": model, "replica": each.replica_id, "loaded": len(each.loaded), "max_loaded": each.max_loaded}
            for model, of in found.items()
            for each in of.reports
        ]
        num_missing = sum(of.num_missing for of in found.values())
        return JSONResponse({"object": "list", "data": entries, "replicas": replicas, "missing": num_missing})

    @Operation("post", "/admin/adapters", "Load an adapter", "Adapter", (*BODY_REFUSALS, "503"), (AdapterToLoad,))
    async def load(self, request: Request) -> Response:
        """Load an adapter, replacing any adapter of the same name, and respond with its entry."""
        body = await read_json_object(request, self._handler.limits, self._handler.threads)
        asked = AdapterToLoad.checked(body)
        model = self._handler.names.model(asked.model, reservation_of(request).account).base
        self._check_name(asked.name, model)
        fleet = self._fleet(model)
        try:
            adapter = await fleet.load(asked.name, asked.path)
        except UnsupportedAdapter as error:
            raise InvalidRequest(error.message, param="path", code="unsupported_adapter") from error
        return JSONResponse(_entry(model, adapter, await fleet.loaded()))

    @Operation("delete", "/admin/adapters/{name:path}", "Stop serving an adapter", "Anything", ("404",))
    async def unload(self, request: Request) -> Response:
        name = request.path_params["name"]
        served = self._handler.names.models.get(name)
        if served is None or served.adapter is None:
            raise NotFound(f"there is no adapter {name[:100]!r}", param="name")
        await self._fleet(served.base).unload(name)
        return JSONResponse({"name": name, "model": served.base, "object": "adapter", "deleted": True})

    def _check_name(self, name: str, model: str) -> None:
        """Raise InvalidRequest if another model, adapter or pipeline has this name."""
        served = self._handler.names.models.get(name)
        is_other = served is not None and (served.adapter is None or served.base != model)
        if is_other or name in self._handler.names.pipelines:
            raise InvalidRequest(f"the name {name!r} is already in use; choose another name", param="name")

    def _fleet(self, model: str) -> AdapterFleet:
        if model not in self._fleets:
            raise NotFound(f"this process has no replicas of {model!r}", param="model")
        return self._fleets[model]


def _entry(model: str, adapter: Adapter, found: Answers[LoadedAdapters]) -> Json:
    return {
        "name": adapter.name,
        "object": "adapter",
        "model": model,
        "path": adapter.path,
        "digest": adapter.digest,
        "loaded_on": sorted(each.replica_id for each in found.reports if adapter.digest in each.loaded),
    }
