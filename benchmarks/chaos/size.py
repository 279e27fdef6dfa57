"""How much of a fault: asked for on the command line, the same for all rows."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """`runs` faults in a row that repeats them, `streams` clients at once."""

    runs: int
    streams: int
    seed: int = 0

    def source(self, name: str) -> random.Random:
        """Random numbers of their own for each seed and name: when a fault comes, and whom it hits."""
        return random.Random(f"{self.seed} {name}")
