from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.build import build_engine
from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from tests.api.fakes import Service, say


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


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


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    """A model that answers everything with `3 4 5.`"""
    return Service(tokenizer, say(tokenizer, "3 4 5."))
