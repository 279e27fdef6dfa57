"""The receiver of messages about batches that name none: its URL in the settings, its secret in a file."""

from __future__ import annotations

from pathlib import Path

from app.config import WebhooksConfig
from app.errors import InvalidRequest, InvalidSetup
from app.webhooks.addresses import AddressGate
from app.webhooks.signature import SigningKey
from app.webhooks.url import parse_url


def default_secret(config: WebhooksConfig) -> str:
    """The secret, read anew, for the file may have changed. Raises OSError or ValueError when it cannot be."""
    assert config.secret_file is not None, "only where there is a default receiver"
    return Path(config.secret_file).expanduser().read_text(encoding="ascii").strip()


def check_default(config: WebhooksConfig) -> None:
    """Raise InvalidSetup, with the setting, when nothing could be sent to the default receiver, if there is one."""
    if config.url is None:
        return
    try:
        parse_url(config.url, config, AddressGate(config.allowed_networks))
        SigningKey.parse(default_secret(config))
    except InvalidRequest as error:
        what = "url" if error.param == "webhook.url" else "secret_file"
        raise InvalidSetup(f"batches.webhooks.{what}: {error.message}") from None
    except OSError as error:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file}: {error.strerror}") from None
    except ValueError:
        raise InvalidSetup(f"batches.webhooks.secret_file: {config.secret_file}: is not a text file") from None
