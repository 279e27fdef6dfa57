"""Debian's Prometheus against a live service: every query of every panel and rule has data, and an alert fires.

Tests that run Prometheus are skipped where `prometheus` and `promtool` are missing: `apt-get install prometheus`.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from deployments.dashboards.__main__ import FOLDER
from deployments.dashboards.rules import rules
from tests.deployments.conftest import Deployed, steps_of
from tests.deployments.dashboards.prometheus import Prometheus, faster, prometheus, why_no_prometheus
from tests.deployments.dashboards.test_dashboards import queries

needs_prometheus = pytest.mark.skipif(why_no_prometheus() is not None, reason=str(why_no_prometheus()))
NAME = "watched"
FACTOR = 60  # five minutes are five seconds
WAIT_S = 60.0


def promtool(*arguments: object) -> str:
    """Its output; fails where it does."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", FOLDER / "rules.yaml")


CAUSES: dict[str, dict[str, str]] = {
    # alert: series and their values, a minute apart, that make it fire
    "CarouselAbsent": {"up": "1x30"},
    "CarouselProcessMissing": {"carousel_scrape_missing": "1x30"},
    "CarouselNoReplica": {'carousel_calls_refused_total{model_name="demo", reason="unavailable"}': "0+6x30"},
    "CarouselBackendFailed": {'carousel_backends_failed{model_name="demo", replica="r1"}': "1x30"},
    "CarouselWantsReplicas": {
        'carousel_replicas_wanted{model_name="demo", reason="tokens"}': "1x30",  # of this model there is no replica
        'carousel_slots{model_name="other", replica="r1"}': "8x30",
    },
    "CarouselOverloaded": {
        'carousel_calls_refused_total{model_name="demo", reason="overloaded"}': "0+6x30",
        'carousel_requests_finished_total{model_name="demo", reason="stop"}': "0+60x30",
    },
    "CarouselCallsFail": {
        'carousel_calls_failed_total{model_name="demo", reason="step_failed"}': "0+6x30",
        'carousel_requests_finished_total{model_name="demo", reason="stop"}': "0+60x30",
    },
    "CarouselReplicasLost": {'carousel_resumes_total{model_name="demo", reason="lost"}': "0x10 1x20"},
    "CarouselFirstTokenSlow": {
        'carousel_first_token_seconds_bucket{model_name="demo", class="foreground", le="1"}': "0+50x30",
        'carousel_first_token_seconds_bucket{model_name="demo", class="foreground", le="120"}': "0+60x30",
        'carousel_first_token_seconds_count{model_name="demo", class="foreground"}': "0+60x30",
    },
    "CarouselTokensSlow": {
        'carousel_inter_token_seconds_bucket{model_name="demo", class="foreground", le="0.1"}': "0+50x30",
        'carousel_inter_token_seconds_count{model_name="demo", class="foreground"}': "0+60x30",
    },
    "CarouselQueueLong": {'carousel_queue_wait_seconds{replica="r1"}': "11x30"},
    "CarouselMemoryShort": {'carousel_engine_memory_preemptions_total{model_name="demo", replica="r1"}': "0+60x30"},
    "CarouselEngineStuck": {
        'carousel_slots_used{model_name="demo", replica="r1"}': "3x30",
        'carousel_engine_steps_total{model_name="demo", replica="r1"}': "50x30",
    },
    "CarouselStepsFail": {'carousel_engine_failed_total{model_name="demo", replica="r1"}': "0x10 2x20"},
    "CarouselLoopStalls": {'carousel_loop_stalled_seconds_total{process="ingress", id="i"}': "0+6x30"},
    "CarouselBatchLinesFail": {
        "carousel_batch_lines_failed_total": "0+10x30",
        "carousel_batch_lines_completed_total": "0+50x30",
    },
    "CarouselBatchesPaused": {"carousel_batches_paused": "1x30"},
    "CarouselWebhooksGivenUp": {"carousel_webhooks_given_up_total": "0x10 1x20"},
}


