"""A message about the end of something: the same bytes at every attempt, so that a receiver knows it again."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookMessage:
    """What is sent, where to, and what signs it."""

    id: str
    url: str = field(repr=False)
    secret: str = field(repr=False)
    event: str  # as `batch.completed`
    subject_id: str
    created_at: int  # seconds since 1970

    def body(self) -> bytes:
        """As OpenAI's events are."""
        event = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.event,
            "data": {"id": self.subject_id},
        }
        return json.dumps(event, separators=(",", ":")).encode()


def new_message_id() -> str:
    return f"evt_{uuid.uuid4().hex}"
