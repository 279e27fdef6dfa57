"""The OpenAI-compatible HTTP API on Starlette. The API generates tokens only through the `generate` of its models."""

from app.api.handler import RequestHandler
from app.api.http.routes import build_app
from app.api.pipelines import Pipeline, fill_indexes, pipelines_of
from app.api.prepared_request import ServedModel
from app.api.request_context import RequestContext

__all__ = [
    "Pipeline",
    "RequestContext",
    "RequestHandler",
    "ServedModel",
    "build_app",
    "fill_indexes",
    "pipelines_of",
]
