"""The hardware and the versions behind a figure. Unknown values are None.

torch is imported only for questions about a GPU: a client that measures a service does not need torch.
"""

from __future__ import annotations

import os
import platform
import resource
import tomllib
from pathlib import Path

import app.versions
from benchmarks.harness.processes import family

PROJECT = Path(__file__).resolve().parent.parent.parent


def environment(tree: Path = PROJECT) -> dict[str, str]:
    """Return the environment of this process, changed so that Python finds the modules of a checkout first."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def versions() -> dict[str, str | None]:
    """Return the versions that the service reports. Carousel's comes from the checkout, which may not be installed."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return app.versions.versions() | {"carousel": str(project["version"])}


def cpu_name() -> str | None:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or None


def gpu_name(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name()


def seconds_since_start() -> float | None:
    """Return the seconds since the start of this process, including imports."""
    uptime, stat = _lines(Path("/proc/uptime")), _lines(Path("/proc/self/stat"))
    if not uptime or not stat:
        return None
    started_ticks = int(stat[0].rpartition(")")[2].split()[19])
    return float(uptime[0].split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Return the CPU seconds of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_mb() -> int | None:
    """Return the sum of the peak resident sizes of this process and its living descendants, in MiB."""
    lines = [line for pid in family(os.getpid()) for line in _lines(Path(f"/proc/{pid}/status"))]
    peaks_kb = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return sum(peaks_kb) // 1024 if peaks_kb else None


def peak_device_mb(device: str) -> int | None:
    """Return the peak of the memory that torch allocated on the GPU for this process, in MiB."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated() // 2**20


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
