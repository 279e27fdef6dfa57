from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.build import ONE_DEVICE
from app.config import ApplicationConfig, EngineConfig, ModelConfig, ReplicasConfig
from app.cores import NearCpus
from app.errors import InvalidSetup
from deployments import threads
from deployments.serve.settings import requested_threads
from deployments.threads import excess, pin_to_near_cpus, with_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 8)


def asked(*models: dict[str, Any]) -> list[int | None]:
    named = [{"name": f"m{number}", **model} for number, model in enumerate(models)]
    return requested_threads(ApplicationConfig.model_validate({"models": named}))


def num_threads(asked: list[int | None], *, own: int | None = None) -> int | None:
    return with_threads(EngineConfig(model=ModelConfig(num_threads=own)), asked).model.num_threads


@pytest.mark.parametrize(("num_replicas", "share"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_replicas_share_the_cores(num_replicas: int, share: int) -> None:
    assert num_threads(asked({"replicas": {"num_replicas": num_replicas}})) == share


def test_all_engines_that_there_can_be_are_counted() -> None:
    growing = {"replicas": {"autoscaling": {"max_replicas": 3}}}
    simulated = {"engine": {"model": {"simulated": {}}}, "replicas": {"num_replicas": 9}}
    everything = asked(growing, {"replicas": {"num_replicas": 1}}, simulated)
    assert everything == [None] * 4
    assert num_threads(everything) == 2


def test_on_several_machines_they_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_num_machines", lambda: 2)
    assert num_threads([None] * 3) == 4
    assert excess([8, 8], 2) is None


def test_ranks_share_the_cores_as_engines_do_and_each_needs_one() -> None:
    of_four = asked({"replicas": {"num_replicas": 1, "tensor_parallel": 4}})
    assert with_threads(EngineConfig(), of_four, num_ranks=4).model.num_threads == 2
    with pytest.raises(InvalidSetup, match="tensor_parallel: got 9, but a replica may use only 8 CPU cores here"):
        with_threads(EngineConfig(), [None] * 9, num_ranks=9)


def test_a_number_that_is_set_is_kept_and_too_many_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert num_threads([4, 4], own=4) == 4
    assert not caplog.records
    assert num_threads([6, 6, None], own=6) == 6
    assert "3 engines with 14 threads in total on 8 cores" in caplog.text


def cpus_of_engines(number: int, asked: int, replicas: ReplicasConfig = ONE_DEVICE) -> list[set[int]]:
    """Where each of so many engines is, of threads that begin when it is there."""

    def engine() -> set[int]:
        pin_to_near_cpus([None] * asked, replicas)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(os.sched_getaffinity, 0).result()

    found = []
    for _ in range(number):
        with ThreadPoolExecutor(1) as thread:  # the CPUs of a thread end with it
            found.append(thread.submit(engine).result())
    return found


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The CPUs of this process as if they were on two NUMA nodes."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    nodes = [set(allowed[: len(allowed) // 2]), set(allowed[len(allowed) // 2 :])]
    monkeypatch.setattr(
        threads, "near_cpus", lambda _: [NearCpus(at, frozenset(each)) for at, each in enumerate(nodes)]
    )
    monkeypatch.setattr(threads, "cache_folder", lambda: tmp_path)
    return nodes


def test_each_replica_is_on_a_node_of_its_own_and_one_more_on_all(two_nodes: list[set[int]]) -> None:
    assert cpus_of_engines(3, asked=2) == [*two_nodes, two_nodes[0] | two_nodes[1]]


def test_one_replica_of_two_nodes_is_told_that_two_would_read_their_own_memory(
    two_nodes: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert cpus_of_engines(1, asked=1) == [two_nodes[0] | two_nodes[1]]
    assert "2 NUMA nodes but fewer replicas (1)" in caplog.text


@pytest.mark.parametrize("other", [{"num_gpus": 1}, {"tensor_parallel": 2}])
def test_engines_on_gpus_and_ranks_are_not_bound(two_nodes: list[set[int]], other: dict[str, int]) -> None:
    replicas = ReplicasConfig.model_validate(other)
    assert cpus_of_engines(1, 2, replicas) == [two_nodes[0] | two_nodes[1]]


def test_a_folder_that_cannot_be_written_binds_nothing(
    two_nodes: list[set[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cores").write_text("a file")
    assert cpus_of_engines(1, asked=2) == [two_nodes[0] | two_nodes[1]]
    assert "this replica uses all cores" in caplog.text
