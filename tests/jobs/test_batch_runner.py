"""How a batch goes: bounded, patient, stopped by its caller or by time, failed by its storage."""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.batches import BatchLimits, ItemOrigin, ItemResponse, NewBatch, PageOf
from app.errors import EngineStopped, InvalidRequest, Overloaded, Unavailable
from app.jobs.catalog import Catalog
from app.jobs.items import Checked, InputRules, OpenFile, check
from app.jobs.job import Job
from app.jobs.local_service import LocalBatchService
from app.jobs.space import RESERVE_BYTES
from app.json_pieces import Rows
from tests import waiting
from tests.kit.engine import FakeClock
from tests.kit.jobs import (
    CHAT,
    OWNER,
    Echo,
    Writes,
    all_files,
    begin,
    ends,
    input_line,
    jsonl,
    ok,
    refused,
    service_in,
    until,
    upload,
)
from tests.waiting import PATIENCE_S

ONE = jsonl(input_line("one"))
TEN = jsonl(*(input_line(f"line-{n}") for n in range(10)))


def raising(error: Exception) -> Callable[[int], ItemResponse]:
    def answer(_: int) -> ItemResponse:
        raise error

    return answer


HALF_HANG = {f"line-{n}": raising(Overloaded("full", retry_after_s=60)) for n in range(5, 10)}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_PAUSE_S", "UNAVAILABLE_PAUSE_S", "FAILURE_PAUSE_S", "TRY_EVERY_S", "TICK_S"):
        monkeypatch.setattr(f"app.jobs.executors.{name}", 0.01)
    monkeypatch.setattr("app.jobs.batch_runner.STORAGE_PAUSE_S", 0.01)


async def test_lines_of_all_batches_share_the_places_in_flight(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo, max_in_flight=4) as service:
        echo.hold = asyncio.Event()
        batch_ids = [await begin(service, TEN) for _ in range(3)]
        await echo.has_open(4)
        await asyncio.sleep(0.05)
        echo.hold.set()
        for batch_id in batch_ids:
            output, _ = await ends(service, await until(service, batch_id))
            assert len(output) == 10
    assert echo.max_open == 4


async def test_few_large_lines_are_computed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.executors.MAX_LARGE_LINES", 2)
    monkeypatch.setattr("app.jobs.executors.LARGE_LINE_BYTES", 1000)
    large = jsonl(*(input_line(f"large-{n}", user="x" * 1000) for n in range(6)))
    echo = Echo()
    async with service_in(tmp_path, echo, max_in_flight=20) as service:
        echo.hold = asyncio.Event()
        batch_ids = [await begin(service, large), await begin(service, TEN)]
        await echo.has_open(12)
        await asyncio.sleep(0.05)
        assert echo.num_open == 12, "all small ones, and two large"
        echo.hold.set()
        for batch_id in batch_ids:
            await until(service, batch_id)
    assert echo.max_open == 12


async def test_a_small_batch_takes_turns_with_a_large_one_that_began_before(tmp_path: Path) -> None:
    large = jsonl(*(input_line(f"large-{n}") for n in range(200)))
    small = jsonl(*(input_line(f"small-{n}") for n in range(3)))
    num_asked = []

    def last(_: int) -> ItemResponse:
        num_asked.append(echo.asked.total())
        return ok("small-2")

    echo = Echo({"small-2": last})
    async with service_in(tmp_path, echo, max_in_flight=2) as service:
        echo.hold = asyncio.Event()
        first = await begin(service, large)
        await echo.has_open(2)
        second = await begin(service, small)
        await waiting.until(lambda: len(service._execution.slots._queue) == 1)  # a line of it waits for a slot
        echo.hold.set()
        await until(service, second)
        await until(service, first)
        assert num_asked[0] < 20


