"""Replicas that sleep, on a live cluster: a native model, and two models that take turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.conftest import Service
from tests.waiting import PATIENCE_S, eventually

NATIVE, FIRST, SECOND = "dozing", "first", "second"


def ask(url: str, name: str, prompt: str, max_tokens: int = 8) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 5}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def states(url: str) -> dict[str, str]:
    entries = httpx.get(f"{url}/admin/fleet", timeout=PATIENCE_S).json()["data"]
    return {entry["model"]: each["sleep"] for entry in entries for each in entry["replicas"]}


def number(url: str, name: str, model_name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if sample.labels["model_name"] == model_name)


def test_a_native_model_sleeps_and_answers_the_next_request_as_before(service: Service) -> None:
    url = service.url
    before = ask(url, NATIVE, "Once upon a time")
    eventually(lambda: states(url)[NATIVE], lambda state: state == "asleep")
    num_wakes = number(url, "carousel_wakes_total", NATIVE)
    assert ask(url, NATIVE, "Once upon a time") == before
    eventually(lambda: number(url, "carousel_wakes_total", NATIVE), lambda wakes: wakes > num_wakes)


def test_two_models_that_do_not_fit_together_take_turns_and_lose_nothing(service: Service) -> None:
    url = service.url
    asked = [(name, f"Story {n}") for n in range(6) for name in (FIRST, SECOND)]
    alone = [ask(url, name, prompt, 100) for name, prompt in asked[:2]]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: ask(url, *each, max_tokens=100), asked))
    assert answers[:2] == alone
    assert all(answers)
    switches = [number(url, "carousel_wakes_total", name) for name in (FIRST, SECOND)]
    assert min(switches) >= 1
