"""Creates a small file system in memory, and fills a file system."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.command import BenchmarkError, ran


@contextmanager
def small_disk(size_mib: int) -> Iterator[Path]:
    """Yield a folder on a new file system in memory (0: a plain folder). Raises BenchmarkError if mounting fails."""
    with tempfile.TemporaryDirectory(prefix="carousel-disk-") as folder:
        if not size_mib:
            yield Path(folder)
            return
        try:
            ran(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder])
        except BenchmarkError as error:
            raise BenchmarkError(f"cannot mount a file system in memory: {error}; run as root on Linux") from error
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=False)


def fill(filler: Path) -> None:
    """Append to a file until its file system is full."""
    piece = bytes(1 << 20)
    with filler.open("ab", buffering=0) as file:
        while piece:
            try:
                file.write(piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece = piece[: len(piece) // 2]
