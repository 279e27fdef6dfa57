"""Commands, environment and priorities for child processes that run one of Carousel's modules."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def child_command(module: str, *arguments: str) -> list[str]:
    """Return a command that runs one of Carousel's modules in another process."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process finds Carousel's code from every working directory."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def lower_priority() -> None:
    """Lower the CPU priority of the calling thread, or of the process on systems where all threads share a priority.

    Threads that serve requests then get the cores first. The niceness becomes 10, or rises by 4 if it is above 10, as
    in Ray's workers: only root may lower a niceness. Child processes inherit the niceness.
    """
    niceness, least_steps = 10, 4
    steps = niceness - os.nice(0)
    if steps != 0:
        os.nice(max(steps, least_steps))


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `by` when the thread that started this process ends. Linux only.

    The signal also arrives while this process is stopped. `parent` is the id of the process that started this one.
    Raises SystemExit if the parent has ended already.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has ended already")
