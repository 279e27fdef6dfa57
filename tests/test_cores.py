from __future__ import annotations

import math
from pathlib import Path

import pytest

from app import cores
from app.cores import granted_cores, num_cores


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


@pytest.mark.parametrize(("granted", "found"), [(0.5, 1), (1.9, 1), (64.0, 3), (math.inf, 3)])
def test_cores_are_those_of_the_affinity_or_of_the_quota(
    granted: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {1, 4, 6})
    monkeypatch.setattr(cores, "granted_cores", lambda *_: granted)
    assert num_cores() == found
