"""How processes that serve requests collect garbage."""

from __future__ import annotations

import gc

# Python's 700 has the collector look at what requests in flight have; a request that has ended leaves no cycles.
_ALLOCATIONS_BETWEEN = 5_000


def freeze_loaded() -> None:
    """Call it when everything is loaded: it stays, and no later collection looks at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN)
