"""What a benchmark says when it cannot be run as asked."""

from __future__ import annotations

import sys


class BenchmarkError(Exception):
    """A mistake in a workload, an option or a setting: one sentence for the person at the keyboard."""


def refused(error: Exception) -> int:
    """Tell the mistake on stderr; returns the exit status that stands for it."""
    print(f"error: {error}", file=sys.stderr)
    return 2