async def test_an_owner_with_many_batches_leaves_another_its_share_of_the_places(tmp_path: Path) -> None:
    echo = Echo()
    asked: list[str] = []
    under_way: deque[asyncio.Event] = deque()

    async def one_at_a_time(owner: str, *call: Any) -> ItemResponse:
        asked.append(owner)
        if asked.count("bob") < 40:
            under_way.append(may_end := asyncio.Event())
            await may_end.wait()
        return await echo(owner, *call)

    async with service_in(tmp_path, one_at_a_time, max_in_flight=4) as service:
        many = [await begin(service, jsonl(*(input_line(f"{n}-{m}") for m in range(40)))) for n in range(10)]
        await waiting.until(lambda: len(asked) == 4)
        one = await begin(service, jsonl(*(input_line(f"bob-{n}") for n in range(40))), owner="bob")
        while asked.count("bob") < 40:
            # The next ends when bob waits for its slot, so that the order does not depend on how fast this runs.
            await waiting.until(lambda: "bob" in service._execution.slots._queue.lines)
            num_asked = len(asked)
            under_way.popleft().set()
            await waiting.until(lambda: len(asked) > num_asked)  # noqa: B023
        assert asked[: 4 + 2 * 40].count("bob") == 40, "as many of the other's, not ten times as many"
        for may_end in under_way:
            may_end.set()
        for batch_id, owner in [(one, "bob"), *((each, OWNER) for each in many)]:
            await until(service, batch_id, owner=owner)


async def test_the_files_of_an_owner_that_are_read_for_long_hold_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, num_read = threading.Event(), []

    def slow_check(open_file: OpenFile, rules: InputRules) -> Checked:
        with open_file() as file:
            is_large = b"line-9" in file.read()
        if is_large:
            num_read.append(1)
            may_go_on.wait(PATIENCE_S)
        return check(open_file, rules)

    monkeypatch.setattr("app.jobs.batch_runner.check", slow_check)
    async with service_in(tmp_path, Echo()) as service:
        try:
            many = [await begin(service, TEN) for _ in range(32)]  # as many as there are threads at most
            one = await begin(service, ONE, owner="bob")
            assert (await until(service, one, owner="bob"))["status"] == "completed"
            assert len(num_read) == 1
        finally:
            may_go_on.set()
        for batch_id in many:
            assert (await until(service, batch_id))["status"] == "completed"


async def test_lines_know_nothing_of_the_request_that_began_their_batch(tmp_path: Path) -> None:
    request = ContextVar("request", default="none")
    seen = []

    def answer(_: int) -> ItemResponse:
        seen.append(request.get())
        return ok("line-0")

    async with service_in(tmp_path, Echo({"line-0": answer})) as service:
        request.set("the one that began it")
        await until(service, await begin(service, TEN))
    assert seen == ["none"]


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after_s=60), Unavailable("none"), EngineStopped("over")], ids=type
)
async def test_a_line_that_no_replica_has_room_for_waits_and_never_fails(tmp_path: Path, error: Exception) -> None:
    echo = Echo({"line-3": lambda times: raising(error)(times) if times < 6 else ok("line-3")})
    async with service_in(tmp_path, echo) as service:
        batch = await until(service, await begin(service, TEN))
        output, errors = await ends(service, batch)
        assert (len(output), errors) == (10, {})
        assert batch["error_file_id"] is None
    assert echo.asked["line-3"] == 6


async def test_a_line_that_the_server_fails_on_is_tried_three_times(tmp_path: Path) -> None:
    echo = Echo({"line-1": lambda _: refused(500), "line-2": lambda times: refused(500) if times < 3 else ok("line-2")})
    async with service_in(tmp_path, echo) as service:
        output, errors = await ends(service, await until(service, await begin(service, TEN)))
        assert errors.keys() == {"line-1"}
        assert errors["line-1"]["response"]["status_code"] == 500
        assert "line-2" in output
    assert echo.asked["line-1"] == 3


