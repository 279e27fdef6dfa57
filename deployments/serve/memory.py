"""How processes that serve requests keep their memory level."""

from __future__ import annotations

import ctypes
import gc

# Python's 700 has the collector look at what requests in flight have; a request that has ended leaves no cycles.
_ALLOCATIONS_BETWEEN = 5_000
# glibc's mallopt(3). By itself it raises the size from which a block is mapped alone up to 32 MiB, as large blocks are
# freed. Then the bodies of requests lie between small blocks, and what they leave cannot go back to the system.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MMAPPED_FROM_BYTES = 256 * 1024
_MAX_ARENAS = 2  # else eight for each core: every thread leaves free memory in its own


def freeze_loaded() -> None:
    """Call it when everything is loaded: it stays, and no later collection looks at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN)


def return_large_blocks() -> None:
    """Call it first: memory of large bodies goes back to the system when they are done. Without glibc it does nothing.

    For processes that read bodies; in one that computes, tensors are the large blocks, and to map them costs time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAPPED_FROM_BYTES)
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
