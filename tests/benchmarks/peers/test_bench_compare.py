"""Comparisons: entries, interleaving, ratios, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.command import BenchmarkError
from benchmarks.peers.compare import Entry, main, read_figures


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
    theirs = f'cmd:echo b >> {log}; echo \'{{"out_tok_s": 30.0, "latency_p50": 1.5}}\''
    assert compare(workload_path, "--rounds", "2", ours, theirs) == 0
    assert log.read_text().split() == ["a", "b", "a", "b"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| entry ")
    assert len(lines) == 5
    first, second = json.loads(lines[-1])["entries"]
    assert (first["ratio"], second["ratio"]) == (1.0, 1.5)
    assert second["all_output_tokens_per_s"] == [30, 30]
    assert (second["latency_p50_s"], second["peak_rss_mb"]) == (1.5, None)


def test_an_entry_that_fails_is_left_out_and_told(workload_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(workload_path, "--rounds", "2", "cmd:echo '{\"out_tok_s\": 2}'", "cmd:exit 3") == 1
    out, err = capsys.readouterr()
    first, second = json.loads(out.splitlines()[-1])["entries"]
    assert (first["failure"], first["ratio"]) == (None, 1.0)
    assert (second["failure"], second["ratio"]) == ("it ended with status 3", None)
    assert err.count("round 2") == 1


def test_entries_of_ours_get_the_common_options_and_their_own() -> None:
    common = ["--model", "m"]
    ours = Entry.parse("carousel --set scheduler.max_running=8", common)
    assert (ours.module, ours.arguments) == (
        "benchmarks.engine.throughput", ("--model", "m", "--set", "scheduler.max_running=8"),
    )  # fmt: skip
    peer = Entry.parse("hf-static-32", common)
    assert (peer.module, peer.arguments) == ("benchmarks.peers.hf", ("hf-static-32", "--model", "m"))


def test_an_unknown_entry_is_told_with_close_names(workload_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(workload_path, "hf-static-16") == 2
    assert "did you mean hf-static" in capsys.readouterr().err
    with pytest.raises(BenchmarkError, match="there are carousel"):
        Entry.parse("", [])


@pytest.mark.parametrize("stdout", ["", "no json\n", "[1]\n", '{"seconds": 1}\n', '{"out_tok_s": 1}\ndone\n'])
def test_output_without_figures_is_a_failure(stdout: str) -> None:
    with pytest.raises(BenchmarkError):
        read_figures(stdout)
