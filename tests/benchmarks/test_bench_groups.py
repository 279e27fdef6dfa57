"""The report about an A/B trial on metrics with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.metrics import CallMetrics, EngineReport, RequestMetrics, Scrape, exposition, replica_metrics
from benchmarks import groups
from benchmarks.groups import Limits, Parts, arm_of, compared, critical_value, difference_of, read
from tests.benchmarks.servers import serving
from tests.kit.engine import build_fake_engine

LIMITS = Limits(0.1, 0.02)
NUM_PARTS = 12


class Trial:
    """A service with arms of one replica each, the requests of which take as long as it is told."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.names = names
        self.num_missing = 0
        self.failed = dict.fromkeys(names, 0)
        self._metrics = RequestMetrics(["demo"], clock=lambda: self.now)
        fake = build_fake_engine()
        self._stats, self._measurements = fake.stats(), fake.measurements()

    def serve(self, group: str, *, ttft_s: float, itl_s: float) -> None:
        """One request of five tokens."""
        with CallMetrics(self._metrics.model("demo"), [3], arrived_at=self.now) as call:
            call.placed(0, group)
            self.now += ttft_s
            call.tokens(0, 1)
            for _ in range(4):
                self.now += itl_s
                call.tokens(0, 1)
            call.finished(0, "length")

    def text(self) -> str:
        """Of /metrics."""
        replicas = [
            EngineReport(
                replica_id=f"of-{name}", group=name, measurements=self._measurements,
                stats=msgspec.structs.replace(self._stats, total_failed=self.failed[name]),
            )
            for name in self.names
        ]  # fmt: skip
        return exposition(
            Scrape(
                requests=[self._metrics.snapshot()],
                replicas={"demo": [replica_metrics("demo", each, {}) for each in replicas]},
                num_missing=self.num_missing,
            )
        ).decode()


@cache
def recorded() -> tuple[str, ...]:
    """12 parts of 20 requests an arm: `fast` is at half the time of `slow`, and its first tokens are all in 0.1 s.

    Of those of `slow` half are; ITL is 10 ms in both.
    """
    trial = Trial("fast", "slow")
    trial.serve("slow", ttft_s=5.0, itl_s=1.0)  # before the first reading: counts for nothing
    texts = [trial.text()]
    for part in range(NUM_PARTS):
        for number in range(20):
            factor = 1 + 0.1 * (part % 3 - 1) + 0.01 * number
            for name, ttft_s in (("fast", 0.05), ("slow", 0.1)):
                trial.serve(name, ttft_s=ttft_s * factor / 1.095, itl_s=0.01 - 0.0002 * (number % 2))
        texts.append(trial.text())
    return tuple(texts)


def test_the_answer_is_the_known_one() -> None:
    readings = [read(text, "demo", LIMITS) for text in recorded()]
    assert None not in readings
    arms = {name: arm_of(name, [each for each in readings if each is not None]) for name in ("fast", "slow")}
    assert {name: groups.num_requests(arm) for name, arm in arms.items()} == {"fast": 240, "slow": 240}
    ttft, itl, goodput, in_time = compared("fast", arms["fast"], arms["slow"], confidence=0.95)
    assert (ttft.value, ttft.reference_value) == (pytest.approx(0.05), pytest.approx(0.1))
    assert (ttft.difference, ttft.verdict) == (pytest.approx(-0.05), "better")
    assert (itl.value, itl.verdict) == (pytest.approx(0.0099), "no difference shown")
    assert (goodput.value, goodput.reference_value, goodput.verdict) == (1.0, pytest.approx(0.5, abs=0.05), "better")
    assert (in_time.value, in_time.difference, in_time.verdict) == (1.0, 0.0, "no difference shown")
    assert compared("slow", arms["slow"], arms["fast"], confidence=0.95)[0].verdict == "worse"


def test_with_equal_counts_the_difference_is_that_of_the_paired_t_test() -> None:
    ours, theirs = (Parts(np.array(sums, dtype=float), np.ones(4)) for sums in ([3, 5, 4, 6], [1, 4, 2, 2]))
    standard_error = math.sqrt(sum((each - 2.25) ** 2 for each in (2, 1, 2, 4)) / (4 * 3))
    assert difference_of(ours, theirs, 0.95) == pytest.approx((2.25, critical_value(0.95, 4) * standard_error))
    assert critical_value(0.95, 11) == pytest.approx(2.228, abs=1e-3)


def served(texts: Sequence[str]) -> Starlette:
    """One text after the other, then the last again."""
    left = iter(texts)
    last: list[str] = [texts[0]]

    async def metrics(_: Request) -> Response:
        last[0] = next(left, last[0])
        return PlainTextResponse(last[0])

    return Starlette(routes=[Route("/metrics", metrics)])


def run(texts: Sequence[str], *options: str) -> int:
    with serving(served(texts)) as url:
        arguments = ["--base-url", url, "--model", "demo", "--seconds", "0.01", "--slo-ttft-ms", "100"]
        return groups.main([*arguments, "--parts", "12", "--slo-itl-ms", "20", *options])


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (lambda: [Trial().text()], (), "/metrics has no replicas of it; it has none"),
        (lambda: [Trial("").text()], (), "has no groups; a trial needs at least two"),
        (lambda: [Trial("a").text()], (), "has only the group a;"),
        (lambda: [Trial("a", "b").text()], (), "the group a had requests in 0 of 12 parts; at least 10 are needed"),
        (recorded, ("--reference", "c"), "--reference c: there is no such group; there are fast, slow"),
        (recorded, ("--slo-ttft-ms", "700"), "near it are 500, 750, 1000, 1500"),
        (lambda: [*recorded()[1:], Trial("fast", "slow").text()], (), "the counts of the group fast fell"),
        (lambda: [*recorded()[:5], Trial("fast", "new").text()], (), "the groups have changed during the comparison"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    texts: Callable[[], Sequence[str]], options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(texts(), *options) == 2
    assert message in capsys.readouterr().err
