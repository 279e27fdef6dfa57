"""Finds the versions of the packages that affect which tokens are drawn, and the commit of Carousel's code."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

_PROJECT = Path(__file__).resolve().parent.parent


@cache
def versions() -> dict[str, str | None]:
    """Return the installed versions by package. The version of a missing package is None."""
    return {"python": python_version()} | {
        name: _version(name) for name in ("carousel", "torch", "transformers", "triton", "llguidance")
    }


def commit() -> str | None:
    """Return this code's commit, with `-dirty` if tracked files were changed, or None outside a git checkout."""
    command = ("git", "--no-optional-locks", "-C", str(_PROJECT), "describe", "--always", "--dirty", "--abbrev=40")
    try:
        done = subprocess.run((*command, "--exclude", "*"), capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
