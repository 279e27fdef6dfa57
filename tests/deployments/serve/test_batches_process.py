"""The process of files and batches, without a cluster: what leaves it when a call fails."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from app.errors import Failure, NotFound
from deployments.serve.batches import Batches

CANARY = "canary-4711"


def fails_with(error: Exception) -> Batches:
    """The deployment over a service, one method of which raises this."""

    async def create_batch() -> None:
        raise error

    process: Batches = Batches.__new__(Batches)
    process._opening = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    process._opening.set_result(SimpleNamespace(create_batch=create_batch))  # type: ignore[attr-defined]
    return process


def test_an_error_that_is_none_of_ours_leaves_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    async def call() -> None:
        await fails_with(KeyError(CANARY)).call("create_batch")

    with caplog.at_level(logging.ERROR), pytest.raises(Failure) as caught:
        asyncio.run(call())
    assert caught.value.__suppress_context__
    assert "`create_batch` of the batches process failed: " in caplog.text
    assert "KeyError at test_batches_process.py:" in caplog.text
    assert CANARY not in caplog.text + str(caught.value)


def test_an_error_of_ours_leaves_as_it_is() -> None:
    async def call() -> None:
        await fails_with(NotFound("there is no such file")).call("create_batch")

    with pytest.raises(NotFound, match="there is no such file"):
        asyncio.run(call())
