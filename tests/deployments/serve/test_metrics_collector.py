"""/metrics of a live service with two ingresses: each ingress reports for all."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
from ray import serve

from app.api.endpoints.admin import Answers
from app.engine.histogram import SECONDS, Distribution
from app.fleet import Fleet
from app.metrics import EngineReport, LoopSnapshot, RequestMetrics, encoded, replica_metrics
from deployments.serve.metrics import IngressReport, KnownCounts, LaterCounts, MetricsCollector, answers_of
from deployments.serve.settings import parse
from tests.deployments.scraping import complete_scrape
from tests.kit.engine import FakeClock
from tests.metrics.test_exposition import parsed, report, value
from tests.waiting import PATIENCE_S

MAX_TOKENS = 6
QUESTIONS = {"switched": 5, "demo": 3}


def ask(url: str, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "Once upon", "max_tokens": MAX_TOKENS, "ignore_eos": True} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


COUNTED = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:admission_rejections_total",
    "carousel_engine_finished_total",
)


def counted(text: bytes) -> dict[str, list[float]]:
    """The sums of these by model, over all processes."""
    samples = [sample for family in parsed(text).values() for sample in family.samples]
    return {
        model: [
            sum(each.value for each in samples if each.name == name and each.labels["model_name"] == model)
            for name in COUNTED
        ]
        for model in QUESTIONS
    }


def test_values_add_up_over_ingresses_replicas_and_models(shared: str) -> None:
    before = counted(complete_scrape(shared).content)
    models = [model for model, number in QUESTIONS.items() for _ in range(number)]
    with ThreadPoolExecutor(len(models)) as threads:  # at once, so that both ingresses get some
        answers = list(threads.map(lambda model: ask(shared, model), models))
        refused = [answer.status_code for answer in threads.map(lambda _: ask(shared, "demo", max_tokens=10**6), "abc")]
    assert ({answer.status_code for answer in answers}, set(refused)) == ({200}, {400})
    num_prompt_tokens = answers[0].json()["usage"]["prompt_tokens"]
    new = {
        model: [number * MAX_TOKENS, number * num_prompt_tokens, number, number, 3 * (model == "demo"), number]
        for model, number in QUESTIONS.items()
    }
    after = {model: [a + b for a, b in zip(before[model], new[model], strict=True)] for model in QUESTIONS}
    for _ in range(6):  # new connections: HAProxy gives them to one ingress and to the other
        response = complete_scrape(shared)
        text = response.content
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value(text, "carousel_ingresses") == 2
        assert counted(text) == after
    queues = Counter(
        (sample.labels["process"], sample.labels["threads"]) for sample in parsed(text)["carousel_thread_queue"].samples
    )
    assert queues["ingress", "default"] == queues["ingress", "bodies"] == 2
    assert queues["replica", "default"] == 3


def test_an_admin_is_told_what_every_ingress_knows(shared: str) -> None:
    for _ in range(3):  # either ingress may be asked
        keys, fleet = (httpx.get(f"{shared}/admin/{what}", timeout=PATIENCE_S).json() for what in ("keys", "fleet"))
        # The process of the batches has a view of its own.
        assert fleet["processes"] == keys["processes"] == {"answered": 3, "missing": 0}
        [anonymous] = keys["data"]
        assert (anonymous["name"], anonymous["admin"]) == ("", True)
        assert anonymous["requests"] >= sum(QUESTIONS.values())
        assert anonymous["tokens"] >= sum(QUESTIONS.values()) * MAX_TOKENS
        views = [(each["model"], len(each["replicas"])) for each in fleet["data"]]
        assert sorted(views) == [("demo", 1)] * 3 + [("switched", 2)] * 3
        states = [state for each in fleet["data"] for state in each["replicas"]]
        assert not any(state["is_suspect"] or state["is_full"] for state in states)
        assert {state["max_requests"] for state in states} == {32 + 256}


class Service:
    """Ingresses in this process, and the replicas of one model."""

    def __init__(self, num_ingresses: int, **model: Any) -> None:
        models = parse({"models": [{"name": "demo"} | model]}).models
        self.replicas: dict[str, EngineReport | bytes | None] = {}  # None: it does not answer
        self.silent: set[str] = set()  # ingresses
        self.num_asked = 0
        self.ingresses = [
            MetricsCollector(models, RequestMetrics(["demo"]), {"demo": cast(Fleet, self)}, LocalSenders(self, f"i{n}"))
            for n in range(num_ingresses)
        ]

    async def ask_metrics(self, timeout_s: float) -> dict[str, bytes | None]:
        """As a fleet does."""
        self.num_asked += 1
        return {
            name: encoded(replica_metrics("demo", each, USE)) if isinstance(each, EngineReport) else each
            for name, each in self.replicas.items()
        }

    async def scrape(self, ingress: int = 0) -> bytes:
        return b"".join(await self.ingresses[ingress].expose())


class LocalSenders:
    """One ingress's view of all."""

    def __init__(self, service: Service, ingress_id: str) -> None:
        self._service = service
        self.itself = ("ingress", ingress_id)

    def _answers(self, ask: Callable[[MetricsCollector], object]) -> Answers[Any]:
        ingresses = self._service.ingresses
        answering = [each for each in ingresses if each._senders.itself[1] not in self._service.silent]
        # They are other processes.
        reports = [pickle.loads(pickle.dumps(ask(each))) for each in answering]
        return Answers(reports=reports, num_missing=len(ingresses) - len(answering))

    async def reports(self) -> Answers[IngressReport]:
        return self._answers(lambda each: each.report())

    async def later_counts(self, known: KnownCounts) -> Answers[LaterCounts]:
        return self._answers(lambda each: each.later_counts(pickle.loads(pickle.dumps(known))))


