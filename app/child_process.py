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
    """Have this process leave the cores to those that serve requests."""
    niceness = 10
    os.nice(niceness)
