"""Workload files: what a line may say, and where a mistake stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import Workload, read_workload


def line(name: str = "a", **fields: object) -> str:
    return json.dumps({"id": name, "prompt_token_ids": [1, 2, 3], "max_tokens": 4} | fields)


def read(folder: Path, *lines: str) -> Workload:
    path = folder / "work.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_workload(str(path))


def test_requests_stand_in_order_of_arrival_and_then_of_the_file(tmp_path: Path) -> None:
    workload = read(tmp_path, line("late", arrival_s=2.5), "", line("first"), line("second"))
    assert [timed.request.request_id for timed in workload.requests] == ["first", "second", "late"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(), "{"], r"work\.jsonl:2: .*JSON"),
        (["", line(max_tokens=0)], r"work\.jsonl:2: max_tokens: .*greater than or equal to 1"),
        ([line(prompt_token_ids=[1, -2])], r"work\.jsonl:1: prompt_token_ids\.1: "),
        ([line(deadline_s=0)], r"work\.jsonl:1: deadline_s: .*greater than 0"),
        ([line(max_token=3)], r"work\.jsonl:1: there is no field 'max_token'; did you mean max_tokens"),
        ([line(), line("b"), line()], r"work\.jsonl:3: the id 'a' stands in line 1 already"),
        (["", "  "], r"has no requests"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        read(tmp_path, *lines)
