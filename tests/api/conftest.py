from __future__ import annotations

from pathlib import Path

import pytest

from app.text import Tokenizer
from tests.api.fakes import Service, say


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.load(str(demo_path))


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    """A model that answers everything with `3 4 5.`"""
    return Service(tokenizer, say(tokenizer, "3 4 5."))
