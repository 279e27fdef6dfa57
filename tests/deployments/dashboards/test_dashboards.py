"""Boards and rules ask for metrics that there are; the files in the repository are those that the script writes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from app.engine.histogram import SECONDS, Distribution
from app.errors import Overloaded
from app.metrics import CallMetrics, LoopSnapshot, RequestMetrics, Scrape, exposition
from deployments.dashboards.__main__ import FOLDER, files
from deployments.dashboards.boards import BOARDS
from deployments.dashboards.rules import ALERTS, rules
from tests.doc_pages import PROJECT
from tests.metrics.test_exposition import parsed, report, sent

_NAME = re.compile(r"\b(?:carousel|vllm)[:_][a-z0-9_:]+")
_LABELLED = re.compile(r"((?:carousel|vllm)[:_][a-z0-9_:]+)\{([^}]*)\}")


def queries() -> list[tuple[str, str]]:
    """(place, PromQL) of every panel and rule."""
    return list(_queries())


def _queries() -> Iterator[tuple[str, str]]:
    for board in BOARDS:
        for panel in board.panels:
            for expr, _ in panel.queries:
                yield f"{board.name}: {panel.title}", expr
    for group in rules()["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def everything() -> dict[str, Metric]:
    """A scrape in which everything has happened."""
    metrics = RequestMetrics(["demo"])
    demo = metrics.model("demo")
    demo.refused(Overloaded("full"))
    demo.failed(Overloaded("full"))
    demo.dispatched("least_loaded")
    demo.resumed("lost")
    with CallMetrics(demo, [3], arrived_at=metrics.clock()) as call:
        call.tokens(0, 2)
        call.finished(0, "stop")
    loop = LoopSnapshot(
        delay_s=Distribution.empty(SECONDS), num_stalls=0, stalled_s=0.0, num_tasks=1, queued={"bodies": 0}
    )
    return parsed(
        exposition(
            Scrape(
                requests=[metrics.snapshot()],
                replicas={"demo": sent(report("a", 1))},
                loops={("ingress", "i"): loop},
                batches=defaultdict(int, num_lines_completed=1),
                wanted={"demo": (2, "tokens", "many")},
            )
        )
    )


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of each series that there is, with those that rules record."""
    found: dict[str, set[str]] = {
        sample.name: set(sample.labels) for family in everything().values() for sample in family.samples
    }
    recorded = [rule for group in rules()["groups"] for rule in group["rules"] if "record" in rule]
    for rule in recorded:
        labels = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert labels is not None
        found[rule["record"]] = {label.strip() for label in labels[1].split(",")}
    return found


@pytest.mark.parametrize(("place", "expr"), queries())
def test_every_metric_and_label_of_a_query_exists(series: dict[str, set[str]], place: str, expr: str) -> None:
    names = set(_NAME.findall(expr))
    assert names, place
    assert names <= series.keys(), f"{place}: there is no {names - series.keys()}"
    for name, selected in _LABELLED.findall(expr):
        labels = set(re.findall(r"(\w+)\s*[=!]", selected))
        assert labels <= series[name], f"{place}: {name} has no {labels - series[name]}"
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", expr) for label in labels.split(",")}
    assert grouped <= set().union(*(series[name] for name in names)), place


@pytest.mark.parametrize("name", list(files()))
def test_the_files_in_the_repository_are_those_that_the_script_writes(name: str) -> None:
    assert (FOLDER / name).read_text() == files()[name], "run: python -m deployments.dashboards"


def test_every_alert_has_a_line_in_the_runbook() -> None:
    runbook = (PROJECT / "docs/operate/monitoring.md").read_text().split("### Runbook")[1].split("\n###")[0]
    assert [alert.name for alert in ALERTS] == re.findall(r"^\| (Carousel\w+) \|", runbook, re.MULTILINE)


def test_the_panels_of_a_board_do_not_overlap() -> None:
    for board in BOARDS:
        taken: set[tuple[int, int]] = set()
        panels: list[dict[str, Any]] = board.as_json()["panels"]
        for panel in panels:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells
