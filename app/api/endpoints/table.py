"""The table of all endpoints that compute on replicas: over HTTP, in batches and in bulk runs."""

from __future__ import annotations

from app.api.endpoints.chat import CHAT
from app.api.endpoints.completions import COMPLETIONS
from app.api.endpoints.embeddings import EMBEDDINGS
from app.api.endpoints.responses import RESPONSES

ENDPOINTS = {endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)}
