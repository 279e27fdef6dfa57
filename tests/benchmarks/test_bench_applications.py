"""The services that benchmarks start without a test of their own: every setting exists."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import ApplicationConfig
from benchmarks.chaos import stage
from benchmarks.clients import __main__ as clients
from benchmarks.service import fields, fleet


@pytest.mark.parametrize(
    "application",
    [
        clients.served("models/demo"),
        fields.application(fields._parser().parse_args([]), "models/demo", "folder"),
        fleet.served(fleet._parser().parse_args([])),
        stage.application(crash_token_id=0, silence_timeout_s=0.8, place_timeout_s=1.0),
        stage.application(weights=True),
    ],
    ids=["clients", "fields", "fleet", "chaos", "chaos with weights"],
)
def test_an_application_is_one_that_the_service_takes(application: dict[str, Any]) -> None:
    config = ApplicationConfig.model_validate(application)
    assert [model.name for model in config.models] == [model["name"] for model in application["models"]]
