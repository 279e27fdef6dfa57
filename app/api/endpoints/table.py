"""The table of all endpoints whose requests run on replicas. HTTP routes, batches and bulk runs use the table."""

from app.api.endpoints.chat import CHATS
from app.api.endpoints.classification import CLASSIFY
from app.api.endpoints.completions import COMPLETIONS
from app.api.endpoints.decisions import DECISIONS
from app.api.endpoints.embeddings import EMBEDDINGS
from app.api.endpoints.messages import MESSAGES
from app.api.endpoints.ranking import RERANK, SCORE
from app.api.endpoints.responses import RESPONSES

ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES, RERANK, SCORE, CLASSIFY, DECISIONS, MESSAGES)
}
# The paths that rows of a bulk run may name, and whether the endpoint generates text.
BULK_URLS = {path: each.generates for path, each in ENDPOINTS.items() if each.check_bulk is not None}
