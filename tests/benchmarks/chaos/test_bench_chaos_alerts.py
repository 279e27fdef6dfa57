"""What is said of alerts that fired; live runs of all causes: docs/operate/alerts.md."""

from __future__ import annotations

import pytest

from benchmarks.chaos.alerts import CAUSES, main, told
from benchmarks.harness.prometheus import faster, faster_rules
from deployments.dashboards.rules import ALERTS

NO_CAUSE = {"CarouselStepsFail", "CarouselMemoryShort", "CarouselEngineStuck"}  # promtool plays their series


def test_an_alert_is_told_with_its_begin_and_its_end() -> None:
    times = {"A": [110.0, 113.0], "B": [150.0]}
    series = [{"metric": {"alertname": name}, "values": [[at, "1"] for at in ats]} for name, ats in times.items()]
    assert told(series, {"B"}, 100.0, 112.0) == {
        "A": {"after_s": 10.0, "resolved_after_s": 4.0},
        "B": {"after_s": 50.0, "resolved_after_s": None},
    }


def test_every_alert_has_a_cause_or_is_named() -> None:
    caused = {alert for cause in CAUSES.values() for alert in cause.fires}
    assert caused | NO_CAUSE == {alert.name for alert in ALERTS}
    assert not caused & NO_CAUSE


def test_rules_are_faster_by_a_factor_and_their_bounds_are_not() -> None:
    assert faster("rate(a[5m]) / rate(b[1h]) > 0.05", 20) == "rate(a[15000ms]) / rate(b[180000ms]) > 0.05"
    assert {rule["for"] for group in faster_rules(20)["groups"] for rule in group["rules"] if "for" in rule} == {
        "0ms", "3000ms", "6000ms", "15000ms",
    }  # fmt: skip


def test_a_cause_that_is_not_there_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kil"]) == 2
    assert "did you mean kill or kill-all" in capsys.readouterr().err
