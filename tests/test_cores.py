from __future__ import annotations

import math
from itertools import chain, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import cores
from app.cores import (
    NearCpus,
    available_memory,
    granted_cores,
    memory_left,
    near_cpus,
    num_cores,
    numa_nodes_of_thread,
    share_of_cpus,
)


def write(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text + "\n")


def test_the_least_quota_of_a_group_and_of_those_above_it_counts(tmp_path: Path) -> None:
    write(tmp_path, "pods", cpu__max="250000 100000")
    write(tmp_path, "pods/one", cpu__max="max 100000")
    write(tmp_path, "pods/two", cpu__max="150000 100000")
    assert granted_cores("0::/pods/one\n", tmp_path) == 2.5
    assert granted_cores("0::/pods/two\n", tmp_path) == 1.5
    assert granted_cores("0::/elsewhere\n", tmp_path) == math.inf


def test_in_a_container_only_the_root_is_mounted(tmp_path: Path) -> None:
    write(tmp_path, "", cpu__max="400000 100000")
    assert granted_cores("0::/docker/0123\n", tmp_path) == 4


def test_version_1_has_two_files_and_minus_one_for_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path, "cpu/job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    groups = "5:memory:/job\n4:cpu,cpuacct:/{}\n"
    assert granted_cores(groups.format("job"), tmp_path) == 3
    assert granted_cores(groups.format("other"), tmp_path) == math.inf


def test_memory_that_is_left_is_that_of_the_fullest_group(tmp_path: Path) -> None:
    write(tmp_path, "pods", memory__max="1000", memory__current="700", memory__stat="anon 600\ninactive_file 50")
    write(tmp_path, "pods/one", memory__max="max", memory__current="600")
    write(tmp_path, "pods/two", memory__max="300", memory__current="100", memory__stat="anon 100")
    assert memory_left("0::/pods/one\n", tmp_path) == 350, "pages of files that nobody uses are given back"
    assert memory_left("0::/pods/two\n", tmp_path) == 200
    assert memory_left("0::/elsewhere\n", tmp_path) == memory_left("", tmp_path) == 2**63


def test_memory_that_is_left_in_version_1(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": "1000", "memory__usage_in_bytes": "900"}
    write(tmp_path, "memory/job", **files, memory__stat="inactive_file 1\ntotal_inactive_file 300")
    assert memory_left("5:memory:/job\n", tmp_path) == 400


def test_available_memory_is_what_the_machine_and_the_groups_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "memory_left", lambda *_: 2**60)
    of_machine = available_memory()
    assert of_machine is not None
    assert 0 < of_machine < 2**60
    monkeypatch.setattr(cores, "memory_left", lambda *_: 5)
    assert available_memory() == 5


@pytest.mark.parametrize(("granted", "found"), [(0.5, 1), (1.0, 1), (1.1, 2), (64.0, 3), (math.inf, 3)])
def test_cores_are_those_of_the_affinity_or_of_the_quota(
    granted: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {1, 4, 6})
    monkeypatch.setattr(cores, "granted_cores", lambda *_: granted)
    assert num_cores() == found


def machine(root: Path, *caches: tuple[int, str]) -> Path:
    """A /sys/devices/system with CPUs by their last-level cache and its NUMA node, each list as Linux writes it."""
    nodes: dict[int, list[str]] = {}
    for node, cpus in caches:
        nodes.setdefault(node, []).append(cpus)
        for cpu in cores._numbers_of(cpus):
            write(root, f"cpu/cpu{cpu}/cache/index0", level="1", shared_cpu_list=str(cpu))
            write(root, f"cpu/cpu{cpu}/cache/index3", level="3", shared_cpu_list=cpus)
    for node, lists in nodes.items():
        write(root, f"node/node{node}", cpulist=",".join(lists))
    return root


def shares(number: int, groups: list[NearCpus]) -> list[list[int]]:
    return [sorted(chain.from_iterable(each.cpus for each in share_of_cpus(index, number, groups)))
            for index in range(number)]  # fmt: skip


def test_two_sockets_with_hyperthreads_are_two_groups(tmp_path: Path) -> None:
    system = machine(tmp_path, (0, "0-3,8-11"), (1, "4-7,12-15"))
    groups = near_cpus(range(16), system)
    assert [(each.node, sorted(each.cpus)) for each in groups] == [
        (0, [0, 1, 2, 3, 8, 9, 10, 11]), (1, [4, 5, 6, 7, 12, 13, 14, 15])
    ]  # fmt: skip
    assert shares(2, groups) == [sorted(each.cpus) for each in groups]
    assert shares(4, groups) == [sorted(groups[index // 2].cpus) for index in range(4)]
    assert shares(3, groups) == [sorted(groups[index].cpus) for index in (0, 1, 1)]
    assert shares(1, groups) == [list(range(16))]


def test_a_node_with_several_caches_is_shared_by_whole_caches(tmp_path: Path) -> None:
    system = machine(tmp_path, (0, "0-3"), (0, "4-7"), (0, "8-11"), (0, "12-15"))
    groups = near_cpus(range(16), system)
    assert shares(2, groups) == [[*range(8)], [*range(8, 16)]]
    assert shares(3, groups) == [[*range(8)], [*range(4, 12)], [*range(8, 16)]], "of caches in which a share lies"


def test_only_cpus_of_this_process_count(tmp_path: Path) -> None:
    """As in a container with a cpuset."""
    groups = near_cpus({2, 3, 9}, machine(tmp_path, (0, "0-3"), (1, "4-7"), (1, "8-11")))
    assert groups == [NearCpus(0, frozenset({2, 3})), NearCpus(1, frozenset({9}))]


@pytest.mark.parametrize("caches", ["0", "0-1"])
def test_caches_of_a_virtual_machine_that_no_cpu_has_are_not_believed(caches: str, tmp_path: Path) -> None:
    """A hypervisor's default: each CPU is a socket."""
    size = len(cores._numbers_of(caches))
    system = machine(tmp_path, *((0, f"{first}-{first + size - 1}") for first in range(0, 8, size)))
    assert near_cpus(range(8), system) == [NearCpus(0, frozenset(range(8)))]


def test_what_linux_does_not_say_is_one_group(tmp_path: Path) -> None:
    assert near_cpus({0, 1, 5}, tmp_path) == [NearCpus(0, frozenset({0, 1, 5}))]
    write(tmp_path, "node/node0", cpulist="0-5")
    assert near_cpus({0, 1, 5}, tmp_path) == [NearCpus(0, frozenset({0, 1, 5}))]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), number=st.integers(1, 20))
def test_every_engine_has_its_share_and_of_equal_groups_no_more_than_one(sizes: list[int], number: int) -> None:
    cpus = iter(range(sum(sizes)))
    groups = [NearCpus(0, frozenset(islice(cpus, size))) for size in sizes]
    found = [share_of_cpus(index, number, groups) for index in range(number)]
    assert all(sum(len(group.cpus) for group in each) >= sum(sizes) // number for each in found)
    if number < len(groups):
        assert {group for each in found for group in each} == set(groups)
    elif len(set(sizes)) == 1:
        assert all(len(each) == 1 for each in found)


def test_weights_are_shared_within_the_nodes_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_SYSTEM", machine(tmp_path, (0, "0-3"), (1, "4-7"), (2, "8-11")))
    for allowed, nodes in (({1}, "0"), ({3, 4, 5}, "0+1"), (range(12), "")):
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _, allowed=allowed: set(allowed))
        assert numa_nodes_of_thread() == nodes
