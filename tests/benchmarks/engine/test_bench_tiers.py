"""The command on the bundled model with a handful of tokens."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine import tiers
from tests.benchmarks.conftest import Figures


def test_what_was_evicted_is_read_and_the_answers_are_the_same(
    demo_path: Path, tiny_workload: Path, tmp_path: Path, figures: Figures
) -> None:
    sizes = ["--rounds", "1", "--prompt", "80", "--talks", "3", "--turns", "2", "--beginning", "40", "--share", "2"]
    options = ["--model", demo_path, "--dtype", "fp32", "--folder", tmp_path / "kv", "--workload", tiny_workload]
    found = figures(tiers.main, *options, *sizes)
    assert set(found) >= {"again", "talks", "workload", "cpu", "commit"}
    assert found["again"]["restarted_s"]["median"] > 0
    assert found["talks"]["cached_with"]["median"] >= found["talks"]["cached_without"]["median"]
    assert not (tmp_path / "kv").exists()
