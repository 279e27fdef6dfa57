"""Receivers of messages: the one that a batch names, or the default of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.config import WebhooksConfig
from app.errors import InvalidRequest, InvalidSetup
from app.webhooks.addresses import AddressGate, parse_url
from app.webhooks.signature import SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookReceiver:
    """Where messages go, and the secret that signs them."""

    url: str = field(repr=False)
    secret: str = field(repr=False)


def default_receiver(config: WebhooksConfig) -> WebhookReceiver | None:
    """The receiver of the settings, if there is one. Its secret is read anew: the file may have changed.

    Raises OSError or ValueError when it cannot be read.
    """
    if config.url is None:
        return None
    assert config.secret_file is not None, "url and secret_file go together"
    secret = Path(config.secret_file).expanduser().read_text(encoding="ascii").strip()
    return WebhookReceiver(url=config.url, secret=secret)


def check_default(config: WebhooksConfig) -> None:
    """Raise InvalidSetup, with the setting, when nothing could be sent to the default receiver."""
    try:
        receiver = default_receiver(config)
        if receiver is not None:
            parse_url(receiver.url, AddressGate(config.allowed_networks, is_operators=True))
            SigningKey.parse(receiver.secret)
    except InvalidRequest as error:
        what = "url" if error.param == "webhook.url" else "secret_file"
        raise InvalidSetup(f"batches.webhooks.{what}: {error.message}") from None
    except OSError as error:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file}: {error.strerror}") from None
    except ValueError:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file}: is not a text file") from None
