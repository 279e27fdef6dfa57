"""The OpenAI-compatible HTTP API on Starlette: knows a `generate` callable, not who serves it."""

from app.api.cascades import Cascade
from app.api.endpoints.batch_routes import batch_routes
from app.api.endpoints.completions import ServedModel
from app.api.handler import Accepted, Answering
from app.api.http.routes import build_app

__all__ = ["Accepted", "Answering", "Cascade", "ServedModel", "batch_routes", "build_app"]