async def test_a_file_with_any_mistake_runs_nothing(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch = await until(service, await begin(service, TEN + b"{\n" + jsonl(input_line("line-1"))))
        assert batch["status"] == "failed"
        assert batch["failed_at"] is not None
        assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [
            (11, "invalid_json_line"), (12, "duplicate_custom_id"),
        ]  # fmt: skip
        assert batch["output_file_id"] is None
        assert batch["error_file_id"] is None
    assert not echo.asked


async def some_done(service: LocalBatchService, echo: Echo) -> str:
    """A batch in progress: half of its lines have ended, the others hang."""
    echo.answers = HALF_HANG
    batch_id = await begin(service, TEN)
    await waiting.until(lambda: service.batch(OWNER, batch_id), lambda batch: batch["request_counts"]["completed"] == 5)
    return batch_id


async def test_a_cancelled_batch_keeps_what_was_done(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch_id = await some_done(service, echo)
        cancelling = await service.cancel_batch(OWNER, batch_id)
        assert cancelling["status"] == "cancelling"
        batch = await until(service, batch_id)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 5)
        output, errors = await ends(service, batch)
        assert output.keys() == {f"line-{n}" for n in range(5)}
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
        assert len(errors) == 5
        assert (await service.cancel_batch(OWNER, batch_id))["status"] == "cancelled", "twice is once"
        assert echo.num_open == 0
        await waiting.until(lambda: not list((tmp_path / "jobs").iterdir()))


async def test_a_batch_that_has_ended_cannot_be_cancelled(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        batch = await until(service, await begin(service, TEN))
        with pytest.raises(InvalidRequest, match="the batch is completed"):
            await service.cancel_batch(OWNER, batch["id"])


async def test_when_its_time_is_over_a_batch_expires_with_what_was_done(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo, limits=BatchLimits(window_s=1)) as service:
        echo.answers = HALF_HANG
        batch = await until(service, await begin(service, TEN))
        assert batch["status"] == "expired"
        assert batch["expired_at"] >= batch["expires_at"] == batch["created_at"] + 1
        output, errors = await ends(service, batch)
        assert output.keys() <= {f"line-{n}" for n in range(5)}, "on a busy machine not all of them in time"
        assert output.keys() | errors.keys() == {f"line-{n}" for n in range(10)}
        assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


async def test_a_batch_whose_time_was_over_while_nothing_ran_expires_at_the_restart(tmp_path: Path) -> None:
    clock, echo = FakeClock(), Echo()
    async with service_in(tmp_path, echo, clock=clock) as service:
        batch_id = await some_done(service, echo)
    clock.at += 90_000
    asked = echo.asked.total()
    async with service_in(tmp_path, echo, clock=clock) as service:
        batch = await until(service, batch_id)
        assert batch["status"] == "expired"
        assert [len(each) for each in await ends(service, batch)] == [5, 5]
    assert echo.asked.total() == asked


async def test_files_go_when_their_time_is_over_but_not_under_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.local_service.HOUSEKEEPING_S", 0.01)
    clock, echo = FakeClock(), Echo()
    async with service_in(tmp_path, echo, clock=clock) as service:
        short = await upload(service, TEN, expires_after_s=3600)
        echo.hold = asyncio.Event()
        new = NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=short, output_expires_after_s=7200)
        batch_id = (await service.create_batch(new))["id"]
        await until(service, batch_id, "in_progress")
        clock.at += 4000
        await asyncio.sleep(0.05)
        assert (tmp_path / "files" / short).exists(), "a batch reads it"
        echo.hold.set()
        batch = await until(service, batch_id)
        [output] = await all_files(service)
        assert output["id"] == batch["output_file_id"]
        assert output["expires_at"] == output["created_at"] + 7200
        await waiting.until(lambda: not (tmp_path / "files" / short).exists())


@pytest.mark.parametrize(
    ("error", "only"),
    [
        (OSError(28, "No space left on device"), "write"),
        (OSError(28, "No space left on device"), "fsync"),
        (OSError(28, "No space left on device"), "rename"),
        (sqlite3.OperationalError("database or disk is full"), "INSERT INTO files"),
        (sqlite3.OperationalError("database or disk is full"), "COMMIT"),
    ],
    ids=str,
)
async def test_a_batch_waits_for_a_disk_that_is_full_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, only: str
) -> None:
    writes = Writes(lambda: error).watch(monkeypatch)
    echo = Echo({"line-3": lambda _: refused()})
    async with service_in(tmp_path, echo) as service:
        echo.hold = asyncio.Event()
        batch_id = await begin(service, TEN)
        await echo.has_open(10)
        writes.left, writes.only = 0, only
        echo.hold.set()
        await asyncio.sleep(0.2)
        assert (await service.batch(OWNER, batch_id))["status"] in ("in_progress", "finalizing")
        writes.left = None
        output, errors = await ends(service, await until(service, batch_id))
        assert (len(output), errors.keys()) == (9, {"line-3"})
        counts = await service.counts()
        assert (counts["num_lines_completed"], counts["num_lines_failed"], counts["num_paused"]) == (9, 1, 0)
        assert 1 <= caplog.text.count("the storage failed") <= 2, "each kind of failure once in a minute"
        assert not list((tmp_path / "drafts").iterdir())
        assert len(await all_files(service)) == len(list((tmp_path / "files").iterdir())) == 3


