"""Comparisons: entries, interleaving, ratios, failures; what stands in for llama.cpp prints what the real one does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers import engines
from benchmarks.peers.compare import main
from tests.benchmarks.conftest import Figures, write_workload

LINE = {"pp": 16, "tg": 4, "pl": 2, "t_pp": 0.5, "t_tg": 2.0}


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    return ["--model", "none", "--workload", str(write_workload(tmp_path / "work.jsonl", {})), "--threads", "1"]


def test_two_commands_are_run_in_turn_and_compared(
    tmp_path: Path, common: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    ours = f'cmd:echo a >> {log}; echo chatter; echo \'{{"output_tokens_per_s": 20, "peak_rss_mb": 9}}\''
    theirs = f'cmd:echo b >> {log}; echo \'{{"output_tokens_per_s": 30.0, "latency_p50_s": 1.5}}\''
    assert main([*common, "--rounds", "2", ours, theirs]) == 0
    assert log.read_text().split() == ["a", "b", "a", "b"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| entry ")
    assert len(lines) == 5
    first, second = (entry["workloads"]["work"] for entry in json.loads(lines[-1])["entries"])
    assert (first["ratio"], second["ratio"], second["all_ratios"]) == (1.0, 1.5, [1.5, 1.5])
    assert second["all_output_tokens_per_s"] == [30, 30]
    assert (second["latency_p50_s"], second["peak_rss_mb"]) == (1.5, None)


def test_busy_neighbours_run_meanwhile_and_no_longer(tmp_path: Path, common: list[str], figures: Figures) -> None:
    count = tmp_path / "count.py"
    count.write_text(
        "import psutil\n"
        f"beside = psutil.Process({os.getpid()}).children()\n"
        "loops = sum('while True: pass' in process.cmdline() for process in beside)\n"
        "print('{\"output_tokens_per_s\": %d}' % loops)\n"
    )
    entry = f"cmd:{sys.executable} {count}"
    for beside in (2, 0):
        [found] = figures(main, *common, entry, "--rounds", "1", *(["--beside", str(beside)] if beside else []))[
            "entries"
        ]
        assert found["workloads"]["work"]["output_tokens_per_s"] == beside


def test_further_workloads_are_compared_each_by_itself_and_entries_have_short_names(
    tmp_path: Path, common: list[str], figures: Figures
) -> None:
    other, log = write_workload(tmp_path / "other.jsonl", {}), tmp_path / "log"
    also = '"also": {"other": {"output_tokens_per_s": 7, "decode_tokens_per_s": 8}}'
    entry = f"x int8 = cmd:echo {{common}} >> {log}; echo '{{\"output_tokens_per_s\": 2, {also}}}'"
    [found] = figures(main, *common, entry, "--also", other, "--rounds", "1")["entries"]
    assert found["name"] == "x int8"
    assert [found["workloads"][name]["output_tokens_per_s"] for name in ("work", "other")] == [2, 7]
    assert found["workloads"]["other"]["decode_tokens_per_s"] == 8
    assert f"--threads 1 --also {other}" in log.read_text()


def test_an_entry_that_fails_is_left_out_and_told(common: list[str], figures: Figures) -> None:
    entries = ["cmd:echo '{\"output_tokens_per_s\": 2}'", "cmd:exit 3"]
    first, second = figures(main, *common, "--rounds", "2", *entries, status=1)["entries"]
    assert (first["failure"], first["workloads"]["work"]["ratio"]) == (None, 1.0)
    assert (second["failure"], second["workloads"]["work"]["ratio"]) == ("the command ended with status 3", None)


def test_llama_cpp_is_asked_for_the_workloads_sizes_and_its_times_become_figures(
    tmp_path: Path, figures: Figures
) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/log\necho chatter\necho '{json.dumps(LINE)}'\n")
    program.chmod(0o755)
    workload = write_workload(tmp_path / "decode_2.jsonl", *[{"prompt_token_ids": [7] * 16}] * 2)
    options = ["--model", "m.gguf", "--workload", workload, "--threads", "2", "--repeat", "1"]
    options += ["--program", f"env NAME=value {program}"]
    found = figures(engines.main, "llama-cpp", *options)
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("-c 40 -npp 16 -ntg 4 -npl 2")
    assert found["prompt_tokens_per_s"] == 2 * 16 / 0.5
    assert found["decode_tokens_per_s"] == pytest.approx(2 * 4 / 2.0)
    assert found["seconds"] == 0.5 + 3 * 0.5  # the first token comes with the prompts, three steps follow