def test_every_alert_has_a_cause_to_be_tested_with() -> None:
    alerts = {rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    assert CAUSES.keys() == alerts


@needs_prometheus
def test_every_alert_fires_from_its_cause(tmp_path: Path) -> None:
    """Series that Prometheus' own unit tests play; the labels of an alert follow from those of the series."""
    tests = []
    for name, causes in CAUSES.items():
        given = [{"series": series, "values": values} for series, values in causes.items()]
        tests.append(
            {
                "interval": "1m",
                "input_series": given,
                # Exactly one: a count of the alert's own series is 1 whatever its labels are.
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                        "eval_time": "20m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        )
    (tmp_path / "rules.yaml").write_text((FOLDER / "rules.yaml").read_text())
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", tmp_path / "tests.yaml")


@pytest.fixture(scope="module")
def url(deployed: Deployed, demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An application with batches. Its model is simulated and takes eight requests."""
    model = {
        "name": NAME,
        "engine": {
            "model": {"path": str(demo_path), **steps_of(5)},
            "cache": {"num_blocks": 256},
            "scheduler": {"max_running": 4, "max_waiting": 4},
        },
        "replicas": {"autoscaling": {"max_replicas": 1}, "num_cpus": 0.05, "drain_timeout_s": 1},
    }
    with deployed(NAME, {"models": [model], "batches": {"path": str(tmp_path_factory.mktemp("batches"))}}) as url:
        yield url


@pytest.fixture
def scraped(url: str) -> Iterator[Prometheus]:
    with prometheus(url, factor=FACTOR, every_s=1) as server:
        yield server


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests of each class and a batch of one line, again and again until the end of the block."""
    is_over = threading.Event()

    def work() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not is_over.is_set():
                for tier in ("auto", "flex"):
                    complete(client, service_tier=tier)
                client.post("/v1/batch", json={"model": NAME, "prompts": ["Hi"], "max_tokens": 2, "async": True})
                is_over.wait(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def complete(client: httpx.Client, **fields: object) -> int:
    """The status of a completion."""
    body = {"model": NAME, "prompt": "Hi", "max_tokens": 4, "ignore_eos": True} | fields
    return client.post("/v1/completions", json=body).status_code


def soon(waits_for: Callable[[], object], work: Callable[[], object] = lambda: time.sleep(0.3)) -> None:
    """Work until nothing is waited for any more."""
    ends_at = time.monotonic() + WAIT_S
    while missing := waits_for():
        assert time.monotonic() < ends_at, f"it never came: {missing}"
        work()


@needs_prometheus
def test_every_query_of_every_panel_and_rule_has_data(scraped: Prometheus, url: str) -> None:
    """Alerts are asked for what they compare with their bound. Nothing has to go wrong for a number to be there."""
    alerts = {rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    asked = [(place, for_now(measured(expr) if place in alerts else expr)) for place, expr in queries()]

    def missing() -> list[str]:
        return [place for place, expr in asked if not scraped.has_number(expr)]

    with load(url):
        soon(missing)
        assert scraped.firing() == set(), "nothing is wrong"


def for_now(expr: str) -> str:
    """A query as Grafana sends it, over some seconds."""
    return faster(expr.replace("$__rate_interval", "5m").replace("$model", ".*"), FACTOR)


def measured(expr: str) -> str:
    """What an alert measures, without the bound that makes it fire; of `absent`, what should be there."""
    found = re.fullmatch(r"absent\((.*)\)", expr)
    if found is not None:
        return found[1]
    return re.split(r" (?:>|<|==) (?:[\d.]+$|0\.1 \*|\(count)", expr.split(" and ")[0])[0]


@needs_prometheus
def test_an_alert_fires_when_the_service_is_overloaded(scraped: Prometheus, url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:

        def too_many() -> None:
            assert complete(client) == 200
            assert complete(client, prompt=["Hi"] * 12) == 429

        soon(lambda: "CarouselOverloaded" not in scraped.firing(), too_many)
    assert "CarouselAbsent" not in scraped.firing()
