"""The most memory that this process has while something runs, whatever library takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Peak:
    """`grown_bytes`: the most resident memory while a block ran, less what there was before. Known behind the block."""

    grown_bytes = 0


@contextmanager
def peak_of_memory() -> Iterator[Peak]:
    """The peak of the block. Linux keeps one for a process, which this sets back."""
    peak = Peak()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    yield peak
    peak.grown_bytes = resident_bytes("VmHWM") - before


def resident_bytes(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) * 1024