async def test_a_disk_that_stays_full_until_the_batch_expires_costs_no_line_that_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(lambda: OSError(28, "No space left on device")).watch(monkeypatch)
    clock, echo = FakeClock(), Echo()
    async with service_in(tmp_path, echo, clock=clock) as service:
        batch_id = await some_done(service, echo)
        writes.left, writes.only = 0, "write"
        echo.answers = {}  # the others would end now
        await asyncio.sleep(0.1)
        clock.at += 90_000
        await asyncio.sleep(0.1)
        writes.left = None
        batch = await until(service, batch_id)
        output, errors = await ends(service, batch)
        assert {f"line-{n}" for n in range(5)} <= output.keys()
        assert output.keys() | errors.keys() == {f"line-{n}" for n in range(10)}
        assert batch["request_counts"]["completed"] == len(output)


async def test_a_text_that_cannot_be_encoded_and_a_number_that_json_has_not_cost_no_other_line(tmp_path: Path) -> None:
    echo = Echo(
        {
            "line-1": lambda _: ItemResponse(200, {"echo": "\ud800"}),
            "line-2": lambda _: ItemResponse(200, {"x": math.nan}),
        }
    )
    async with service_in(tmp_path, echo) as service:
        batch_ids = [await begin(service, TEN) for _ in range(2)]
        for batch_id in batch_ids:
            batch = await until(service, batch_id)
            output, errors = await ends(service, batch)
            assert (batch["status"], len(output), errors.keys()) == ("completed", 9, {"line-2"})
            assert output["line-1"]["response"]["body"] == {"echo": "?"}
            assert errors["line-2"]["error"]["code"] == "server_error"


async def test_large_lines_are_written_in_a_thread_one_at_a_time(tmp_path: Path) -> None:
    threads: list[str] = []
    under_way: list[int] = []

    def some_at_a_time() -> Iterator[list[int]]:
        under_way.append(1)
        assert len(under_way) == 1
        threads.append(threading.current_thread().name)
        yield [1, 2]
        time.sleep(0.01)  # another would begin now
        yield [3]
        under_way.pop()

    def large(_: int) -> ItemResponse:
        return ItemResponse(200, {"rows": Rows(some_at_a_time)}, is_large=True)

    echo = Echo({f"line-{number}": large for number in range(8)})
    async with service_in(tmp_path, echo) as service:
        for batch_id in [await begin(service, TEN) for _ in range(2)]:
            batch = await until(service, batch_id)
            output, _ = await ends(service, batch)
            assert (batch["status"], len(output)) == ("completed", 10)
            assert output["line-7"]["response"]["body"] == {"rows": [1, 2, 3]}
    assert len(threads) == 16
    assert "MainThread" not in threads


