"""The process dies at every write in turn: after restarts every line has ended exactly once, and few ran twice."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batches import PageOf
from app.errors import InvalidRequest
from app.jobs.local_service import LocalBatchService
from app.jobs.space import shortage_of_disk
from tests.kit.jobs import (
    ENDED,
    OWNER,
    Crash,
    Echo,
    Writes,
    all_files,
    begin,
    ends,
    input_line,
    jsonl,
    refused,
    service_in,
    until,
)

NUM_LINES = 3
MAX_IN_FLIGHT = 2
NAMES = {f"line-{n}" for n in range(NUM_LINES)}
CONTENT = jsonl(*(input_line(f"line-{n}") for n in range(NUM_LINES)))
# Processes die here and no machine does: folders are in memory, where there is room, and their writes wait for no disk.
SHARED_MEMORY = Path("/dev/shm")
WITHOUT_DISK = SHARED_MEMORY if SHARED_MEMORY.is_dir() and shortage_of_disk(SHARED_MEMORY) is None else None


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=WITHOUT_DISK) as folder:
        yield Path(folder)


async def one_life(folder: Path, echo: Echo, writes: Writes, num_writes: int, *, cancel: bool = False) -> bool:
    """Go on with the batch, or begin it where there is none, until it has ended or the process has died."""
    writes.left = None
    service = service_in(folder, echo, max_in_flight=MAX_IN_FLIGHT)
    async with service:
        writes.left = num_writes
        with suppress(Crash):
            await _go_on(service, writes, cancel=cancel)
        has_died = writes.is_dead
    return not has_died


async def _go_on(service: LocalBatchService, writes: Writes, *, cancel: bool = False) -> None:
    batches = (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]
    batch_id = batches[0]["id"] if batches else await begin(service, CONTENT)
    if cancel:
        with suppress(InvalidRequest):  # it has ended already
            await service.cancel_batch(OWNER, batch_id)
    while not writes.is_dead and (await service.batch(OWNER, batch_id))["status"] not in ENDED:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def last_life(folder: Path, echo: Echo, writes: Writes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Go on to the end: the only batch, its output and its errors. Checks that the catalog knows every file."""
    writes.left = None
    async with service_in(folder, echo, max_in_flight=MAX_IN_FLIGHT) as service:
        await _go_on(service, writes)
        [batch] = (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]
        batch = await until(service, batch["id"])
        output, errors = await ends(service, batch)
        known = {file["id"] for file in await all_files(service)}
        assert known == {path.name for path in (folder / "files").iterdir()}
        assert not list((folder / "drafts").iterdir())
        return batch, output, errors


def test_every_line_ends_once_wherever_the_process_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Writes().watch(monkeypatch)
    num_points = 0
    while True:
        folder = tmp_path / str(num_points)
        echo = Echo({"line-1": lambda _: refused()})
        if asyncio.run(one_life(folder, echo, writes, num_points + 1)):
            break
        num_points += 1
        batch, output, errors = asyncio.run(last_life(folder, echo, writes))
        assert batch["status"] == "completed"
        assert (output.keys(), errors.keys()) == (NAMES - {"line-1"}, {"line-1"})
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - 1, "failed": 1}
        assert batch["usage"]["output_tokens"] == 2 * (NUM_LINES - 1)
        assert max(echo.asked.values()) <= 2
        assert echo.asked.total() <= NUM_LINES + MAX_IN_FLIGHT, "only lines in flight run again"
    assert num_points > 20, "every write was a point of death"


@settings(max_examples=20, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5),
    bad=st.sets(st.sampled_from(sorted(NAMES)), max_size=3),
)
def test_any_lives_with_cancels_between(lives: list[tuple[int, bool]], bad: set[str]) -> None:
    echo = Echo(dict.fromkeys(bad, lambda _: refused()))
    with tempfile.TemporaryDirectory(dir=WITHOUT_DISK) as folder, pytest.MonkeyPatch.context() as monkeypatch:
        writes = Writes().watch(monkeypatch)
        for num_writes, cancel in lives:
            asyncio.run(one_life(Path(folder), echo, writes, num_writes, cancel=cancel))
        batch, output, errors = asyncio.run(last_life(Path(folder), echo, writes))
    assert batch["status"] in ("completed", "cancelled")
    if batch["in_progress_at"] is not None:
        assert output.keys() | errors.keys() == NAMES
    assert not output.keys() & bad
    for name, line in errors.items():
        assert (line["error"] or {}).get("code") == ("batch_cancelled" if line["response"] is None else None), name
    counts = batch["request_counts"]
    assert counts["completed"] == len(output)
    assert counts["failed"] == sum(line["response"] is not None for line in errors.values())


def test_a_disk_that_is_full_for_a_while_costs_nothing_wherever_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.batch_runner.STORAGE_PAUSE_S", 0.001)
    writes = Writes(lambda: OSError(28, "No space left on device")).watch(monkeypatch)
    num_points = 0
    while asyncio.run(_full_from(tmp_path / str(num_points), writes, num_points)):
        num_points += 1
    assert num_points > 15, "every write was a point where the disk was full"


async def _full_from(folder: Path, writes: Writes, num_writes: int) -> bool:
    """Whether so many writes came before the batch's end. The next four failed."""
    echo = Echo({"line-1": lambda _: refused()})
    writes.left = None
    async with service_in(folder, echo, max_in_flight=MAX_IN_FLIGHT) as service:
        batch_id, of_another = await begin(service, CONTENT), await begin(service, CONTENT, owner="bob")
        writes.left, writes.failures_left = num_writes, 4
        ended = [await until(service, batch_id), await until(service, of_another, owner="bob")]
        was_full = writes.failures_left == 0
        writes.left = None
        for batch, owner in zip(ended, (OWNER, "bob"), strict=True):
            assert batch["status"] == "completed"
            output, errors = await ends(service, batch, owner=owner)
            assert (output.keys(), errors.keys()) == (NAMES - {"line-1"}, {"line-1"})
        known = {file["id"] for owner in (OWNER, "bob") for file in await all_files(service, owner)}
        assert known == {path.name for path in (folder / "files").iterdir()}
        assert not list((folder / "drafts").iterdir())
        return was_full
