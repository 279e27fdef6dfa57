"""/metrics of a live service with two ingresses: each ingress reports for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from deployments.serve.metrics import MetricsCollector, answers_of
from deployments.serve.settings import parse
from tests.deployments.scraping import complete_scrape
from tests.metrics.test_exposition import parsed, value
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


def test_without_autoscaling_no_process_is_asked_how_many_replicas_there_should_be() -> None:
    collector = MetricsCollector(parse({"models": [{}]}).models, {})
    assert asyncio.run(collector.wanted_replicas()) == [], "outside of Serve a scrape raises"


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
