"""Routes and their descriptions. The router and /openapi.json read the same declaration of each route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.responses import Response
from starlette.routing import Route

from app.api.schemas.fields import Schema
from app.json_pieces import Json

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Response]])

# Statuses of refusals, by kind of route. The OpenAPI document adds the statuses that concern the request's key.
MODEL_REFUSALS = ("400", "403", "404")
BODY_REFUSALS = (*MODEL_REFUSALS, "408", "413", "415")
GENERATION_REFUSALS = (*BODY_REFUSALS, "402", "500", "503")
LIST_REFUSALS = ("400", "404", "503")

TEXT: Json = {"type": "string"}
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One HTTP method of one path. Used as a decorator, it marks its handler, a method of a `RouteGroup`."""

    method: str
    path: str
    summary: str
    response: str | None = None  # the name of the schema of a JSON response
    refusals: tuple[str, ...] = ()
    body: tuple[type[Schema], ...] = ()  # the body must match one of these schemas
    media: tuple[str, ...] = ()  # media types of the response besides JSON, which are all text
    query: Json = field(default_factory=dict)  # query parameters by name

    def __call__(self, handler: HandlerT) -> HandlerT:
        vars(handler)["operation"] = self
        return handler


class RouteGroup:
    """Routes that require the same kind of key. Methods decorated with `Operation` become routes, in order."""

    @classmethod
    def operations(cls) -> dict[str, Operation]:
        """Return the operations by method name."""
        found = {name: getattr(each, "operation", None) for name, each in vars(cls).items()}
        return {name: each for name, each in found.items() if isinstance(each, Operation)}

    def routes(self) -> list[Route]:
        """Return all routes. Handlers may use ids from the path only for look-ups, never as file paths."""
        operations = self.operations().items()
        return [Route(each.path, getattr(self, name), methods=[each.method]) for name, each in operations]


def page_query(most: int) -> Json:
    """Return the query parameters of a list whose pages have at most `most` entries."""
    return {
        "after": {"schema": TEXT, "description": "the id of the last entry before the page"},
        "limit": {"schema": {"type": "integer", "minimum": 1, "maximum": most}},
        "order": {"schema": {"enum": ["asc", "desc"]}},
    }
