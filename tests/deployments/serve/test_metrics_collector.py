"""/metrics of a live service with two ingresses and two models: each ingress reports for all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ray import serve

from deployments.serve.metrics import answers_of
from tests.deployments.conftest import Deployed, steps_of
from tests.deployments.scraping import complete_scrape
from tests.metrics.test_exposition import parsed, value

MAX_TOKENS = 6
QUESTIONS = {"first": 5, "second": 3}


@pytest.fixture(scope="module")
def url(deployed: Deployed, demo_path: Path) -> Iterator[str]:
    """Two models, the first with two replicas, behind two ingresses."""
    models = [
        {
            "name": name,
            "engine": {"model": {"path": str(demo_path), **steps_of(1)}, "cache": {"num_blocks": 256}},
            "replicas": {"num_replicas": num_replicas, "num_cpus": 0.1, "drain_timeout_s": 1},
        }
        for name, num_replicas in (("first", 2), ("second", 1))
    ]
    with deployed("measured", {"models": models, "ingress": {"num_replicas": 2}}) as url:
        yield url


def ask(url: str, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "Once upon", "max_tokens": MAX_TOKENS, "ignore_eos": True} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_values_add_up_over_ingresses_replicas_and_models(url: str) -> None:
    models = [model for model, number in QUESTIONS.items() for _ in range(number)]
    with ThreadPoolExecutor(len(models)) as threads:  # at once, so that both ingresses get some
        answers = list(threads.map(lambda model: ask(url, model), models))
        refused = [answer.status_code for answer in threads.map(lambda _: ask(url, "first", max_tokens=10**6), "abc")]
    assert ({answer.status_code for answer in answers}, set(refused)) == ({200}, {400})
    num_prompt_tokens = answers[0].json()["usage"]["prompt_tokens"]
    for _ in range(6):  # new connections: HAProxy gives them to one ingress and to the other
        response = complete_scrape(url)
        text = response.content
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value(text, "carousel_ingresses") == 2
        for model, number in QUESTIONS.items():
            assert value(text, "vllm:generation_tokens_total", model_name=model) == number * MAX_TOKENS
            assert value(text, "vllm:prompt_tokens_total", model_name=model) == number * num_prompt_tokens
            assert value(text, "vllm:time_to_first_token_seconds_count", model_name=model) == number
            assert value(text, "vllm:request_queue_time_seconds_count", model_name=model) == number
        assert value(text, "vllm:admission_rejections_total", model_name="first", reason="context_too_long") == 3
    finished = [sample.value for sample in parsed(text)["carousel_engine_finished"].samples]
    assert (len(finished), sum(finished)) == (3, sum(QUESTIONS.values()))
    queues = Counter(
        (sample.labels["process"], sample.labels["threads"]) for sample in parsed(text)["carousel_thread_queue"].samples
    )
    assert queues == {("ingress", "default"): 2, ("ingress", "bodies"): 2, ("replica", "default"): 3}


def test_an_admin_is_told_what_every_ingress_knows(url: str) -> None:
    for _ in range(3):  # either ingress may be asked
        keys, fleet = (httpx.get(f"{url}/admin/{what}", timeout=10).json() for what in ("keys", "fleet"))
        assert fleet["processes"] == keys["processes"] == {"answered": 2, "missing": 0}
        [anonymous] = keys["data"]
        assert (anonymous["name"], anonymous["admin"]) == ("", True)
        assert anonymous["requests"] >= sum(QUESTIONS.values())
        assert anonymous["tokens"] >= sum(QUESTIONS.values()) * MAX_TOKENS
        views = [(each["model"], len(each["replicas"])) for each in fleet["data"]]
        assert sorted(views) == [("first", 2), ("first", 2), ("second", 1), ("second", 1)]
        states = [state for each in fleet["data"] for state in each["replicas"]]
        assert not any(state["is_suspect"] or state["is_full"] for state in states)
        assert {state["max_requests"] for state in states} == {32 + 256}


def test_a_scrape_is_quick(url: str) -> None:
    seconds = []
    for _ in range(3):  # others may be at work on this machine
        begin = time.monotonic()
        assert httpx.get(f"{url}/metrics").status_code == 200
        seconds.append(time.monotonic() - begin)
    assert min(seconds) < 1.0


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
