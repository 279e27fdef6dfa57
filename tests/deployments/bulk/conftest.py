"""What tests of bulk rows share: the bundled model's words, and rows made short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.api import RequestHandler, ServedModel
from app.api.endpoints.table import BULK_URLS
from app.config import ApiConfig
from app.engine.request import ModelInfo
from app.jobs.items import RowSettings, item_of, row_from_fields
from app.jobs.job import InvalidItem
from app.text import Tokenizer
from deployments.bulk.engine_worker import PreparedItem
from deployments.bulk.pipeline import prepare_row

Prepare = Callable[..., PreparedItem | InvalidItem]


@pytest.fixture(scope="session")
def model(demo_path: Path) -> ServedModel:
    """The bundled model without an engine: rows are prepared and not computed."""
    return ServedModel(
        name="demo",
        tokenizer=Tokenizer.load(str(demo_path)),
        model_info=ModelInfo(max_model_len=2048, vocab_size=763, eos_token_ids=(1,)),
        generate=lambda request: pytest.fail("preparing a row starts nothing"),
        created=0,
    )


@pytest.fixture
def prepared(model: ServedModel) -> Prepare:
    """Prepares the row of some columns."""

    def prepare_one(fields: dict[str, Any], number: int = 0, **settings: Any) -> PreparedItem | InvalidItem:
        row = row_from_fields(fields, number=number, place=f"input.jsonl:{number + 1}")
        item = item_of(row, RowSettings(**settings), BULK_URLS)
        return (
            item
            if isinstance(item, InvalidItem)
            else asyncio.run(prepare_row(item, RequestHandler([model], ApiConfig())))
        )

    return prepare_one
