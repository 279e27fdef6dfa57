"""The OpenAI-compatible HTTP API on Starlette. It knows a `generate` callable, not what is behind it."""

from app.api.call import ServedModel
from app.api.cascades import Cascade
from app.api.endpoints.batch_routes import batch_routes
from app.api.handler import Client, RequestHandler
from app.api.http.routes import build_app

__all__ = ["Cascade", "Client", "RequestHandler", "ServedModel", "batch_routes", "build_app"]
