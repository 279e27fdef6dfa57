"""Debian's Prometheus in a process of its own, with our rules at a faster pace: no run waits for an hour."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deployments.dashboards.rules import rules
from deployments.launcher.supervisor import free_ports

_START_TIMEOUT_S = 30.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"(?<=\[)(\d+)([smh])(?=\])")
_DURATION = re.compile(r"(\d+)([smh])")


def why_no_prometheus() -> str | None:
    """What is missing on this machine; None when nothing is."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        return "prometheus and promtool are not installed: apt-get install prometheus"
    return None


def faster(expr: str, factor: float) -> str:
    """A query over windows that are shorter by this factor."""
    return _WINDOW.sub(lambda found: _shorter(found, factor), expr)


def faster_rules(factor: float) -> dict[str, Any]:
    """Our rules with windows and `for` shorter by this factor. Bounds are as they are."""
    changed = deepcopy(rules())
    for rule in (rule for group in changed["groups"] for rule in group["rules"]):
        rule["expr"] = faster(rule["expr"], factor)
        if "alert" in rule:
            rule["for"] = _DURATION.sub(lambda found: _shorter(found, factor), rule["for"])
    return changed


def _shorter(found: re.Match[str], factor: float) -> str:
    return f"{round(1000 * int(found[1]) * _UNITS_S[found[2]] / factor)}ms"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server that scrapes one service."""

    base: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises RuntimeError with what Prometheus says of a wrong query."""
        try:
            with urllib.request.urlopen(
                f"{self.base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=10
            ) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{expr}: {error.read().decode()}") from error

    def has_number(self, expr: str) -> bool:
        """Whether a query finds a value; a quantile of no observations is none."""
        return any(not math.isnan(float(series["value"][1])) for series in self.query(expr))

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}


@contextmanager
def prometheus(url: str, *, factor: float, every_s: int) -> Iterator[Prometheus]:
    """Prometheus for a service at this URL until the end of the block; it scrapes and evaluates every so often.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    reason = why_no_prometheus()
    if reason is not None:
        raise RuntimeError(reason)
    address = f"127.0.0.1:{next(free_ports())}"
    with TemporaryDirectory(prefix="carousel-prometheus-") as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(json.dumps(faster_rules(factor)), encoding="utf-8")
        (folder / "prometheus.yml").write_text(json.dumps(_config(url, every_s)), encoding="utf-8")  # JSON is YAML
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}", "--log.level=error",
            ],
        )  # fmt: skip
        try:
            server = Prometheus(f"http://{address}")
            _wait_until_ready(process, server)
            yield server
        finally:
            process.terminate()
            process.wait(10)


def _config(url: str, every_s: int) -> Mapping[str, Any]:
    where = urllib.parse.urlsplit(url)
    target = {"job_name": "carousel", "metrics_path": f"{where.path.rstrip('/')}/metrics"}
    return {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{every_s}s"),
        "rule_files": ["rules.yaml"],
        "scrape_configs": [target | {"static_configs": [{"targets": [where.netloc]}]}],
    }


def _wait_until_ready(process: subprocess.Popen[bytes], server: Prometheus) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.base}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("Prometheus did not start; its own words are on stderr")
