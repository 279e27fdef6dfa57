"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Those of its affinity, or fewer where its control groups grant less CPU time: whole cores of it, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    granted = granted_cores(groups, _ROOT)
    return allowed if math.isinf(granted) else max(1, min(allowed, int(granted)))


def granted_cores(groups: str, root: Path) -> float:
    """The least quota of some control groups and of those above them; infinity without one.

    groups: as in /proc/self/cgroup. root: where the groups are mounted, version 1 or 2. In a container the names may be
    those outside it, of which only the root is mounted.
    """
    granted = math.inf
    for line in groups.splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        top = root if number == "0" else root / "cpu"
        own = top / name.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                granted = min(granted, _quota(folder))
    return granted


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
