"""How a process of ours runs one of our modules in another."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def child_command(module: str, *arguments: str) -> list[str]:
    """A command that runs one of our modules in another process."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """The environment of that process: it finds our code in every working directory."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def step_back() -> None:
    """Have the calling thread leave the cores to those that serve requests; where threads share one, the process.

    To a niceness of 10, or by some steps where it has more: Ray's workers may be at 15, and only root may go back. A
    process that such a thread has started is there already.
    """
    niceness, least_steps = 10, 4
    steps = niceness - os.nice(0)
    if steps != 0:
        os.nice(max(steps, least_steps))


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread ends that started it, even while it is stopped.

    parent: the process of that thread; where it has ended before, this one ends at once. Only Linux has it.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has ended already")
