"""The OpenAI-compatible HTTP API on Starlette. It knows a `generate` callable, not what is behind it."""

from app.api.call import ServedModel
from app.api.client import Client
from app.api.endpoints.batch_routes import batch_routes
from app.api.handler import RequestHandler
from app.api.http.routes import build_app
from app.api.pipelines import Pipeline, fill_indexes, pipelines_of

__all__ = [
    "Client",
    "Pipeline",
    "RequestHandler",
    "ServedModel",
    "batch_routes",
    "build_app",
    "fill_indexes",
    "pipelines_of",
]
