from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.build import build_engine
from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from tests.kit.service import Service, say
from tests.text.tool_calls.templates import TEMPLATES, tokenizer_with


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.load(str(demo_path))


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncEngine]:
    """The bundled model, computing."""
    built = build_engine(EngineConfig())
    yield built
    built.shutdown()


@pytest.fixture(scope="session")
def tools_tokenizer() -> Tokenizer:
    """Of bytes, with a chat template that has a place for tools."""
    return tokenizer_with(TEMPLATES["hermes"])


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    """A model that answers everything with `3 4 5.`"""
    return Service(tokenizer, say(tokenizer, "3 4 5."))


@pytest.fixture
def collected_as_served() -> None:
    """What is loaded is passed over by the garbage collector, as in a process that serves requests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _asks_again_soon() -> Iterator[None]:
    """A client asks for a stored answer again in a moment while a new process opens the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.api.endpoints.stored_responses._RETRY_PAUSE_S", 0.01)
        yield
