"""Batches as jobs: real batches, real run folders, and a server whose jobs get as far as a test lets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api import Cascade, RequestHandler, ServedModel
from app.config import ApiConfig, BatchesConfig
from app.errors import InvalidRequest
from app.jobs import Answered, LocalBatchService, NewBatch
from app.jobs.batch_jobs import BatchJobs
from app.jobs.input_files import find_files, look_through, read_piece
from app.jobs.job_server import INPUT, OUTPUT, JobState, NoJobServer
from app.jobs.preparation import RowSettings
from app.jobs.record import Record
from app.jobs.results import open_folder
from app.metrics import RequestMetrics
from tests.api.keys import entry
from tests.jobs.lives import CHAT, OWNER, begin, ends, jsonl, until, upload


class Jobs:
    """`JobServer` in this process. A row is answered with its own prompt, once there is a token for it."""

    def __init__(self) -> None:
        self.tokens = asyncio.Semaphore(0)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.submitted: list[str] = []
        self.models: list[str] = []
        self.computed: list[str] = []
        self.num_refusals = 0  # calls that are not answered
        self.fails = False

    def let(self, number: int) -> None:
        """So many rows more may be computed."""
        for _ in range(number):
            self.tokens.release()

    async def submit(self, job_id: str, *, model: str, folder: Path) -> None:
        self._may_answer()
        self.submitted.append(job_id)
        self.models.append(model)
        self.tasks[job_id] = asyncio.create_task(self._run(folder))

    async def state(self, job_id: str) -> JobState:
        self._may_answer()
        if job_id not in self.tasks:
            return JobState.UNKNOWN
        return JobState.ENDED if self.tasks[job_id].done() else JobState.RUNNING

    async def stop(self, job_id: str) -> None:
        self._may_answer()
        if job_id in self.tasks:
            self.tasks[job_id].cancel()

    async def log(self, job_id: str) -> str:
        return "as a test wants it"

    def die(self) -> None:
        """With the cluster: nobody knows of any job any more."""
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()

    def _may_answer(self) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise NoJobServer("it is away")

    async def _run(self, folder: Path) -> None:
        if self.fails:
            return
        found = look_through(find_files(str(folder / INPUT)), RowSettings())
        out = open_folder(
            folder / OUTPUT, run={}, num_rows=found.num_rows, output_format="jsonl", resume=True
        )  # fmt: skip
        with closing(out):
            for row in (row for piece in found.pieces for row in read_piece(piece)):
                if row.number not in out.settled:
                    await self.tokens.acquire()
                    out.append([self._record(row.number, row.row_id, row.fields or {})])
            out.finish({})

    def _record(self, number: int, row_id: str, fields: Mapping[str, Any]) -> Record:
        self.computed.append(row_id)
        text = fields["body"]["messages"][0]["content"]
        if text == "fail":
            return Record(row=number, id=row_id, prompt_tokens=3, error="the engine died")
        return Record(row=number, id=row_id, text=text, finish_reason="stop", prompt_tokens=3, completion_tokens=2)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOLLOW_EVERY_S", "SERVER_PAUSE_S", "JOB_PAUSE_S"):
        monkeypatch.setattr(f"app.jobs.batch_jobs.{name}", 0.005)


@pytest.fixture
def models(model: ServedModel) -> list[ServedModel]:
    return [model]


def line(name: str, *, content: str = "Once", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "demo", "messages": messages} | body}


TEN = jsonl(*(line(f"line-{n}", content=f"text {n}") for n in range(10)))


@asynccontextmanager
async def service(
    folder: Path, jobs: Jobs, models: list[ServedModel], *, keys: ApiConfig | None = None, **settings: Any
) -> AsyncIterator[LocalBatchService]:
    async def nobody(*_: object) -> Answered:
        raise AssertionError("no line goes to the fleet")

    cascade = Cascade(name="careful", small=models[0], large=models[-1], min_mean_logprob=-1.0)
    metrics = RequestMetrics(each.name for each in models)
    handler = RequestHandler(models, keys or ApiConfig(), metrics, cascades=[cascade])
    worker = BatchJobs(folder / "jobs", jobs, handler.accept_item, max_at_once=1)
    async with LocalBatchService(folder, BatchesConfig(**settings), nobody, worker=worker) as opened:
        yield opened


async def counts(opened: LocalBatchService, batch_id: str, completed: int) -> None:
    """Returns once so many lines are completed."""
    async with asyncio.timeout(10):
        while (await opened.batch(OWNER, batch_id))["request_counts"]["completed"] < completed:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def run(use: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(use(), 20))  # type: ignore[arg-type]


def test_lines_are_answered_as_over_http_and_the_unfit_are_refused(tmp_path: Path, models: list[ServedModel]) -> None:
    content = TEN + jsonl(
        line("two", n=2),
        line("tools", tools=[{"type": "function", "function": {"name": "f"}}]),
        line("stranger", model="stranger"),
        line("careful", model="careful"),
        line("long", max_tokens=9999),
        line("lost", content="fail"),
    )

    async def use() -> None:
        jobs = Jobs()
        jobs.let(99)
        async with service(tmp_path, jobs, models) as opened:
            batch = await until(opened, await begin(opened, content))
            output, errors = await ends(opened, batch)
        assert (batch["status"], len(jobs.submitted), jobs.models) == ("completed", 1, ["demo"])
        assert output.keys() == {f"line-{n}" for n in range(10)}
        response = output["line-3"]["response"]
        assert response["status_code"] == 200
        body = response["body"]
        assert (body["object"], body["model"]) == ("chat.completion", "demo")
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "text 3", "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (3, 5)
        statuses = {name: each["response"] and each["response"]["status_code"] for name, each in errors.items()}
        assert statuses == {"two": 400, "tools": 400, "stranger": 404, "careful": 400, "long": 400, "lost": None}
        assert "is a cascade" in errors["careful"]["response"]["body"]["error"]["message"]
        assert "bulk jobs" in errors["two"]["response"]["body"]["error"]["message"]
        assert errors["lost"]["error"] == {"code": "line_failed", "message": "the engine died"}
        assert batch["request_counts"] == {"total": 16, "completed": 10, "failed": 6}
        assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (30, 20)
        assert not list((tmp_path / "jobs").iterdir())

    run(use)


def test_after_a_restart_the_job_that_ran_on_is_followed(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        jobs = Jobs()
        async with service(tmp_path, jobs, models) as opened:
            batch_id = await begin(opened, TEN)
            jobs.let(4)
            await counts(opened, batch_id, 4)
        jobs.let(3)  # while nobody looks
        async with service(tmp_path, jobs, models) as opened:
            await counts(opened, batch_id, 7)
            assert (await opened.stats(OWNER))["requests"]["running"] == 3
            jobs.let(3)
            batch = await until(opened, batch_id)
            output, _ = await ends(opened, batch)
        assert (len(output), len(jobs.submitted), len(jobs.computed)) == (10, 1, 10)
        assert batch["request_counts"]["completed"] == 10

    run(use)


def test_when_the_cluster_is_gone_another_job_goes_on(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        jobs = Jobs()
        async with service(tmp_path, jobs, models) as opened:
            batch_id = await begin(opened, TEN)
            jobs.let(4)
            await counts(opened, batch_id, 4)
        jobs.die()
        jobs.num_refusals = 3  # and the new one is slow to come
        jobs.let(6)
        async with service(tmp_path, jobs, models) as opened:
            batch = await until(opened, batch_id)
            output, _ = await ends(opened, batch)
        assert (len(output), len(set(jobs.submitted)), len(jobs.computed)) == (10, 2, 10)

    run(use)


@pytest.mark.parametrize("dies", [False, True], ids=["at once", "after a restart in the middle of it"])
def test_a_cancelled_batch_stops_its_job_and_keeps_what_is_done(
    tmp_path: Path, models: list[ServedModel], *, dies: bool
) -> None:
    async def use() -> None:
        jobs = Jobs()
        async with service(tmp_path, jobs, models) as opened:
            batch_id = await begin(opened, TEN)
            jobs.let(4)
            await counts(opened, batch_id, 4)
            jobs.num_refusals = 10**6 if dies else 0
            await opened.cancel_batch(OWNER, batch_id)
            if not dies:
                await until(opened, batch_id)
        jobs.num_refusals = 0
        async with service(tmp_path, jobs, models) as opened:
            batch = await until(opened, batch_id)
            output, errors = await ends(opened, batch)
        assert all(task.done() for task in jobs.tasks.values())
        assert (batch["status"], len(output)) == ("cancelled", 4)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert len(errors) == 6

    run(use)


def test_a_batch_whose_time_is_over_stops_its_job(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        jobs = Jobs()
        jobs.let(4)
        async with service(tmp_path, jobs, models, window_s=1) as opened:
            batch = await until(opened, await begin(opened, TEN))
            output, errors = await ends(opened, batch)
        assert all(task.done() for task in jobs.tasks.values())
        assert (batch["status"], len(output), len(errors)) == ("expired", 4, 6)

    run(use)


def test_lines_of_jobs_that_fail_again_and_again_end_with_an_error(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        jobs = Jobs()
        jobs.fails = True
        async with service(tmp_path, jobs, models) as opened:
            batch = await until(opened, await begin(opened, TEN))
            output, errors = await ends(opened, batch)
        assert (batch["status"], output, len(set(jobs.submitted))) == ("completed", {}, 3)
        assert {each["error"]["code"] for each in errors.values()} == {"job_failed"}

    run(use)


def test_each_model_has_a_job_of_its_own_one_after_the_other(tmp_path: Path, model: ServedModel) -> None:
    models = [model, replace(model, name="other", aliases=("alias",))]
    content = jsonl(line("a"), line("b", model="other"), line("c", model="alias"), line("d"))

    async def use() -> None:
        jobs = Jobs()
        jobs.let(4)
        async with service(tmp_path, jobs, models) as opened:
            output, _ = await ends(opened, await until(opened, await begin(opened, content)))
        assert (jobs.models, len(set(jobs.submitted))) == (["demo", "other"], 2)
        answered = {name: each["response"]["body"]["model"] for name, each in output.items()}
        assert answered == {"a": "demo", "b": "other", "c": "other", "d": "demo"}

    run(use)


def test_what_a_key_may_never_have_is_refused(tmp_path: Path, model: ServedModel) -> None:
    keys = ApiConfig.model_validate({"keys": [entry(name=OWNER, max_tokens=5)]})
    content = jsonl(line("short", max_tokens=3), line("open"), line("long", max_tokens=6))
    rows: list[dict[str, Any]] = []

    async def use() -> None:
        jobs = Jobs()
        async with service(tmp_path, jobs, [model], keys=keys) as opened:
            batch_id = await begin(opened, content)
            async with asyncio.timeout(5):
                while not jobs.submitted:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            rows.extend(map(json.loads, (tmp_path / "jobs" / batch_id / "0" / INPUT).read_text().splitlines()))
            jobs.let(2)
            _, errors = await ends(opened, await until(opened, batch_id))
        assert [row["body"]["max_tokens"] for row in rows] == [3, 5]
        assert errors.keys() == {"long"}

    run(use)


def test_other_endpoints_are_refused_before_anything_begins(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        async with service(tmp_path, Jobs(), models) as opened:
            new = NewBatch(owner=OWNER, endpoint="/v1/embeddings", input_file_id=await upload(opened, TEN))
            with pytest.raises(InvalidRequest, match="run as jobs of their own, for /v1/chat/completions and"):
                await opened.create_batch(new)

    run(use)
