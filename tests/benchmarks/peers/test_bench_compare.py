"""Comparisons: entries, interleaving, ratios, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers.compare import main


@pytest.fixture
def workload_path(tmp_path: Path) -> str:
    path = tmp_path / "work.jsonl"
    path.write_text('{"id": "a", "prompt_token_ids": [1], "max_tokens": 1}\n')
    return str(path)


def compare(workload_path: str, *arguments: str) -> int:
    return main(["--model", "none", "--workload", workload_path, "--threads", "1", *arguments])


def test_two_commands_are_run_in_turn_and_compared(
    tmp_path: Path, workload_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    ours = f'cmd:echo a >> {log}; echo chatter; echo \'{{"output_tokens_per_s": 20, "peak_rss_mb": 9}}\''
    theirs = f'cmd:echo b >> {log}; echo \'{{"output_tokens_per_s": 30.0, "latency_p50_s": 1.5}}\''
    assert compare(workload_path, "--rounds", "2", ours, theirs) == 0
    assert log.read_text().split() == ["a", "b", "a", "b"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| entry ")
    assert len(lines) == 5
    first, second = json.loads(lines[-1])["entries"]
    ours, theirs = first["workloads"]["work"], second["workloads"]["work"]
    assert (ours["ratio"], theirs["ratio"], theirs["all_ratios"]) == (1.0, 1.5, [1.5, 1.5])
    assert theirs["all_output_tokens_per_s"] == [30, 30]
    assert (theirs["latency_p50_s"], theirs["peak_rss_mb"]) == (1.5, None)


def test_further_workloads_are_compared_each_by_itself_and_entries_have_short_names(
    tmp_path: Path, workload_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(Path(workload_path).read_text())
    log = tmp_path / "log"
    also = '"also": {"other": {"output_tokens_per_s": 7, "decode_tokens_per_s": 8}}'
    entry = f"x int8 = cmd:echo {{common}} >> {log}; echo '{{\"output_tokens_per_s\": 2, {also}}}'"
    assert compare(workload_path, entry, "--also", str(other), "--rounds", "1") == 0
    out = capsys.readouterr().out.splitlines()
    [found] = json.loads(out[-1])["entries"]
    assert found["name"] == "x int8"
    assert [found["workloads"][name]["output_tokens_per_s"] for name in ("work", "other")] == [2, 7]
    assert found["workloads"]["other"]["decode_tokens_per_s"] == 8
    assert {"work", "other"} <= set(out)
    assert f"--workload {workload_path} --threads 1 --also {other}" in log.read_text()


def test_an_entry_that_fails_is_left_out_and_told(workload_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(workload_path, "--rounds", "2", "cmd:echo '{\"output_tokens_per_s\": 2}'", "cmd:exit 3") == 1
    out, err = capsys.readouterr()
    first, second = json.loads(out.splitlines()[-1])["entries"]
    assert (first["failure"], first["workloads"]["work"]["ratio"]) == (None, 1.0)
    assert (second["failure"], second["workloads"]["work"]["ratio"]) == ("it ended with status 3", None)
    assert err.count("round 2") == 1