async def test_a_line_with_which_the_process_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies leaves what is in its folder at that moment."""
    monkeypatch.setattr("app.jobs.executors.BEGUN_AFTER_S", 0.0)

    async def answer(owner: str, endpoint: str, body: Mapping[str, Any], origin: ItemOrigin) -> ItemResponse:
        if body["name"] == "line-3":
            await asyncio.Event().wait()
        return ok(body["name"])

    def has_begun(folder: Path) -> bool:
        return any(int.from_bytes(path.read_bytes()[:1]) & 1 << 3 for path in folder.glob("jobs/*/begun.bits"))

    folder, batch_id = tmp_path / "0", ""
    for death in range(1, 5):
        async with service_in(folder, answer) as service:
            batch_id = batch_id or await begin(service, TEN)
            await waiting.until(partial(has_begun, folder))
            left = shutil.copytree(folder, tmp_path / str(death))
        folder = left
    async with service_in(folder, Echo()) as service:
        batch = await until(service, batch_id)
        output, errors = await ends(service, batch)
        assert (batch["status"], len(output), errors.keys()) == ("completed", 9, {"line-3"})
        assert "died 4 times" in errors["line-3"]["error"]["message"]


async def test_a_batch_on_which_the_server_fails_ends_with_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch_id = await some_done(service, echo)
        monkeypatch.setattr("app.jobs.outputs.BatchFormat.answered", None)
        echo.answers = {}
        batch = await until(service, batch_id)
        monkeypatch.undo()
        output, _ = await ends(service, batch)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "server_error")
        assert output.keys() == {f"line-{n}" for n in range(5)}


async def test_a_batch_that_was_given_up_without_files_keeps_its_results_as_long_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo, clock = Echo(), FakeClock()
    async with service_in(tmp_path, echo, clock=clock) as service:
        batch_id = await some_done(service, echo)
        with monkeypatch.context() as patch:
            patch.setattr("app.jobs.batch_runner.write_batch_files", None)
            echo.answers = {}
            batch = await until(service, batch_id)
        assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)

    def num_results() -> int:
        return sum(path.read_bytes().count(b"\n") for path in tmp_path.glob(f"jobs/{batch_id}/journal*"))

    assert num_results() == 10
    for days in (0, 29):
        clock.at += days * 86_400
        async with service_in(tmp_path, echo, clock=clock) as service:
            assert (await service.batch(OWNER, batch_id))["status"] == "failed"
            assert num_results() == 10
    clock.at += 2 * 86_400
    async with service_in(tmp_path, echo, clock=clock) as service:
        await waiting.until(lambda: service.batches(PageOf(owner=OWNER, limit=1)), lambda page: not page["data"])
    async with service_in(tmp_path, echo, clock=clock):
        assert not (tmp_path / "jobs" / batch_id).exists()


async def test_counts_of_deaths_that_are_torn_cost_a_batch_nothing(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch_id = await some_done(service, echo)
    (tmp_path / "jobs" / batch_id / "deaths.json").write_bytes(b'{"7": 1')
    echo.answers = {}
    async with service_in(tmp_path, echo) as service:
        batch = await until(service, batch_id)
        output, errors = await ends(service, batch)
        assert (batch["status"], len(output), errors) == ("completed", 10, {})
    assert all(echo.asked[f"line-{number}"] == 1 for number in range(5)), "what was done is not done again"


async def test_a_service_opens_though_the_results_of_a_batch_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch_id = await some_done(service, echo)
    echo.answers = {}
    writes = Writes(lambda: OSError(5, "Input/output error")).watch(monkeypatch)
    writes.left, writes.only = 0, "fsync"  # as every opening of a store does
    service = service_in(tmp_path, echo)
    service.start()
    try:
        await service.opened()
        assert (await is_paused(service, batch_id))["paused"]["code"] == "storage_failed"
        writes.left = None
        output, _ = await ends(service, await until(service, batch_id))
        assert len(output) == 10
    finally:
        await service.close()


async def test_a_sweep_touches_nothing_that_another_process_begins_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost the folder just after it asked which batches there are."""
    of_another = tmp_path / "jobs" / "batch_of_another"

    def unfinished(catalog: Catalog) -> list[Job]:
        found = asked(catalog)
        of_another.mkdir(parents=True)
        return found

    asked = Catalog.unfinished
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "unfinished", unfinished)
        service = service_in(tmp_path, Echo())
        service.start()
        await service.opened()
    await service.close()
    assert of_another.exists()


async def is_paused(service: LocalBatchService, batch_id: str) -> dict[str, Any]:
    """The batch once it waits for room."""
    return await waiting.until(lambda: service.batch(OWNER, batch_id), lambda batch: batch["paused"] is not None)


async def test_a_batch_that_fails_right_after_its_storage_did_waits_for_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[OSError] = []

    def error() -> OSError:
        raised.append(OSError((28, 5)[len(raised) % 2], "the disk"))
        return raised[-1]

    writes = Writes(error).watch(monkeypatch)
    async with service_in(tmp_path, Echo()) as service:
        writes.left, writes.only = 0, "UPDATE batches"
        batch_id = await begin(service, b"{\n")
        assert (await is_paused(service, batch_id))["paused"]["code"] == "storage_failed"
        await waiting.until(lambda: len(raised) > 3)
        assert caplog.text.count("the storage failed") == 2, "each kind of failure once in a minute"
        writes.left = None
        batch = await until(service, batch_id)
        assert (batch["status"], batch["paused"]) == ("failed", None)
        assert (await service.counts())["num_paused"] == 0


async def test_a_service_that_closes_while_a_batch_runs_removes_what_was_not_uploaded_to_its_end(
    tmp_path: Path,
) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        await some_done(service, echo)
        await service.append(await service.begin_upload(OWNER), b"x")
    assert echo.num_open == 0
    assert not list((tmp_path / "drafts").iterdir())


def long_answers(num_bytes: int) -> dict[str, Callable[[int], ItemResponse]]:
    return {f"line-{n}": lambda _: ok("x" * num_bytes) for n in range(10)}


