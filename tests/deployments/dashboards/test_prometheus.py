"""Debian's Prometheus against a service: every query of every panel and rule has data, and an alert fires.

Skipped where `prometheus` and `promtool` are not installed: `apt-get install prometheus`.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.text import Tokenizer
from deployments.dashboards.__main__ import FOLDER
from deployments.dashboards.rules import rules
from tests.deployments.dashboards.test_dashboards import queries
from tests.deployments.dashboards.watched_service import Watched, served

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed: apt-get install prometheus",
)
_WAIT_S = 60.0


def promtool(*arguments: object) -> str:
    """Its output; fails where it does."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", FOLDER / "rules.yaml")


CAUSES: dict[str, dict[str, str]] = {
    # alert: series and their values, a minute apart, that make it fire
    "CarouselAbsent": {"up": "1x30"},
    "CarouselProcessMissing": {"carousel_scrape_missing": "1x30"},
    "CarouselNoReplica": {'carousel_calls_refused_total{model_name="demo", reason="unavailable"}': "0+6x30"},
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
        'carousel_first_token_seconds_count{model_name="demo", class="foreground"}': "0+60x30",
    },
    "CarouselTokensSlow": {
        'carousel_inter_token_seconds_bucket{model_name="demo", class="foreground", le="0.1"}': "0+50x30",
        'carousel_inter_token_seconds_count{model_name="demo", class="foreground"}': "0+60x30",
    },
    "CarouselQueueLong": {'carousel_queue_wait_seconds{replica="r1"}': "11x30"},
    "CarouselMemoryShort": {'carousel_engine_preemptions_total{model_name="demo", replica="r1"}': "0+60x30"},
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
    "CarouselWebhooksGivenUp": {"carousel_webhooks_given_up_total": "0x10 1x20"},
}


def test_every_alert_fires_from_its_cause(tmp_path: Path) -> None:
    """Series that Prometheus' own unit tests play; the labels of an alert follow from those of the series."""
    alerts = {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    assert CAUSES.keys() == alerts.keys()
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


class Prometheus:
    """A server that scrapes one target every second, with our rules at that pace."""

    def __init__(self, folder: Path, target: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rules.yaml").write_text(yaml.safe_dump(_faster(rules())))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": "carousel", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.base = f"http://{address}"
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}", "--log.level=error",
            ],
        )  # fmt: skip

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises what HTTP raises, with what Prometheus says of a wrong query."""
        try:
            with urllib.request.urlopen(
                f"{self.base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=10
            ) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def _faster(of: dict[str, Any]) -> dict[str, Any]:
    """The rules over seconds in place of minutes, as no test waits for five minutes."""
    for group in of["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[\d+[mh]\]", "[10s]", rule["expr"])
            if "alert" in rule:
                rule["for"] = "0s"
    return of


def soon(waits_for: Callable[[], object], work: Callable[[], object]) -> None:
    """Work until nothing is waited for any more."""
    ends_at = time.monotonic() + _WAIT_S
    while missing := waits_for():
        assert time.monotonic() < ends_at, f"it never came: {missing}"
        work()
        time.sleep(0.3)


@pytest.fixture(scope="module")
def scraped(
    demo_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, Callable[[int], None]]]:
    """Prometheus after some scrapes of a service that works, and a call that makes it work."""
    watched = Watched(Tokenizer.load(str(demo_path)))
    with served(watched) as base:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), base)

        def is_missing() -> bool:
            try:
                [found] = prometheus.query("count_over_time(carousel_ingresses[1h])") or [{"value": [0, "0"]}]
            except OSError:
                return True
            return int(found["value"][1]) < 5

        try:
            soon(is_missing, lambda: watched.work(base))
            yield prometheus, lambda number: watched.work(base, num_too_many=number)
        finally:
            prometheus.stop()


def test_every_query_of_every_panel_and_rule_has_data(scraped: tuple[Prometheus, Callable[[int], None]]) -> None:
    prometheus, work = scraped
    alerts = {rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    asked = [(place, _measured(expr) if place in alerts else expr) for place, expr in queries()]

    def missing() -> list[str]:
        return [place for place, expr in asked if not prometheus.query(_for_now(expr))]

    soon(missing, lambda: work(0))


def _for_now(expr: str) -> str:
    """A query as Grafana sends it, over some seconds."""
    return re.sub(r"\[\d+[mh]\]", "[10s]", expr.replace("$__rate_interval", "10s").replace("$model", ".*"))


def _measured(expr: str) -> str:
    """What an alert measures, without the bound that makes it fire; of `absent`, what should be there."""
    found = re.fullmatch(r"absent\((.*)\)", expr)
    if found is not None:
        return found[1]
    return re.split(r" (?:>|<|==) (?:[\d.]+$|0\.1 \*)", expr.split(" and ")[0])[0]


def test_an_alert_fires_when_the_service_is_overloaded(scraped: tuple[Prometheus, Callable[[int], None]]) -> None:
    prometheus, work = scraped

    def fires(name: str) -> bool:
        return bool(prometheus.query(f'ALERTS{{alertname="{name}", alertstate="firing"}}'))

    assert not fires("CarouselOverloaded")
    soon(lambda: not fires("CarouselOverloaded"), lambda: work(3))
    assert not fires("CarouselAbsent")
