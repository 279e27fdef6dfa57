"""Signed messages to whoever wants to hear of an end: to public addresses only. Knows no batches and no storage."""

from app.webhooks.courier import Courier, DeliveryFailed
from app.webhooks.default_receiver import check_default, default_secret
from app.webhooks.message import Message, new_message_id
from app.webhooks.pauses import pause_s

__all__ = ["Courier", "DeliveryFailed", "Message", "check_default", "default_secret", "new_message_id", "pause_s"]
