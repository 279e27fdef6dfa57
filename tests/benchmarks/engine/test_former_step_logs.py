"""Step logs of former versions are replayed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.engine.replay import replay


@pytest.mark.parametrize("strategy", ["static", "dynamic", "bucketed", "sorted", "adaptive"])
def test_logs_with_the_former_batch_size_are_replayed(strategy: str, tmp_path: Path) -> None:
    """765673a recorded them: 20 requests on the bundled model, with `batch_size` 4 and `max_running` 8."""
    with tarfile.open(Path(__file__).with_name("step_logs_of_765673a.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    outcome = replay(str(tmp_path / strategy), simulated=True)
    assert (outcome.divergence, outcome.num_requests) == (None, 20)
