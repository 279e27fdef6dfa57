"""An A/B trial on a live cluster: two groups of one model's replicas with settings of their own, told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.conftest import Deployed, steps_of

MODEL = "trial"


@pytest.fixture(scope="module")
def url(deployed: Deployed, demo_path: Path) -> Iterator[str]:
    model = {
        "name": MODEL,
        "engine": {"model": {"path": str(demo_path), **steps_of(1)}, "cache": {"num_blocks": 256}},
        "replicas": {
            "num_replicas": 2,
            "num_cpus": 0.05,
            "drain_timeout_s": 1,
            "groups": [
                {"name": "steady", "share": 3},
                {"name": "bold", "share": 1, "scheduler": {"strategy": "static", "policy": "sjf"}},
            ],
        },
    }
    with deployed(MODEL, {"models": [model]}) as url:
        yield url


def ask(url: str, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "seed": 5}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_header_chooses_the_group_and_shares_do_for_the_rest(url: str) -> None:
    replicas = {}
    for group in ("steady", "bold"):
        answers = [ask(url, **{"x-carousel-group": group}) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        [replicas[group]] = {answer.headers["x-carousel-replica"] for answer in answers}
    assert replicas["steady"] != replicas["bold"]
    explained = ask(url, **{"x-carousel-group": "bold", "x-carousel-explain": "1"})
    assert explained.headers["x-carousel-why"].startswith(f"least_loaded: {replicas['bold']}, the least work:")
    refused = ask(url, **{"x-carousel-group": "none"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "group")
    assert "there are steady, bold" in refused.json()["error"]["message"]
    shares = [ask(url).headers["x-carousel-replica"] for _ in range(48)]
    # A quarter of 48, by a hash of the request's id; outside these bounds once in 50,000 runs.
    assert 2 <= shares.count(replicas["bold"]) <= 28


def test_each_group_has_its_settings_and_is_reported_apart(url: str) -> None:
    before = requests_by_group(url)
    for _ in range(3):
        ask(url, **{"x-carousel-group": "bold"})
    ask(url, **{"x-carousel-group": "steady"})
    after = requests_by_group(url)
    assert {group: after[group] - before[group] for group in after} == {"steady": 1, "bold": 3}
    # The same model and the same seed say the same under either group's strategy and policy.
    texts = {ask(url, **{"x-carousel-group": group}).json()["choices"][0]["text"] for group in ("steady", "bold")}
    assert len(texts) == 1


def requests_by_group(url: str) -> dict[str, float]:
    """Requests that each group's engines have ended by themselves."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text)
    [family] = [family for family in families if family.name == "carousel_engine_finished"]
    return {sample.labels["group"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
