"""What a benchmark says when it cannot be run as asked."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A mistake in a workload, an option or a setting: one sentence for the person at the keyboard."""
