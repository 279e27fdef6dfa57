"""What is remembered of processes that are gone."""

from __future__ import annotations

import pytest

from app.metrics import EngineReport, KnownReports
from app.metrics import reports as reports_module
from tests.kit.engine import build_fake_engine, make_request


def report(replica_id: str, num_steps: int) -> EngineReport:
    engine = build_fake_engine()
    engine.add(make_request(max_tokens=50))
    for _ in range(num_steps):
        engine.step()
    return EngineReport(replica_id=replica_id, stats=engine.stats(), measurements=engine.measurements())


def known_of(*reports: EngineReport) -> KnownReports[EngineReport]:
    known = KnownReports[EngineReport](lambda report: report.stats.total_steps)
    for each in reports:
        known.learn({each.replica_id: each})
    return known


def test_the_last_report_of_a_replica_counts_in_whatever_order_they_come() -> None:
    early, late = report("a", 1), report("a", 5)
    assert known_of(early, late).gone(()) == known_of(late, early).gone(()) == [late]


def test_two_that_tell_each_other_know_the_same() -> None:
    mine, other = known_of(report("a", 3), report("b", 1)), known_of(report("b", 4), report("c", 2))
    assert other.beyond(mine.counts()).keys() == {"b", "c"}, "no more than the other one lacks"
    mine.learn(other.beyond(mine.counts()))
    other.learn(mine.beyond(other.counts()))
    assert mine.counts() == other.counts() == {"a": 3, "b": 4, "c": 2}
    assert mine.beyond(other.counts()) == other.beyond(mine.counts()) == {}


def test_those_that_are_there_are_not_gone() -> None:
    known = known_of(report("a", 1), report("b", 1))
    assert [each.replica_id for each in known.gone({"b", "new"})] == ["a"]


def test_the_oldest_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "MAX_KNOWN", 2)
    known = known_of(*(report(name, 1) for name in "abc"))
    assert list(known.counts()) == ["b", "c"]
