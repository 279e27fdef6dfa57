"""Routes, each described where it is written: /openapi.json and the router read the same lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.responses import Response
from starlette.routing import Route

from app.api.schemas.fields import Schema
from app.json_pieces import Json

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Response]])

# Statuses with which a request may be refused, beside those of its key.
OF_A_MODEL = ("400", "403", "404")
OF_A_BODY = (*OF_A_MODEL, "408", "413", "415")
OF_GENERATION = (*OF_A_BODY, "402", "500", "503")
OF_A_LIST = ("400", "404", "503")

TEXT: Json = {"type": "string"}
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. As a decorator it makes a method of a `RouteGroup` its handler."""

    method: str
    path: str
    summary: str
    response: str | None = None  # the schema of a JSON response
    refusals: tuple[str, ...] = ()
    body: tuple[type[Schema], ...] = ()  # one of these
    media: tuple[str, ...] = ()  # other types of the response, each a text
    query: Json = field(default_factory=dict)  # parameters by name

    def __call__(self, handler: HandlerT) -> HandlerT:
        vars(handler)["operation"] = self
        return handler


class RouteGroup:
    """Routes for the same callers: its methods that are operations, in their order."""

    @classmethod
    def operations(cls) -> dict[str, Operation]:
        """By the names of the methods."""
        found = {name: getattr(each, "operation", None) for name, each in vars(cls).items()}
        return {name: each for name, each in found.items() if isinstance(each, Operation)}

    def routes(self) -> list[Route]:
        """All of them. An id in a path is one segment, and only looked up."""
        operations = self.operations().items()
        return [Route(each.path, getattr(self, name), methods=[each.method]) for name, each in operations]


def page_query(most: int) -> Json:
    """The parameters of a list."""
    return {
        "after": {"schema": TEXT, "description": "the id behind which the page begins"},
        "limit": {"schema": {"type": "integer", "minimum": 1, "maximum": most}},
        "order": {"schema": {"enum": ["asc", "desc"]}},
    }
