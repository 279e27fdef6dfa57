"""Signatures of Standard Webhooks (version 1, HMAC-SHA256), which OpenAI's clients can verify."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field

from app.errors import InvalidRequest

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64  # as the specification recommends


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The secret key that the service shares with one receiver."""

    _key: bytes = field(repr=False)

    @classmethod
    def parse(cls, secret: str) -> SigningKey:
        """Parse a secret of `whsec_` and base64. Raises InvalidRequest, whose message never quotes the secret."""
        prefix = "whsec_"
        try:
            key = base64.b64decode(secret.removeprefix(prefix), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not secret.startswith(prefix) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
            raise InvalidRequest(
                f"webhook.secret must be {prefix!r}, followed by {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random bytes "
                f"in base64",
                param="webhook.secret",
            )
        return cls(key)

    def headers(self, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
        """Return the three headers for a message that is sent at `timestamp`, in seconds since 1970."""
        signed = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.new(self._key, signed, hashlib.sha256).digest()
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        }