async def test_a_batch_whose_owner_has_used_its_share_waits_until_it_deletes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.batch_runner.SPACE_LOOK_EVERY_S", 0.001)
    echo = Echo(long_answers(10_000) | HALF_HANG)
    async with service_in(tmp_path, echo, max_total_bytes=200_000) as service:
        kept = await upload(service, b"x" * 50_000)
        batch_id = await begin(service, TEN)
        batch = await is_paused(service, batch_id)
        assert (batch["status"], batch["paused"]["code"]) == ("in_progress", "storage_full")
        assert "Delete files first" in batch["paused"]["message"]
        echo.answers = {}  # the others would end now
        await asyncio.sleep(0.05)
        assert (await service.batch(OWNER, batch_id))["request_counts"]["completed"] == 5
        with pytest.raises(InvalidRequest) as full:
            await upload(service, TEN)
        assert full.value.code == "storage_full"
        with pytest.raises(InvalidRequest) as full:
            await service.create_batch(NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=batch["input_file_id"]))
        assert full.value.code == "storage_full"
        of_another = await begin(service, ONE, owner="bob")
        assert (await until(service, of_another, owner="bob"))["status"] == "completed"
        await service.delete_file(OWNER, kept)
        batch = await until(service, batch_id)
        output, _ = await ends(service, batch)
        assert (len(output), batch["paused"]) == (10, None)


@pytest.mark.parametrize("num_lines", [1, 10])
async def test_lines_under_way_when_there_is_no_room_any_more_end_and_are_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lines: int
) -> None:
    """Their owner would pay for both."""
    monkeypatch.setattr("app.jobs.batch_runner.SPACE_LOOK_EVERY_S", 0.001)
    echo = Echo()
    echo.hold = asyncio.Event()
    disk = SimpleNamespace(f_frsize=1, f_bavail=2 * RESERVE_BYTES, f_blocks=100_000_000_000)
    monkeypatch.setattr("os.statvfs", lambda _: disk)
    async with service_in(tmp_path, echo, max_in_flight=4) as service:
        batch_id = await begin(service, jsonl(*(input_line(f"line-{number}") for number in range(num_lines))))
        num_open = min(num_lines, 4)
        await echo.has_open(num_open)
        disk.f_bavail = RESERVE_BYTES // 4
        assert (await is_paused(service, batch_id))["request_counts"]["completed"] == 0
        echo.hold.set()
        await waiting.until(lambda: service.stats(OWNER), lambda stats: stats["requests"]["completed"] == num_open)
        disk.f_bavail = 2 * RESERVE_BYTES
        output, errors = await ends(service, await until(service, batch_id))
        assert (len(output), len(errors)) == (num_lines, 0)
    assert set(echo.asked.values()) == {1}


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "expired"])
async def test_a_batch_that_waits_for_room_ends_with_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr("app.jobs.batch_runner.SPACE_LOOK_EVERY_S", 0.001)
    echo, clock = Echo(long_answers(10_000) | HALF_HANG), FakeClock()
    async with service_in(tmp_path, echo, max_total_bytes=100_000, clock=clock) as service:
        batch_id = await begin(service, TEN)
        batch = await is_paused(service, batch_id)
        if is_cancelled:
            await service.cancel_batch(OWNER, batch_id)
        else:
            clock.at += 90_000
        batch = await until(service, batch_id)
        output, errors = await ends(service, batch)
        assert batch["status"] == ("cancelled" if is_cancelled else "expired")
        assert (len(output), len(errors)) == (5, 5)


async def test_a_batch_waits_for_a_disk_that_is_nearly_full_with_what_it_needs_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.batch_runner.SPACE_LOOK_EVERY_S", 0.001)
    echo = Echo(long_answers(10_000) | HALF_HANG)
    disk = SimpleNamespace(f_frsize=1, f_bavail=2 * RESERVE_BYTES, f_blocks=100_000_000_000)
    monkeypatch.setattr("os.statvfs", lambda _: disk)
    async with service_in(tmp_path, echo) as service:
        batch_id = await begin(service, TEN)
        await waiting.until(lambda: service.stats(OWNER), lambda stats: stats["requests"]["completed"] == 5)
        disk.f_bavail = RESERVE_BYTES // 2 + 50_000  # the five lines once more, and not the reserve
        assert "bytes free" in (await is_paused(service, batch_id))["paused"]["message"]
        echo.answers = {}
        await asyncio.sleep(0.05)
        assert (await service.batch(OWNER, batch_id))["request_counts"]["completed"] == 5
        disk.f_bavail = RESERVE_BYTES // 4  # not even for the files of what was done
        await service.cancel_batch(OWNER, batch_id)
        await asyncio.sleep(0.05)
        assert (await service.batch(OWNER, batch_id))["status"] == "cancelling"
        assert not list((tmp_path / "drafts").iterdir())
        disk.f_bavail = RESERVE_BYTES // 2
        output, errors = await ends(service, await until(service, batch_id))
        assert (len(output), len(errors)) == (5, 5)
