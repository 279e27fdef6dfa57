"""Receivers of messages, which are named by batches, or by the settings as a default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.config import WebhooksConfig
from app.errors import InvalidRequest, InvalidSetup
from app.webhooks.addresses import AddressPolicy, parse_url
from app.webhooks.signature import SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookReceiver:
    """The URL that receives messages, and the secret with which they are signed."""

    url: str = field(repr=False)
    secret: str = field(repr=False)


def default_receiver(config: WebhooksConfig) -> WebhookReceiver | None:
    """Return the receiver in the settings, or None. Reads the secret's file on each call, because it may change.

    Raises OSError or ValueError if the file cannot be read.
    """
    if config.url is None:
        return None
    assert config.secret_file is not None, "url and secret_file belong together"
    secret = Path(config.secret_file).expanduser().read_text(encoding="ascii").strip()
    return WebhookReceiver(url=config.url, secret=secret)


def check_default(config: WebhooksConfig) -> None:
    """Raise InvalidSetup if the default receiver is invalid. The error names the setting."""
    try:
        receiver = default_receiver(config)
        if receiver is not None:
            parse_url(receiver.url, AddressPolicy(config.allowed_networks, is_operators=True))
            SigningKey.parse(receiver.secret)
    except InvalidRequest as error:
        what = "url" if error.param == "webhook.url" else "secret_file"
        raise InvalidSetup(f"batches.webhooks.{what}: {error.message}") from None
    except OSError as error:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file}: {error.strerror}") from None
    except ValueError:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file} is not ASCII text") from None
