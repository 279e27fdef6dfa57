"""An A/B trial on a live cluster: two groups of one model's replicas with settings of their own, told apart."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import groups
from tests.deployments.conftest import Service
from tests.waiting import PATIENCE_S

MODEL = "trial"


def ask(service: Service, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "seed": 5}
    return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def test_a_header_chooses_the_group_and_shares_do_for_the_rest(service: Service) -> None:
    replicas = {}
    for group in ("steady", "bold"):
        answers = [ask(service, **{"x-carousel-group": group}) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        [replicas[group]] = {answer.headers["x-carousel-replica"] for answer in answers}
    assert replicas["steady"] != replicas["bold"]
    explained = ask(service, **{"x-carousel-group": "bold", "x-carousel-explain": "1"})
    assert explained.headers["x-carousel-why"].startswith(f"least_loaded: {replicas['bold']}, the least work:")
    refused = ask(service, **{"x-carousel-group": "none"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "group")
    assert "send one of steady, bold" in refused.json()["error"]["message"]
    assert ask(service, **{"x-carousel-preset": "latency"}).headers["x-carousel-replica"] == replicas["bold"]
    refused = ask(service, **{"x-carousel-preset": "batch"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "preset")
    assert "send one of mixed, latency" in refused.json()["error"]["message"]
    shares = [ask(service).headers["x-carousel-replica"] for _ in range(48)]
    # A quarter of 48, by a hash of the request's id; outside these bounds once in 50,000 runs.
    assert 2 <= shares.count(replicas["bold"]) <= 28


def test_each_group_has_its_settings_and_is_reported_apart(service: Service) -> None:
    before = requests_by_group(service)
    for _ in range(3):
        ask(service, **{"x-carousel-group": "bold"})
    ask(service, **{"x-carousel-group": "steady"})
    after = requests_by_group(service)
    assert {group: after[group] - before[group] for group in after} == {"steady": 1, "bold": 3}
    # The same model and the same seed say the same under either group's strategy and policy.
    texts = {ask(service, **{"x-carousel-group": group}).json()["choices"][0]["text"] for group in ("steady", "bold")}
    assert len(texts) == 1


def test_the_report_says_which_arm_is_better(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `bold`, a static batch of one request waits 200 ms for others; of `steady` it starts at once.

    A part ends when both have answered a request.
    """
    metrics_of = groups.metrics_of

    def after_requests(base_url: str, key_file: str | None) -> Callable[[], str]:
        text = metrics_of(base_url, key_file)

        def asked_and_read() -> str:
            assert [ask(service, **{"x-carousel-group": group}).status_code for group in ("steady", "bold")] == [
                200
            ] * 2
            return text()

        return asked_and_read

    monkeypatch.setattr(groups, "metrics_of", after_requests)
    arguments = ["--base-url", service.url, "--model", MODEL, "--reference", "steady"]
    assert groups.main([*arguments, "--seconds", "0.001", "--parts", "12"]) == 0
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    ttft = next(each for each in findings if each["figure"] == "TTFT mean s")
    assert (ttft["arm"], ttft["verdict"]) == ("bold", "worse")
    assert ttft["value"] > 0.05


def requests_by_group(service: Service) -> dict[str, float]:
    """Requests that each group's engines have ended by themselves."""
    families = text_string_to_metric_families(httpx.get(f"{service.url}/metrics", timeout=PATIENCE_S).text)
    [family] = [family for family in families if family.name == "carousel_engine_finished"]
    return {
        sample.labels["group"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["model_name"] == MODEL
    }
