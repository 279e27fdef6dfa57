"""Where a figure was measured: the hardware, the versions, the commit. What is unknown is None.

torch is imported only where a GPU is asked about: a client that measures a service does without it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PROJECT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str | None]:
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "carousel": str(project["version"]),
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
        "python": platform.python_version(),
    }


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


def commit() -> str | None:
    """The checkout's commit, with `-dirty` behind it when tracked files differ from it."""
    command = ["git", "--no-optional-locks", "-C", str(_PROJECT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude", "*"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def seconds_since_start() -> float | None:
    """How long ago this process was started, imports and all."""
    uptime, stat = _lines(Path("/proc/uptime")), _lines(Path("/proc/self/stat"))
    if not uptime or not stat:
        return None
    started_ticks = int(stat[0].rpartition(")")[2].split()[19])
    return float(uptime[0].split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_mb() -> int | None:
    """The peak resident sizes of this process and of its living descendants, added up, in MiB."""
    parents: dict[int, int] = {}
    peaks_kb: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = dict(line.split(":", 1) for line in _lines(folder / "status") if ":" in line)
        if "VmHWM" in fields:
            parents[int(folder.name)] = int(fields["PPid"])
            peaks_kb[int(folder.name)] = int(fields["VmHWM"].split()[0])
    ours = [process for process in parents if _descends(process, os.getpid(), parents)]
    return sum(peaks_kb[process] for process in ours) // 1024 if ours else None


def peak_device_mb(device: str) -> int | None:
    """The most this process had allocated on the GPU, in MiB."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated() // 2**20


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _descends(process: int | None, ancestor: int, parents: dict[int, int]) -> bool:
    while process is not None and process != ancestor:
        process = parents.get(process)
    return process == ancestor


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