USE = {"num_outstanding_tokens": 5.0, "num_requests": 2.0, "kv_use": 0.5, "tokens_per_s": 10.0, "misses_targets": 0.0}


@pytest.fixture
def _looks_at_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event loops of processes are not what these tests are about."""
    snapshot = LoopSnapshot(
        delay_s=Distribution.empty(SECONDS), num_stalls=0, stalled_s=0.0, num_tasks=1, queued={"bodies": 0}
    )
    monkeypatch.setattr("app.metrics.LoopMonitor.snapshot", lambda monitor: snapshot)


@pytest.mark.usefixtures("_looks_at_no_loop")
async def test_no_sum_falls_when_another_ingress_is_asked_or_replicas_do_not_answer() -> None:
    service = Service(2)
    service.replicas = {"a": report("a", 3), "b": report("b", 2)}
    names = ("vllm:prefix_cache_queries_total", "vllm:iteration_tokens_total_sum", "vllm:num_preemptions_total")

    def sums(text: bytes) -> list[float]:
        return [value(text, name, model_name="demo") for name in names]

    both = sums(await service.scrape(0))
    assert both[0] == 5 * 3
    service.replicas["a"] = None
    text = await service.scrape(1)
    assert sums(text) == both, "the other ingress has heard of it"
    assert value(text, "carousel_scrape_missing") == 1
    assert b'replica="a"' not in text
    del service.replicas["a"]
    assert sums(await service.scrape(1)) == sums(await service.scrape(0)) == both
    service.replicas = {"c": report("c", 1)}
    assert sums(await service.scrape(0))[0] == 6 * 3
    service.silent = {"i0"}
    assert sums(await service.scrape(1))[0] >= both[0]


@pytest.mark.usefixtures("_looks_at_no_loop")
async def test_an_ingress_keeps_little_of_replicas_that_have_come_and_gone() -> None:
    service, clock = Service(2), FakeClock()
    for ingress in service.ingresses:
        for known in (*ingress._known.values(), ingress._known_senders):
            known._clock = clock
    fixed, sizes = report("x", 1), []
    for generation in range(60):
        service.replicas = {f"{generation}-{number}": replace(fixed, replica_id=f"{number}") for number in range(5)}
        text = await service.scrape(generation % 2)
        clock.advance(300.0)
        sizes.append(len(pickle.dumps([ingress._known["demo"].without() for ingress in service.ingresses])))
    assert value(text, "vllm:prefix_cache_queries_total", model_name="demo") == 60 * 5 * 3
    assert max(sizes[10:]) <= 1.1 * sizes[9]


@pytest.mark.usefixtures("_looks_at_no_loop")
async def test_replicas_that_send_nonsense_are_missing_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(1)
    service.replicas = {"good": report("good", 1), "bad": b"\xff" * 100, "long": b"\x00" * 10**6}
    for _ in range(3):
        text = await service.scrape()
        assert value(text, "carousel_scrape_missing") == 2
        assert value(text, "carousel_slots", replica="good") == 8
    [record] = caplog.records
    assert "2 replicas of demo cannot be read and are missing from /metrics; replica bad" in record.getMessage()


@pytest.mark.usefixtures("_looks_at_no_loop")
async def test_many_reports_are_read_in_turns_of_the_event_loop() -> None:
    service = Service(1)
    fixed = report("x", 1)
    service.replicas = {f"r{number}": replace(fixed, replica_id=f"r{number}") for number in range(500)}
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    text = await service.scrape()
    counting.cancel()
    assert len(parsed(text)["carousel_slots"].samples) == 500
    assert num_turns > 20, "some for reports, and some for families"


@pytest.mark.usefixtures("_looks_at_no_loop")
async def test_how_many_replicas_there_should_be_comes_from_what_they_report() -> None:
    service = Service(1, replicas={"autoscaling": {"mode": "advise", "max_replicas": 5, "target_s": 0.25}})
    service.replicas = {"a": report("a", 1), "b": None}
    [wanted] = await service.ingresses[0].wanted_replicas()
    assert (wanted["model"], wanted["replicas"], wanted["wanted"]) == ("demo", 1, 2)
    assert value(await service.scrape(), "carousel_replicas_wanted", reason="tokens") == 2


async def test_without_autoscaling_no_process_is_asked_how_many_replicas_there_should_be() -> None:
    service = Service(1)
    assert await service.ingresses[0].wanted_replicas() == []
    assert service.num_asked == 0


def test_one_that_hangs_is_missing_and_the_others_are_heard(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfDeaf:  # in here, so that it is sent by value: replicas cannot import this module
        async def metrics_report(self) -> str:
            rank = serve.get_replica_context().rank.rank
            if rank == 0:
                await asyncio.Event().wait()
            return f"report of {rank}"

    monkeypatch.setattr("deployments.serve.metrics.SCRAPE_TIMEOUT_S", 0.5)
    deployment = serve.deployment(HalfDeaf).options(
        num_replicas=2, ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=0.1
    )
    handle = serve.run(deployment.bind(), name="half_deaf", route_prefix=None)
    handle._init(_run_router_in_separate_loop=True)  # its own loop outlives this test's

    answers = asyncio.run(answers_of(handle, "metrics_report"))
    assert (answers.reports, answers.num_missing) == (["report of 1"], 1)
    serve.delete("half_deaf", _blocking=False)
