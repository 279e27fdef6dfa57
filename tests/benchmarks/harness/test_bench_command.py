"""What commands have in common: figures on stdout and in a file, settings, workload files, mistakes in one sentence."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from app.config import StaticConfig
from benchmarks.harness.command import BenchmarkError, command_parser, run_command
from benchmarks.harness.settings import engine_config, parse_assignments
from benchmarks.harness.workload import Workload, read_workload


def run(figures: dict[str, Any], path: Path) -> int:
    parser = command_parser("x", None)
    return run_command(parser, lambda _: figures, ["--json", str(path)], is_bad=lambda found: found["hits"] > 0)


def test_a_file_that_cannot_be_written_does_not_cost_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run({"hits": 0}, tmp_path) == 2
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["hits"] == 0
    assert set(printed["versions"]) == {"carousel", "llguidance", "torch", "transformers", "triton", "python"}
    assert f"--json {tmp_path} cannot be written" in err


@pytest.mark.parametrize("hits", [0, 1])
def test_figures_are_printed_and_kept_and_bad_ones_are_the_status(
    hits: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run({"hits": hits}, path) == hits
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)


def test_what_cannot_be_measured_is_said_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: Namespace) -> dict[str, Any]:
        raise BenchmarkError("there is no model")

    assert run_command(command_parser("x", None), measure, [], is_bad=lambda figures: True) == 2
    assert capsys.readouterr() == ("", "error: there is no model\n")


def test_settings_of_every_branch_can_be_set_and_choices_by_name_in_any_order() -> None:
    texts = ["cache.dtype=int8", "cache.num_blocks=none", "model.dtype=bfloat16", "scheduler.policy=fair"]
    strategy = ["scheduler.strategy=static", "scheduler.strategy.max_wait_ms=3"]
    for ordered in (strategy, strategy[::-1]):
        config = engine_config({"model.num_threads": 2, **parse_assignments([*texts, *ordered])})
        assert (config.model.num_threads, config.model.dtype) == (2, "bfloat16")
        assert (config.cache.dtype, config.cache.num_blocks) == ("int8", None)
        assert (config.scheduler.strategy, config.scheduler.policy.name) == (StaticConfig(max_wait_ms=3), "fair")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler.max_running", "write it as path=value"),
        ("scheduler.max_running=0", r"scheduler\.max_running: got '?0'?; must be greater than or equal to 1"),
        ("scheduler.max_runing=3", "there is no setting 'scheduler.max_runing'; did you mean scheduler.max_running"),
        ("model.dtype=float16", r"model\.dtype: got 'float16'; must be "),
        ("scheduler.strategy.max_wait_ms=3", "without a name; must be one of static"),
        ("scheduler.max_step_tokens=8", "max_step_tokens=8 is below max_running=32"),
    ],
)
def test_a_wrong_value_is_told_with_what_the_setting_takes(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        engine_config(parse_assignments([text]))


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
        ([line(max_token=3)], r"work\.jsonl:1: there is no field 'max_token'; did you mean max_tokens"),
        ([line(), line("b"), line()], r"work\.jsonl:3: the id 'a' is already used in line 1"),
        (["", "  "], r"has no requests"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        read(tmp_path, *lines)
