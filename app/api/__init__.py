"""The OpenAI-compatible HTTP API on Starlette: knows a `generate` callable, not who serves it."""

from app.api.completions import ServedModel
from app.api.routes import build_app

__all__ = ["ServedModel", "build_app"]
