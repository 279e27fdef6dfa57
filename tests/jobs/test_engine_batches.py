"""Batches on engines of their own: real batches and stores, and engines that get as far as a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api import RequestHandler, ServedModel, pipelines_of
from app.api.auth.keys import KeyRing
from app.config import ApiConfig, ApplicationConfig, BatchesConfig
from app.errors import Failure, InvalidRequest
from app.jobs import BatchLimits, NewBatch
from app.jobs.engine_batches import EngineExecution
from app.jobs.job import EngineOutput, ItemOutput
from app.jobs.local_service import LocalBatchService
from app.jobs.preparation import PreparedItem
from app.jobs.results import PARTIAL, PartialOutputs, ResultStore
from app.jobs.runner import Executor, JobRun
from tests import waiting
from tests.api.keys import entry, ring
from tests.jobs.lives import CHAT, OWNER, begin, ends, jsonl, until, upload


class Engines:
    """What all pools of a test share. An item is answered with its own seed once it may be computed."""

    def __init__(self) -> None:
        self.may_compute = asyncio.Semaphore(0)
        self.models: list[str] = []  # of the pools that began
        self.computed: list[PreparedItem] = []
        self.num_open = 0
        self.max_open = 0
        self.fails = False
        self.knows_tokens: tuple[int, ...] = ()  # of each item that is waiting

    def let(self, number: int) -> None:
        """So many items more may be computed."""
        for _ in range(number):
            self.may_compute.release()

    def pool(self, model: str, run: JobRun[PreparedItem], results: ResultStore) -> Pool:
        self.models.append(model)
        return Pool(self, run, results)


class Pool(Executor[PreparedItem]):
    """One engine with one slot."""

    def __init__(self, engines: Engines, run: JobRun[PreparedItem], results: ResultStore) -> None:
        super().__init__(run)
        self._engines = engines
        self._results = results

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._compute()]

    @property
    def state(self) -> str:
        return "at work"

    @property
    def num_wanted(self) -> int:
        return 100

    async def _compute(self) -> None:
        engines = self._engines
        if engines.fails:
            raise Failure("the engines died one after the other")
        engines.num_open += 1
        engines.max_open = max(engines.max_open, engines.num_open)
        try:
            while not self._is_over:
                items = self._backlog.take(0, room=1, input_is_over=self._input_is_over)
                if not items:
                    await asyncio.sleep(0.002)
                for item in items:
                    await self._compute_one(item)
                await self.has_changed()
        finally:
            engines.num_open -= 1

    async def _compute_one(self, item: PreparedItem) -> None:
        engines = self._engines
        known = {item.number: engines.knows_tokens} if engines.knows_tokens else {}
        self._run.generated(EngineOutput(outputs=(), begun=(item.number,), token_ids=known, num_tokens=0))
        await engines.may_compute.acquire()
        item = item.continued_after(self._results.partial.token_ids(item.number))
        engines.computed.append(item)
        text = str(item.request.sampling.seed)
        output = ItemOutput(
            number=item.number, id=item.id, text=text, finish_reason="stop", prompt_tokens=3, completion_tokens=2
        )
        if item.id == "lost":
            output = item.failed("the engine died")
        self._run.generated(EngineOutput(outputs=(output,), begun=(), token_ids={}, num_tokens=2))
        self._backlog.settle(0, [item.number])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.engine_batches.POOL_PAUSE_S", 0.005)
    monkeypatch.setattr("app.jobs.runner.SYNC_EVERY_S", 0.02)


@pytest.fixture
def models(model: ServedModel) -> list[ServedModel]:
    return [model]


def line(name: str, *, content: str = "Once", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "demo", "messages": messages} | body}


TEN = jsonl(*(line(f"line-{n}", seed=n) for n in range(10)))


@asynccontextmanager
async def service(
    folder: Path,
    engines: Engines,
    models: list[ServedModel],
    *,
    keys: KeyRing | None = None,
    weights: str = "",
    max_at_once: int = 1,
    limits: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
) -> AsyncIterator[LocalBatchService]:
    careful = {"name": "careful", "steps": [{"kind": "generate", "model": "demo"}]}
    config = ApplicationConfig.model_validate({"models": [{"name": "demo"}], "pipelines": [careful]})
    handler = RequestHandler(models, ApiConfig(), authenticator=keys, pipelines=pipelines_of(config, models))
    execution = EngineExecution(handler, engines.pool, weights={"demo": weights}, max_at_once=max_at_once)
    async with LocalBatchService(folder, BatchesConfig(), execution, limits=limits) as opened:
        yield opened


async def counts(opened: LocalBatchService, batch_id: str, completed: int) -> None:
    """Returns once so many items are completed."""
    await waiting.until(
        lambda: opened.batch(OWNER, batch_id), lambda batch: batch["request_counts"]["completed"] >= completed
    )


async def saved(folder: Path, batch_id: str, item: int) -> None:
    """Returns once the tokens of an item are on the disk."""
    await waiting.until(lambda: item in PartialOutputs(folder / "jobs" / batch_id / PARTIAL))


def run(use: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(use(), 20))  # type: ignore[arg-type]


def test_lines_are_answered_as_over_http_and_the_unfit_are_refused(tmp_path: Path, models: list[ServedModel]) -> None:
    content = TEN + jsonl(
        line("two", n=2),
        line("tools", tools=[{"type": "function", "function": {"name": "f"}}]),
        line("stranger", model="stranger"),
        line("careful", model="careful"),
        line("long", max_tokens=9999),
        line("lost"),
    )

    async def use() -> None:
        engines = Engines()
        engines.let(99)
        async with service(tmp_path, engines, models) as opened:
            batch = await until(opened, await begin(opened, content))
            output, errors = await ends(opened, batch)
            # The end of a batch is known before its folder goes.
            await waiting.until(lambda: not list((tmp_path / "jobs").iterdir()))
        assert (batch["status"], engines.models) == ("completed", ["demo"])
        assert output.keys() == {f"line-{n}" for n in range(10)}
        response = output["line-3"]["response"]
        assert response["status_code"] == 200
        body = response["body"]
        assert (body["object"], body["model"]) == ("chat.completion", "demo")
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "3", "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (3, 5)
        statuses = {name: each["response"] and each["response"]["status_code"] for name, each in errors.items()}
        assert statuses == {"two": 400, "tools": 400, "stranger": 404, "careful": 400, "long": 400, "lost": None}
        assert "is a pipeline" in errors["careful"]["response"]["body"]["error"]["message"]
        assert "bulk jobs" in errors["two"]["response"]["body"]["error"]["message"]
        assert errors["lost"]["error"] == {"code": "line_failed", "message": "the engine died"}
        assert batch["request_counts"] == {"total": 16, "completed": 10, "failed": 6}
        assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (30, 20)

    run(use)


def test_after_a_restart_only_what_has_not_ended_is_computed_and_continues(
    tmp_path: Path, models: list[ServedModel]
) -> None:
    async def use() -> None:
        engines = Engines()
        engines.knows_tokens = (7, 8)
        async with service(tmp_path, engines, models) as opened:
            batch_id = await begin(opened, TEN)
            engines.let(4)
            await counts(opened, batch_id, 4)
            await saved(tmp_path, batch_id, 4)
            assert (await opened.stats(OWNER))["requests"]["running"] == 6
        engines.knows_tokens = ()
        engines.let(6)
        async with service(tmp_path, engines, models) as opened:
            batch = await until(opened, batch_id)
            output, _ = await ends(opened, batch)
        assert (len(output), len(engines.computed), engines.models) == (10, 10, ["demo", "demo"])
        continued = {item.number: item.request.generated_token_ids for item in engines.computed[4:]}
        assert continued == {4: (7, 8)} | dict.fromkeys(range(5, 10), ())
        assert batch["request_counts"]["completed"] == 10

    run(use)


def test_tokens_of_other_weights_are_not_continued(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        engines = Engines()
        engines.knows_tokens = (7, 8)
        async with service(tmp_path, engines, models, weights="revision 1") as opened:
            batch_id = await begin(opened, TEN)
            engines.let(1)
            await counts(opened, batch_id, 1)
            await saved(tmp_path, batch_id, 1)
        engines.knows_tokens = ()
        engines.let(9)
        async with service(tmp_path, engines, models, weights="revision 2") as opened:
            await until(opened, batch_id)
        assert {item.request.generated_token_ids for item in engines.computed[1:]} == {()}

    run(use)


def test_a_line_without_a_seed_draws_the_same_after_a_restart_and_another_in_another_batch(
    tmp_path: Path, models: list[ServedModel]
) -> None:
    content = jsonl(line("a"))

    async def use() -> None:
        engines = Engines()
        async with service(tmp_path, engines, models) as opened:
            first = await begin(opened, content)
            await until(opened, first, "in_progress")
        engines.let(9)
        async with service(tmp_path, engines, models) as opened:
            await until(opened, first)
            await until(opened, await begin(opened, content))
        seeds = [item.request.sampling.seed for item in engines.computed]
        assert len(set(seeds)) == 2

    run(use)


def test_a_cancelled_batch_stops_its_engines_and_keeps_what_is_done(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        engines = Engines()
        async with service(tmp_path, engines, models) as opened:
            batch_id = await begin(opened, TEN)
            engines.let(4)
            await counts(opened, batch_id, 4)
            await opened.cancel_batch(OWNER, batch_id)
            batch = await until(opened, batch_id)
            output, errors = await ends(opened, batch)
        assert (batch["status"], len(output), engines.num_open) == ("cancelled", 4, 0)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert len(errors) == 6

    run(use)


def test_a_batch_whose_time_is_over_stops_its_engines(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        engines = Engines()
        engines.let(4)
        async with service(tmp_path, engines, models, limits=BatchLimits(window_s=1)) as opened:
            batch = await until(opened, await begin(opened, TEN))
            output, errors = await ends(opened, batch)
        assert (batch["status"], len(output), len(errors), engines.num_open) == ("expired", 4, 6, 0)

    run(use)


def test_lines_whose_engines_fail_again_and_again_end_with_an_error(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        engines = Engines()
        engines.fails = True
        async with service(tmp_path, engines, models) as opened:
            batch = await until(opened, await begin(opened, TEN))
            output, errors = await ends(opened, batch)
        assert (batch["status"], output, len(engines.models)) == ("completed", {}, 3)
        assert {each["error"]["code"] for each in errors.values()} == {"job_failed"}

    run(use)


def test_each_model_has_engines_of_its_own_one_after_the_other(tmp_path: Path, model: ServedModel) -> None:
    models = [model, replace(model, name="other", aliases=("alias",))]
    content = jsonl(line("a"), line("b", model="other"), line("c", model="alias"), line("d"))

    async def use() -> None:
        engines = Engines()
        engines.let(4)
        async with service(tmp_path, engines, models) as opened:
            output, _ = await ends(opened, await until(opened, await begin(opened, content)))
        assert (engines.models, engines.max_open) == (["demo", "other"], 1)
        answered = {name: each["response"]["body"]["model"] for name, each in output.items()}
        assert answered == {"a": "demo", "b": "other", "c": "other", "d": "demo"}

    run(use)


def test_so_many_batches_have_engines_at_once_and_the_others_wait(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        engines = Engines()
        async with service(tmp_path, engines, models, max_at_once=2) as opened:
            batch_ids = [await begin(opened, TEN) for _ in range(3)]
            await asyncio.sleep(0.2)
            assert engines.num_open == 2
            engines.let(30)
            for batch_id in batch_ids:
                assert (await until(opened, batch_id))["status"] == "completed"
        assert engines.max_open == 2

    run(use)


def test_what_a_key_may_never_have_is_refused(tmp_path: Path, model: ServedModel) -> None:
    keys = ring([entry(name=OWNER, max_tokens=5)])
    content = jsonl(line("short", max_tokens=3), line("open"), line("long", max_tokens=6))

    async def use() -> None:
        engines = Engines()
        engines.let(2)
        async with service(tmp_path, engines, [model], keys=keys) as opened:
            _, errors = await ends(opened, await until(opened, await begin(opened, content)))
        assert [item.request.sampling.max_tokens for item in engines.computed] == [3, 5]
        assert errors.keys() == {"long"}

    run(use)


def test_other_endpoints_are_refused_before_anything_begins(tmp_path: Path, models: list[ServedModel]) -> None:
    async def use() -> None:
        async with service(tmp_path, Engines(), models) as opened:
            new = NewBatch(owner=OWNER, endpoint="/v1/embeddings", input_file_id=await upload(opened, TEN))
            with pytest.raises(InvalidRequest, match="run as jobs of their own, for /v1/chat/completions and"):
                await opened.create_batch(new)

    run(use)
