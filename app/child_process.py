"""How a process of ours runs one of our modules in another."""

from __future__ import annotations

import os
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

    By so much from where it is: Ray's workers have been stepped back by 15, and only root may come nearer.
    """
    niceness = 10
    os.nice(niceness)
