"""Commands, environments and priorities for child processes that run one of Carousel's modules."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def child_command(module: str, *arguments: str) -> list[str]:
    """Return a command that runs one of Carousel's modules. It requires the environment of `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process can import Carousel from any working directory."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def lower_priority() -> None:
    """Lower the CPU priority of the calling thread, or of the process on systems where all threads share a priority.

    The system then prefers threads that serve requests. The niceness becomes 10. If it is already above 10, as in Ray's
    workers, it rises by 4, because only root may lower it. Child processes inherit the niceness.
    """
    niceness, least_steps = 10, 4
    steps = niceness - os.nice(0)
    if steps != 0:
        os.nice(max(steps, least_steps))


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `by` when the thread that started it ends. Linux only.

    By default, this kills the process even while it is stopped. `parent` is the id of the process that started this
    one. Raises SystemExit if the parent has already ended.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has already ended")
