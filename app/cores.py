"""How many cores and how much memory this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**63


def num_cores() -> int:
    """Those of its affinity, or fewer where its control groups grant less CPU time: whole cores of it, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = granted_cores(_own_groups(), _ROOT)
    return allowed if math.isinf(granted) else max(1, min(allowed, int(granted)))


def granted_cores(groups: str, root: Path) -> float:
    """The least quota of some control groups and of those above them; infinity without one.

    groups: as in /proc/self/cgroup. root: where the groups are mounted, version 1 or 2. In a container the names may be
    those outside it, of which only the root is mounted.
    """
    return min(map(_quota, _folders(groups, root, "cpu")), default=math.inf)


def memory_of_machine() -> int:
    """Bytes: those of the machine, or fewer where a control group of this process grants less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, granted_memory(_own_groups(), _ROOT))


def granted_memory(groups: str, root: Path) -> int:
    """The least limit of some control groups and of those above them, in bytes; arguments as of `granted_cores`."""
    return int(min(map(_limit, _folders(groups, root, "memory")), default=_NO_LIMIT))


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _folders(groups: str, root: Path, controller: str) -> Iterator[Path]:
    """Those of the groups that have a controller, and those above them."""
    for line in groups.splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = root if number == "0" else root / controller
        own = top / name.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _limit(folder: Path) -> int:
    """Of memory, in bytes."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # `max` is no number
            continue
    return _NO_LIMIT


def _quota(folder: Path) -> float:
    """In cores."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # `max` in version 2 is infinity too, but no number
        return math.inf
