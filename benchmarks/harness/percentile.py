"""Percentiles, interpolated between the two nearest samples as numpy does by default."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """The value that `percent` of 100 samples lie below; None when there are no samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
