"""Signatures as the `openai` package's own verifier reads them."""

from __future__ import annotations

import base64
import time
from dataclasses import replace

import openai
import pytest
from openai.types.webhooks import (
    BatchCancelledWebhookEvent,
    BatchCompletedWebhookEvent,
    BatchExpiredWebhookEvent,
    BatchFailedWebhookEvent,
)

from app.errors import InvalidRequest
from app.webhooks.signature import SigningKey
from tests.webhooks.receivers import SECRET, at, message

client = openai.OpenAI(api_key="none", webhook_secret=SECRET)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("batch.completed", BatchCompletedWebhookEvent),
        ("batch.failed", BatchFailedWebhookEvent),
        ("batch.expired", BatchExpiredWebhookEvent),
        ("batch.cancelled", BatchCancelledWebhookEvent),
    ],
)
def test_the_openai_package_verifies_and_reads_our_messages(event: str, kind: type) -> None:
    body = message(event).body()
    headers = SigningKey.parse(SECRET).headers("evt_1", int(time.time()), body)
    read = client.webhooks.unwrap(body, headers)
    assert isinstance(read, kind)
    assert (read.id, read.type, read.created_at, read.data.id) == ("evt_1", event, 5, "batch_1")


def test_what_was_changed_or_kept_for_too_long_is_not_verified() -> None:
    body, now = message().body(), int(time.time())
    key = SigningKey.parse(SECRET)
    good = key.headers("evt_1", now, body)
    client.webhooks.verify_signature(body, good)
    other = "whsec_" + base64.b64encode(b"x" * 32).decode()
    for headers, sent, secret in (
        (good, body + b" ", SECRET),
        (good | {"webhook-id": "evt_2"}, body, SECRET),
        (good | {"webhook-timestamp": str(now + 1)}, body, SECRET),
        (key.headers("evt_1", now - 301, body), body, SECRET),
        (good, body, other),
    ):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.verify_signature(sent, headers, secret=secret)


@pytest.mark.parametrize(
    "secret",
    ["", "whsec_", "secret", SECRET.removeprefix("whsec_"), "whsec_short", "whsec_!" + "A" * 40,
     "whsec_" + base64.b64encode(b"x" * 23).decode(), "whsec_" + base64.b64encode(b"x" * 65).decode(), SECRET + "é"],
)  # fmt: skip
def test_a_secret_that_is_none_is_refused_without_being_repeated(secret: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SigningKey.parse(secret)
    assert refused.value.param == "webhook.secret"
    assert len(secret) < 7 or secret not in refused.value.message


def test_nothing_that_is_printed_shows_a_secret() -> None:
    sent = replace(message(), receiver=at("https://a.example/token-in-a-path"))
    assert SECRET not in repr(SigningKey.parse(SECRET)) + repr(sent)
    assert "token-in-a-path" not in repr(sent)
