"""Access logs as traces: our own log's lines, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from deployments.plan.traces import Trace, read_trace

OURS = """\
INFO 2026-11-23 16:00:01,500 carousel_Ingress 7f3a replica-1 -- model demo: context 2048, vocabulary 768
INFO 2026-11-23 16:00:04,000 carousel_Ingress 7f3a a -- request a finished after 2.000 s: model demo, 1 choices, \
120 prompt tokens, 30 completion tokens, answer cmpl-a
INFO 2026-11-23 16:00:04,250 carousel_Ingress 7f3a b -- request b finished after 3.250 s: model demo, 1 choices, \
7 prompt tokens, 40 completion tokens, answer cmpl-b
INFO 2026-11-23 16:00:05,000 carousel_Ingress 7f3a c -- request c refused with 429: no replica
"""


def trace_of(folder: Path, text: str) -> Trace:
    (folder / "access.log").write_text(text)
    return read_trace(str(folder / "access.log"))


def sizes(trace: Trace) -> list[tuple[float, int, int]]:
    return [(round(each.arrival_s, 3), each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests]


def test_requests_of_our_own_log_come_when_they_arrived_and_not_when_they_ended(tmp_path: Path) -> None:
    assert sizes(trace_of(tmp_path, OURS)) == [(0.0, 7, 40), (1.0, 120, 30)]


def test_our_log_is_read_where_serve_writes_it_as_json(tmp_path: Path) -> None:
    lines = [
        json.dumps({"asctime": line[5:28], "levelname": "INFO", "message": line.partition(" -- ")[2]})
        for line in OURS.splitlines()
    ]
    assert sizes(trace_of(tmp_path, "\n".join(lines))) == [(0.0, 7, 40), (1.0, 120, 30)]


@pytest.mark.parametrize("times", [(100.0, 102.5), ("2026-11-23T16:00:00Z", "2026-11-23T17:00:02.5+01:00")])
def test_other_logs_have_a_time_and_tokens_in_each_line(times: tuple[object, object], tmp_path: Path) -> None:
    lines = [
        {"timestamp": times[0], "prompt_tokens": 10, "completion_tokens": 3},
        {"time": times[1], "path": "/v1/completions", "usage": {"input_tokens": 20, "output_tokens": 4}},
        {"time": times[1], "usage": {"input_tokens": 20, "output_tokens": 0}},
    ]
    assert sizes(trace_of(tmp_path, "\n".join(map(json.dumps, lines)))) == [(0.0, 10, 3), (2.5, 20, 4)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 2, "prompt_tokens": 5}', "access.log:2: one of the fields completion_tokens"),
        ('{"timestamp": 2, "prompt_tokens": -5, "completion_tokens": 1}', "access.log:2: got -5 tokens"),
        ('{"timestamp": "noon", "prompt_tokens": 5, "completion_tokens": 1}', "access.log:2: Invalid isoformat"),
        ('{"timestamp": NaN, "prompt_tokens": 5, "completion_tokens": 1}', "access.log:2: got the time nan"),
        ('{"timestamp": 2, "prompt_tokens"', "access.log:2: Expecting"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup) as caught:
        trace_of(tmp_path, '{"timestamp": 1, "prompt_tokens": 5, "completion_tokens": 1}\n' + line)
    assert problem in caught.value.message


def test_a_log_without_a_request_that_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match="the file contains no requests"):
        trace_of(tmp_path, OURS.splitlines()[0])
