"""Traces from files: what is read, and what is said of a bad one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from deployments.plan.traces import read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def file(folder: Path, text: str, name: str = "trace.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def problem(place: str) -> str:
    with pytest.raises(InvalidSetup) as caught:
        read_trace(place)
    return caught.value.message


@pytest.mark.parametrize("name", ["azure-conv", "azure-code"])
def test_a_trace_is_built_in(name: str) -> None:
    trace = read_trace(name)
    assert len(trace.requests) == 1000
    assert trace.requests[0].arrival_s == 0.0
    assert 1 < trace.rate < 10


def test_azures_times_have_seven_decimals(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,3180,8\n"
    trace = read_trace(file(tmp_path, HEAD + rows))
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests] == [(4808, 10), (3180, 8)]
    assert trace.requests[1].arrival_s == pytest.approx(0.0520001, abs=1e-6)


def test_a_workload_keeps_its_prompts_and_tenants(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "tenant": "t"},
        {"id": "b", "prompt_token_ids": [5, 6], "max_tokens": 2, "arrival_s": 1.5, "priority": 3},
    ]
    trace = read_trace(file(tmp_path, "\n".join(map(json.dumps, lines)), "work.jsonl"))
    first, second = (each.request(number) for number, each in enumerate(trace.requests))
    assert (first.prompt_token_ids, first.sampling.max_tokens, first.tenant) == ((5, 6, 7), 4, "t")
    assert (second.priority, trace.requests[1].arrival_s) == (3, 1.5)


def test_prompts_without_tokens_share_no_prefix() -> None:
    first, second = (
        each.request(number).prompt_token_ids for number, each in enumerate(read_trace("azure-conv").first(2).requests)
    )
    assert len(first) == 374
    assert first[0] != second[0]


def test_the_same_trace_at_another_rate_and_with_other_lengths() -> None:
    trace = read_trace("azure-conv").with_lengths(0.1).at_rate(10.0)
    assert trace.rate == pytest.approx(10.0)
    assert trace.requests[0].num_prompt_tokens == 37
    assert trace.at_rate(float("inf")).requests[-1].arrival_s == 0.0


def test_a_trace_is_repeated_at_the_same_rate_and_thinned_at_the_same_times() -> None:
    trace = read_trace("azure-conv")
    repeated = trace.repeated(2500)
    assert len(repeated.requests) == 2500
    assert repeated.requests[1000].arrival_s == pytest.approx(trace.seconds)
    assert repeated.rate == pytest.approx(trace.rate, rel=0.1)
    thin = trace.thinned(0.25)
    assert 180 < len(thin.requests) < 320
    assert set(thin.requests) < set(trace.requests)


def test_of_a_thinned_trace_sessions_are_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [5], "max_tokens": 2, "session": f"s{number % 20}"} for number in range(60)]
    trace = read_trace(file(tmp_path, "\n".join(map(json.dumps, lines)), "work.jsonl")).repeated(240)
    counts = Counter(each.session for each in trace.thinned(0.5).requests)
    assert 0 < len(counts) < 20
    assert set(counts.values()) == {12}


def test_ten_million_requests_are_as_small_as_one_copy() -> None:
    trace = read_trace("azure-conv").repeated(10_000_000).at_rate(1000.0)
    assert trace.rate == pytest.approx(1000.0)
    assert trace.requests[9_999_999].arrival_s == pytest.approx(10_000, rel=0.01)
    assert [each.num_prompt_tokens for each in trace.first(2).requests] == [374, 396]
    assert len(trace.first(400).requests) == 400


def test_a_bad_trace_is_refused_with_numbers(tmp_path: Path) -> None:
    assert "the file contains no requests" in problem(file(tmp_path, HEAD))
    assert "the file contains no requests" in problem(file(tmp_path, ""))
    backwards = problem(file(tmp_path, f"{HEAD}5.5,10,1\n4.0,10,1\n"))
    assert "request 2 arrives 1.500 s before request 1; sort the file" in backwards
    assert "has no column ContextTokens" in problem(file(tmp_path, "TIMESTAMP,Prompt\n1,2\n"))
    assert ":3: got 0 prompt tokens" in problem(file(tmp_path, f"{HEAD}1,10,1\n2,0,1\n"))
    assert ":2: invalid literal" in problem(file(tmp_path, f"{HEAD}1,ten,1\n"))
    assert "there is no field 'prompt_token_ids'" in problem(file(tmp_path, '{"id": "a", "max_tokens": 1}\n'))
    assert "built-in traces are azure-conv, azure-code" in problem(str(tmp_path / "none"))


def test_requests_that_do_not_fit_are_counted_and_the_factor_is_said() -> None:
    trace = read_trace("azure-conv")
    with pytest.raises(
        InvalidSetup, match=r"of 1,000 requests do not fit.*accepts 2,048 in total.*--lengths 0\."
    ) as caught:
        trace.check_lengths(2048)
    factor = float(caught.value.message.rpartition(" ")[2])
    trace.with_lengths(factor).check_lengths(2048)
