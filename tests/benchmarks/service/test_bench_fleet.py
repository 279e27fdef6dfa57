"""The fleet's figures, on answers made by hand and on one engine behind the real API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.answer import Answer
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import cpu_between, family
from benchmarks.harness.service import Service
from benchmarks.service import fleet
from benchmarks.service.fleet import Round, drive, figures_of
from tests.benchmarks.servers import simulated_service
from tests.waiting import eventually

OPTIONS = "--streams 6 --tokens 5 --prompt-tokens 4 --step-ms 10 --replicas 1 --rounds 2"


def answered(begun_s: float, *delivered_s: float, replica: str | None = "a") -> Answer:
    headers = {} if replica is None else {"x-carousel-replica": replica}
    return Answer(
        begun_s, [*delivered_s], begun_s=begun_s, status=200, headers=headers, num_pieces=len(delivered_s),
        is_done=True, ended_s=delivered_s[-1],
    )  # fmt: skip


def test_figures_are_what_is_added_to_the_step() -> None:
    done = Round([answered(1.0, 1.05, 1.06, 1.08), answered(1.0, 1.03, 1.04, 1.05)])
    figures = figures_of(
        [done], step_ms=10, num_replicas=2, cpu_s={"x": 0.0004, "y": 0.0002, "z": 0.0}, client_cpu_s=0.00006,
        idle_cpu_per_s=0.05, num_processes=3,
    )  # fmt: skip
    assert figures["tokens_per_s"] == pytest.approx(6 / 0.08)
    assert figures["cpu_us_per_token"] == 100.0
    assert figures["cpu_us_per_token_by_process"] == {"x": 66.7, "y": 33.3}
    assert figures["client_cpu_us_per_token"] == 10.0
    assert figures["added_ttft_p50_ms"] == pytest.approx(30.0)
    assert figures["added_itl_p99_ms"] == pytest.approx(9.7)
    assert figures["dispatch_imbalance"] == 2.0


def test_an_engine_behind_the_api_is_driven_to_the_last_token(demo_path: Path) -> None:
    with simulated_service(demo_path, step_ms=10) as url:
        running = Service(Target.parse(url), os.getpid())
        figures = drive(running, fleet._parser().parse_args(OPTIONS.split()), idle_s=0.1)
    assert len(figures["all_tokens_per_s"]) == 2
    assert 0 < figures["tokens_per_s"] < 6 * 5 / (5 * 0.01)
    assert figures["cpu_us_per_token"] > 0
    assert figures["added_ttft_p50_ms"] > 0
    assert figures["num_processes"] >= 1


def test_cpu_time_is_of_a_process_its_children_and_their_daemons() -> None:
    program = """
import subprocess, sys, time
daemon = "import time\\nend = time.process_time() + 0.15\\nwhile time.process_time() < end: pass\\ntime.sleep(30)"
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(flush=True)"
subprocess.run([sys.executable, "-c", middle, daemon], stdout=subprocess.DEVNULL)
print("ready", flush=True)
time.sleep(30)
"""
    root = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert root.stdout is not None
        root.stdout.readline()
        before = family(root.pid)
        assert len(before) == 2  # the daemon's parent is gone
        assert os.getpid() not in before
        eventually(lambda: sum(cpu_between({}, family(root.pid)).values()) >= 0.15)
    finally:
        for pid in family(root.pid):
            os.kill(pid, 9)
        root.communicate()
