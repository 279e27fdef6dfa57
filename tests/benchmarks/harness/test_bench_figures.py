"""Percentiles, a request's times, and the report that is made of them."""

from __future__ import annotations

import pytest

from app.engine.request import Request, SamplingParams
from benchmarks.engine.run import Run, Setup, Timeline, summed_up
from benchmarks.harness.figures import percentile, table
from benchmarks.harness.workload import TimedRequest, Workload


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 99, 3.0),
        ([1, 2, 3, 4], 50, 2.5),
        ([4, 1, 3, 2], 0, 1),
        ([0, 100], 99, 99),
        ([5, 1], 100, 5),
    ],
)
def test_a_percentile_lies_between_the_two_nearest_samples(
    samples: list[float], percent: float, expected: float | None
) -> None:
    assert percentile(samples, percent) == pytest.approx(expected)


def test_times_count_from_the_arrival_and_gaps_between_deliveries() -> None:
    timeline = Timeline(arrival_s=1.0)
    timeline.deliver((7,), at_s=1.5)
    timeline.deliver((), at_s=1.6)
    timeline.deliver((8, 9), at_s=2.25)
    assert timeline.token_ids == [7, 8, 9]
    assert timeline.time_to_first_token_s == 0.5
    assert timeline.gaps_s == [0.75]
    assert timeline.latency_s == 1.25


def run(seconds: float, *, streams: bool = True) -> Run:
    timeline = Timeline(arrival_s=0.0)
    timeline.deliver((1,), at_s=seconds / 2)
    timeline.deliver((2,), at_s=seconds)
    return Run(seconds=seconds, timelines={"a": timeline}, streams=streams, num_steps=int(seconds))


WORKLOAD = Workload(
    (
        TimedRequest(
            request=Request(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2)),
        ),
    )
)
SETUP = Setup(engine="e", model="m", workload="w", dtype="fp32", threads=1, device="cpu", settings=[])


def test_a_report_has_the_median_of_the_repeats_and_counters_of_the_middle_one() -> None:
    found = summed_up(SETUP, WORKLOAD, [run(4), run(1), run(2)])
    assert (found["seconds"], found["all_seconds"], found["num_steps"]) == (2, [4, 1, 2], 2)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"], found["ttft_p50_s"]) == (1, 2, 1)
    assert found["latency_p99_s"] == pytest.approx(3.96)
    late = summed_up(SETUP, WORKLOAD, [run(2, streams=False)])  # delivers only at the end
    assert (late["ttft_p50_s"], late["itl_p50_s"], late["latency_p50_s"]) == (None, None, 2)


def test_a_table_lines_its_numbers_up_on_the_right() -> None:
    assert table(["part", "s"], [["a", "1.25"], ["attention", "10"]]).splitlines() == [
        "| part      |    s |",
        "| --------- | ---: |",
        "| a         | 1.25 |",
        "| attention |   10 |",
    ]
