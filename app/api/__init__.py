"""The OpenAI-compatible HTTP API on Starlette: knows a `generate` callable, not who serves it."""

from app.api.answering import Accepted, Answering
from app.api.batch_routes import batch_routes
from app.api.cascades import Cascade
from app.api.completions import ServedModel
from app.api.routes import build_app

__all__ = ["Accepted", "Answering", "Cascade", "ServedModel", "batch_routes", "build_app"]
