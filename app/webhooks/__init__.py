"""Signed messages about ends of batches, to public addresses only. Knows no batches and no storage."""

from app.webhooks.client import DeliveryFailed, WebhookClient, WebhookMessage, new_message_id
from app.webhooks.default_receiver import check_default, default_secret

__all__ = [
    "DeliveryFailed",
    "WebhookClient",
    "WebhookMessage",
    "check_default",
    "default_secret",
    "new_message_id",
]
