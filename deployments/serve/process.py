"""What every process of ours sets up in Serve: where it logs, and how its memory stays level."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from pathlib import Path

# glibc's mallopt(3). By itself it raises the size from which a block is mapped alone up to 32 MiB, as large blocks are
# freed. Then the bodies of requests lie between small blocks, and what they leave cannot go back to the system.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
# Bodies of many small values leave free blocks between others. To give those back takes some 5 ms of a thread.
TRIM_EVERY_S = 5.0
# Seconds between collections of new objects, and at least between collections of all objects.
COLLECT_EVERY_S, COLLECT_ALL_EVERY_S = 0.25, 60.0


def log_where_serve_does() -> None:
    """Send what `app` and `deployments` log in this process to Serve's handlers, at Serve's level.

    Without it Ray drops what is below a warning and sends the rest to the worker's stderr, far from Serve's files.
    """
    serves = logging.getLogger("ray.serve")
    for room in ("app", "deployments"):
        ours = logging.getLogger(room)
        # In throughput mode Serve holds a thousand lines back; ours are few and wanted at once.
        ours.handlers = [getattr(handler, "target", None) or handler for handler in serves.handlers]
        ours.setLevel(serves.getEffectiveLevel())
        ours.propagate = False


def collect_later() -> None:
    """Call it before anything is loaded, and `freeze_loaded` after: collections would free nothing meanwhile."""
    gc.disable()


def freeze_loaded() -> None:
    """Call it when everything is loaded: it stays, and no later collection looks at it."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # Python's 700 has the collector look at what requests in flight have. A request that has ended leaves no cycles but
    # a small one of Ray Serve's, where its client has gone.
    allocations_between = 5_000
    gc.set_threshold(allocations_between)


def collect_in_pieces() -> None:
    """Keep collections short in a process with thousands of requests in flight. Call it after `freeze_loaded`.

    Every token makes a handful of new objects for its stream. Python collects when it has made more objects than it has
    freed. So it seldom collects while streams go on, and a collection then looks at the new objects of all streams:
    when many requests come or move at once, it takes 0.1 s with 20,000 streams, and 0.4 s if it looks at all objects.
    This function replaces Python's own moments. New objects are collected often, so there are never many. All objects
    are collected when few streams go on, or after ten minutes.

    Finalizers of garbage run in the thread that collects, as with Python's own collections, which run in any thread.
    That is safe: tasks and futures only log, asyncio has the event loop close asynchronous generators, and tasks that
    wait and transports that are open are never garbage, because their owners keep them.
    """
    gc.disable()
    threading.Thread(target=_keep_collected, name="collections", daemon=True).start()


def _keep_collected() -> None:
    """Collect new objects often, and all objects seldom."""
    most_share = 0.001  # of the time, for collections of all objects
    quiet_s = 0.005  # A collection of new objects takes less while few streams go on.
    lately_s = 0.0  # the longest collection of new objects, fading within seconds
    all_at = time.monotonic() + COLLECT_ALL_EVERY_S
    while True:
        time.sleep(COLLECT_EVERY_S)
        began = time.monotonic()
        gc.collect(0)
        ended = time.monotonic()
        lately_s = max(0.9 * lately_s, ended - began)
        longer_s = 0.0 if lately_s < quiet_s else 9 * COLLECT_ALL_EVERY_S
        if ended >= all_at + longer_s:
            began = ended
            gc.collect()
            ended = time.monotonic()
            all_at = ended + max(COLLECT_ALL_EVERY_S, (ended - began) / most_share)


def return_freed_memory() -> None:
    """Call it first: what large bodies took goes back to the system when they are done.

    It does nothing without glibc 2.33 or later. For processes that read bodies; in one that computes, tensors are the
    large blocks, and to map them costs time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    mmapped_from_bytes = 256 * 1024
    libc.mallopt(_M_MMAP_THRESHOLD, mmapped_from_bytes)
    max_arenas = 2  # else eight for each core: every thread leaves free memory in its own
    libc.mallopt(_M_ARENA_MAX, max_arenas)
    libc.mallinfo2.restype = _MallocInfo
    threading.Thread(target=_keep_trimmed, args=(libc,), name="memory", daemon=True).start()


def _keep_trimmed(libc: ctypes.CDLL) -> None:
    """Freed memory goes back when it has grown by 16 MiB; memory in use, however much it is, causes no trim.

    What a trim leaves counts as kept when the next trim leaves it too. Until then it may have been freed just after.
    """
    rise_bytes = 16 * 2**20
    level = previous = 0
    while True:
        time.sleep(TRIM_EVERY_S)
        not_in_use = _bytes_not_in_use(libc)
        if not_in_use > level + rise_bytes:
            libc.malloc_trim(0)
            not_in_use = _bytes_not_in_use(libc)
            level = min(previous, not_in_use)
        else:
            level = min(level, not_in_use)
        previous = not_in_use


class _MallocInfo(ctypes.Structure):
    """glibc's mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _bytes_not_in_use(libc: ctypes.CDLL) -> int:
    """Resident, less what malloc has given out, in all arenas and in blocks that are mapped alone.

    Resident is read first: memory that is given out between the two must not count as free.
    """
    resident = _resident_bytes()
    info = libc.mallinfo2()
    return resident - int(info.uordblks + info.hblkhd)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
