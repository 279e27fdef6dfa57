"""Signed messages about ends of batches, to public addresses only. Knows no batches and no storage."""

from app.webhooks.client import DeliveryFailed, WebhookClient
from app.webhooks.default_receiver import check_default, default_secret
from app.webhooks.message import WebhookMessage, new_message_id
from app.webhooks.pauses import pause_s

__all__ = [
    "DeliveryFailed",
    "WebhookClient",
    "WebhookMessage",
    "check_default",
    "default_secret",
    "new_message_id",
    "pause_s",
]
