"""Whole runs through the real API over a simulated engine, and through servers that do as they are told."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.errors import Failure, InvalidSetup
from app.jobs.input_files import find_files, look_through
from app.jobs.items import RowSettings
from app.jobs.remote_run import ServiceSettings, run_through_service
from app.jobs.run_folder import Summary, open_run
from tests.benchmarks.servers import serving, simulated_service, stream, told_server
from tests.unclosed import nothing_unclosed

NUM_ROWS = 40
ONLINE_TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.executors.FAILURE_PAUSE_S", 0.01)


def rows(tmp_path: Path, number: int = NUM_ROWS, **fields: Any) -> Path:
    lines = [{"id": f"row-{index}", "prompt": f"Count {index}", "max_tokens": 4} | fields for index in range(number)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(source: Path, url: str, *, resume: bool = False, **settings: Any) -> Summary:
    """A run into `out` beside the input."""
    given: dict[str, Any] = {"base_url": url, "api_key": None, "model": None, "max_in_flight": 64, "patience_s": 20.0}
    found = look_through(find_files(str(source)), RowSettings())
    folder = open_run(source.parent / "out", run={}, num_items=found.num_rows, output_format="jsonl", resume=resume)
    with closing(folder):
        return run_through_service(found, folder, RowSettings(), ServiceSettings(**(given | settings)))


def results(source: Path) -> dict[int, dict[str, Any]]:
    lines = (source.parent / "out" / "results.jsonl").read_text().splitlines()
    found = {json.loads(line)["row"]: json.loads(line) for line in lines}
    assert len(found) == len(lines), "a row came twice"
    return found


def told(answer: Callable[[dict[str, Any]], Response]) -> Starlette:
    """Answers each body as it is told."""

    async def complete(request: Request) -> Response:
        return answer(await request.json())

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "demo"}]})

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/v1/models", models)])


def done(body: dict[str, Any]) -> Response:
    choice = {"text": body["prompt"], "finish_reason": "length"}
    return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})


def error(status: int, code: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": "not so", "code": code}}, status_code=status, headers=headers)


def test_every_row_is_answered_once_though_there_are_few_slots(tmp_path: Path, demo_path: Path) -> None:
    source = rows(tmp_path)
    with simulated_service(demo_path, step_ms=5, max_running=3) as url:
        summary = run(source, url, model="simulated")
    assert (summary.ok, summary.failed, summary.completion_tokens) == (NUM_ROWS, 0, 4 * NUM_ROWS)
    assert results(source).keys() == set(range(NUM_ROWS))
    assert {record["finish_reason"] for record in results(source).values()} == {"length"}


def test_a_row_has_the_same_answer_in_every_run(tmp_path: Path, demo_path: Path) -> None:
    source = rows(tmp_path, 6, temperature=1)
    (tmp_path / "again").mkdir()
    again = rows(tmp_path / "again", 6, temperature=1)
    with simulated_service(demo_path, step_ms=1, max_running=4) as url:
        run(source, url)
        run(again, url)
    texts = [{row: record["text"] for row, record in results(each).items()} for each in (source, again)]
    assert texts[0] == texts[1]


def test_refusals_are_waited_out_and_never_an_error(tmp_path: Path) -> None:
    source, asked, num_done = rows(tmp_path, 12), set[str](), 0

    def answer(body: dict[str, Any]) -> Response:
        nonlocal num_done
        if body["prompt"] not in asked and len(asked) % 3:
            asked.add(body["prompt"])
            return error(429, "overloaded", **{"retry-after-ms": "20"})
        asked.add(body["prompt"])
        num_done += 1
        return done(body)

    with serving(told(answer)) as url:
        assert run(source, url).ok == 12
    assert num_done == 12


def test_a_bad_row_says_why_and_one_that_the_service_fails_on_is_given_up(tmp_path: Path) -> None:
    source, num_failures = rows(tmp_path), 0

    def answer(body: dict[str, Any]) -> Response:
        nonlocal num_failures
        if body["prompt"] == "Count 7":
            return error(400, "bad")
        if body["prompt"] == "Count 9":
            num_failures += 1
            return error(500, "internal_error")
        return done(body)

    with serving(told(answer)) as url:
        assert run(source, url).failed == 2
    assert results(source)[7]["error"] == "not so"
    assert results(source)[9]["error"] == "the service failed on this item 3 times, the last time: not so"
    assert num_failures == 3


def test_a_service_that_restarts_is_waited_for(tmp_path: Path) -> None:
    source, outage = rows(tmp_path), list[float]()

    def answer(body: dict[str, Any]) -> Response:
        if body["prompt"] == "Count 5" and not outage:
            outage.append(time.monotonic())
        is_out = outage and time.monotonic() - outage[0] < 0.5
        return Response("no such route", status_code=404) if is_out else done(body)

    with serving(told(answer)) as url:
        assert run(source, url).ok == NUM_ROWS


def test_one_that_stays_away_ends_the_run_which_goes_on_later(tmp_path: Path) -> None:
    source, num_asked = rows(tmp_path), 0

    def answer(body: dict[str, Any]) -> Response:
        nonlocal num_asked
        num_asked += 1
        return done(body) if num_asked <= 5 else Response("bad gateway", status_code=502)

    with serving(told(answer)) as url, pytest.raises(Failure, match="has not answered for 1 s: it answers with 502"):
        run(source, url, patience_s=1.0)
    with serving(told(done)) as url:
        summary = run(source, url, resume=True)
    assert (summary.ok, summary.runs) == (NUM_ROWS, 2)
    assert results(source).keys() == set(range(NUM_ROWS))


def test_a_service_that_is_not_there_and_a_model_that_is_not_served_are_reported_at_once(tmp_path: Path) -> None:
    source = rows(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(Failure, match="the service has not answered for 0 s"):
        run(source, f"http://127.0.0.1:{port}", patience_s=0.0)
    with serving(told(done)) as url, pytest.raises(InvalidSetup, match="--model other: the service has demo"):
        run(source, url, resume=True, model="other")


async def online(client: httpx.AsyncClient, url: str) -> list[int]:
    """The statuses of four short requests that come together, once all of them are answered to the end."""
    body = {"prompt": "Once", "max_tokens": 1}
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(4)]
    return [each.result().status_code for each in asked]


def test_online_requests_take_the_slots_of_a_run_and_nothing_of_it_fails(tmp_path: Path, demo_path: Path) -> None:
    """The rows are preempted: slower, and as if nothing had happened."""
    source = rows(tmp_path, 12, max_tokens=60, ignore_eos=True)

    async def beside(url: str) -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        task = asyncio.create_task(asyncio.to_thread(run, source, url))
        await asyncio.sleep(0.6)
        async with httpx.AsyncClient(timeout=ONLINE_TIMEOUT_S) as client:
            for _ in range(4):
                began = loop.time()
                assert await online(client, url) == [200] * 4
                times.append(loop.time() - began)
        assert (await task).ok == 12
        return times

    with simulated_service(demo_path, step_ms=10, max_running=4) as url:
        times = asyncio.run(beside(url))
    assert min(times) < 0.3, "a client waited for rows to end, which take 0.6 s"
    assert {record["completion_tokens"] for record in results(source).values()} == {60}


def test_online_requests_leave_no_connection_open_though_bodies_come_late() -> None:
    """Left to the garbage collector, one would fail some other test."""

    async def ask(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=ONLINE_TIMEOUT_S) as client:
            return await online(client, url)

    with serving(told_server(lambda _: stream(num_tokens=2, gap_s=0.05))) as url, nothing_unclosed():
        assert asyncio.run(ask(url)) == [200] * 4
