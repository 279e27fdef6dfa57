"""Finds the cores and memory that this process may use, and the cores that share a cache."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SYSTEM = Path("/sys/devices/system")
_NO_LIMIT = 2**63


def num_cores() -> int:
    """Return the number of cores that this thread may use, or fewer if its control groups grant less CPU time.

    Fractions are rounded up, because two threads on 1.1 cores are faster than one (docs/results/engine.md).
    """
    allowed = len(allowed_cpus())
    granted = granted_cores(_own_groups(), _ROOT)
    return allowed if math.isinf(granted) else max(1, min(allowed, math.ceil(granted)))


def allowed_cpus() -> set[int]:
    """Return the CPUs on which this thread may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def granted_cores(groups: str, root: Path) -> float:
    """Return the smallest CPU quota, in cores, among control groups and their parents, or infinity without a quota.

    `groups` has the format of /proc/self/cgroup. `root` is the folder where the groups (version 1 or 2) are mounted. In
    a container, only the root group may be mounted, while the names refer to groups outside the container.
    """
    return min(map(_quota, _folders(groups, root, "cpu")), default=math.inf)


@dataclass(frozen=True, slots=True)
class NearCpus:
    """CPUs that share an L3 cache, and the NUMA node that holds their memory."""

    node: int
    cpus: frozenset[int]  # Linux's CPU numbers


def near_cpus(allowed: Collection[int], system: Path = _SYSTEM) -> list[NearCpus]:
    """Group the allowed CPUs by L3 cache, sorted by NUMA node. CPUs without a known cache are grouped by node."""
    nodes = _nodes(system)
    found: dict[int, dict[int, set[int]]] = {}  # by node, then by the first CPU that shares the cache
    for cpu in sorted(allowed):
        of_node = found.setdefault(nodes.get(cpu, 0), {})
        of_node.setdefault(min(_sharing_cache(cpu, system), default=-1), set()).add(cpu)
    return [NearCpus(node, frozenset(cpus)) for node, caches in sorted(found.items()) for cpus in _true_groups(caches)]


def _true_groups(caches: Mapping[int, set[int]]) -> list[set[int]]:
    """Merge all groups if any has fewer than 4 CPUs, because many virtual machines wrongly report a cache per CPU."""
    least_cpus = 4
    groups = list(caches.values())
    return groups if min(map(len, groups)) >= least_cpus else [set().union(*groups)]


def share_of_cpus(index: int, number: int, groups: Sequence[NearCpus]) -> list[NearCpus]:
    """Return the groups for engine `index` of `number`: one if it is large enough, or those in the engine's share."""
    ends = list(accumulate(len(each.cpus) for each in groups))
    begin, end = index * ends[-1] / number, (index + 1) * ends[-1] / number
    middle = next(each for each, last in zip(groups, ends, strict=True) if (begin + end) / 2 < last)
    if number >= len(groups) and len(middle.cpus) >= ends[-1] // number:
        return [middle]
    return [each for each, last in zip(groups, ends, strict=True) if begin < last and last - len(each.cpus) < end]


def numa_nodes_of_thread() -> str:
    """Return the NUMA nodes of this thread's CPUs, such as `0+1`, or "" if these are all of the machine's nodes."""
    nodes = _nodes(_SYSTEM)
    own = {nodes.get(cpu, 0) for cpu in allowed_cpus()}
    return "" if own >= set(nodes.values()) else "+".join(map(str, sorted(own)))


def _nodes(system: Path) -> dict[int, int]:
    """Return each CPU's NUMA node. Nodes without CPUs are omitted."""
    return {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _numbers(folder / "cpulist")
    }


def _sharing_cache(cpu: int, system: Path) -> set[int]:
    """Return the CPUs that share the L3 cache of `cpu`, or an empty set if Linux reports no L3 cache."""
    last_level = 3
    for folder in system.glob(f"cpu/cpu{cpu}/cache/index[0-9]*"):
        if _numbers(folder / "level") == [last_level]:
            return set(_numbers(folder / "shared_cpu_list"))
    return set()


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file with a list such as `0-3,8`, or an empty list if the file cannot be read."""
    try:
        return _numbers_of(path.read_text())
    except OSError:
        return []


def _numbers_of(ranges: str) -> list[int]:
    found = re.findall(r"(\d+)(?:-(\d+))?", ranges)
    return [number for first, last in found for number in range(int(first), int(last or first) + 1)]


def memory_of_machine() -> int:
    """Return the machine's memory in bytes, or less if one of this process's control groups grants less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, granted_memory(_own_groups(), _ROOT))


def granted_memory(groups: str, root: Path) -> int:
    """Return the smallest memory limit, in bytes, among control groups and their parents (see `granted_cores`)."""
    return int(min(map(_limit, _folders(groups, root, "memory")), default=_NO_LIMIT))


def available_memory() -> int | None:
    """Return how many bytes this process can allocate now without swapping or being killed, or None if unknown.

    This is Linux's estimate for the machine, or less if one of this process's control groups has less left.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    of_machine = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return None if of_machine is None else min(of_machine, memory_left(_own_groups(), _ROOT))


def memory_left(groups: str, root: Path) -> int:
    """Return how many bytes are left below the memory limits of control groups and parents (see `granted_cores`)."""
    folders = _folders(groups, root, "memory")
    return int(min((_limit(each) - _used(each) for each in folders if _limit(each) < _NO_LIMIT), default=_NO_LIMIT))


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _folders(groups: str, root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that use the controller, and of their parents."""
    for line in groups.splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = root if number == "0" else root / controller
        own = top / name.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _limit(folder: Path) -> int:
    """Return a group's memory limit in bytes, or `_NO_LIMIT` without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # the file contains `max` if the group has no limit
            continue
    return _NO_LIMIT


def _used(folder: Path) -> int:
    """Return a group's used memory in bytes, excluding inactive file pages, which Linux frees under pressure."""
    for usage, inactive in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        try:
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, int((folder / usage).read_text()) - int(counts.get(inactive, 0)))
        except (OSError, ValueError):
            continue
    return 0


def _quota(folder: Path) -> float:
    """Return a group's CPU quota in cores, or infinity without one."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # in version 2, the file contains `max` if the group has no quota
        return math.inf
