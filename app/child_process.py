"""Commands, environment and priorities for child processes that run a module of Carousel."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def child_command(module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module of Carousel in another process. Needs `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process can import Carousel from any working directory."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def lower_priority() -> None:
    """Lower the CPU priority of the calling thread, or of the process on systems where all threads share a priority.

    The system then prefers threads that serve requests. The niceness becomes 10, or rises by 4 if it is above 10, as in
    Ray's workers, because only root may lower a niceness. Child processes inherit the niceness.
    """
    niceness, least_steps = 10, 4
    steps = niceness - os.nice(0)
    if steps != 0:
        os.nice(max(steps, least_steps))


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `by` when the thread that started it ends. Linux only.

    The signal arrives even while this process is stopped. `parent` is the id of the process that started this one.
    Raises SystemExit if that process has already ended.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has ended already")
