"""Sets up logging, garbage collection and malloc in the processes that run inside Serve."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from pathlib import Path

# Parameters of glibc's mallopt(3). When large blocks are freed, glibc raises the size from which a block gets its own
# mapping, up to 32 MiB. Request bodies then lie between small blocks, so their memory cannot return to the system.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
# Bodies of many small values leave free blocks between other blocks. Returning free blocks takes a thread some 5 ms.
TRIM_EVERY_S = 5.0
# Seconds between collections of new objects, and minimum seconds between collections of all objects.
COLLECT_EVERY_S, COLLECT_ALL_EVERY_S = 0.25, 60.0


def log_where_serve_does() -> None:
    """Send the log records of `app` and `deployments` to Serve's handlers, at Serve's level.

    Otherwise Ray drops records below WARNING and writes the other records to the worker's stderr, not to Serve's files.
    """
    serves = logging.getLogger("ray.serve")
    for room in ("app", "deployments"):
        ours = logging.getLogger(room)
        # In throughput mode Serve buffers a thousand lines. Our few lines bypass the buffer to appear at once.
        ours.handlers = [getattr(handler, "target", None) or handler for handler in serves.handlers]
        ours.setLevel(serves.getEffectiveLevel())
        ours.propagate = False


def collect_later() -> None:
    """Disable collections before loading, because loading creates no garbage. Call `freeze_loaded` after loading."""
    gc.disable()


def freeze_loaded() -> None:
    """Exclude all loaded objects from later collections. Call this function once everything is loaded."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # Python's default of 700 makes the collector visit the objects of requests in flight. A request that has ended
    # leaves no cycles, except for a small one of Ray Serve's if its client has gone.
    allocations_between = 5_000
    gc.set_threshold(allocations_between)


def collect_in_pieces() -> None:
    """Keep collections short in a process with thousands of requests in flight. Call after `freeze_loaded`.

    Every token creates a few objects for its stream. Python starts a collection when it has created many more objects
    than it has freed. Python therefore collects seldom while streams run, and a collection visits the new objects of
    all streams: when many requests arrive or move at once, a collection takes 0.1 s with 20,000 streams, and 0.4 s if
    the collection visits all objects. A thread replaces Python's schedule. The thread collects new objects often, so
    there are never many. The thread collects all objects when few streams run, or after ten minutes.

    Finalizers of garbage run in the thread that collects, as with Python's own collections, which run in any thread.
    That is safe: tasks and futures only log, asyncio has the event loop close asynchronous generators, and tasks that
    wait and transports that are open are never garbage, because their owners keep them.
    """
    gc.disable()
    threading.Thread(target=_keep_collected, name="collections", daemon=True).start()


def _keep_collected() -> None:
    """Collect new objects every `COLLECT_EVERY_S`, and all objects seldom."""
    most_share = 0.001  # maximum share of the time for collections of all objects
    quiet_s = 0.005  # a collection of new objects takes less time while few streams run
    lately_s = 0.0  # seconds of the longest recent collection of new objects; decays within seconds
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
    """Make glibc return the memory of large request bodies to the system. Call before all other work.

    Without glibc 2.33 or later, the function does nothing. Call the function only in processes that read request
    bodies: in a process that computes, tensors are the large blocks, and mapping each tensor costs time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    mmapped_from_bytes = 256 * 1024
    libc.mallopt(_M_MMAP_THRESHOLD, mmapped_from_bytes)
    max_arenas = 2  # glibc's default is eight for each core, and each thread leaves free memory in its own arena
    libc.mallopt(_M_ARENA_MAX, max_arenas)
    libc.mallinfo2.restype = _MallocInfo
    threading.Thread(target=_keep_trimmed, args=(libc,), name="memory", daemon=True).start()


def _keep_trimmed(libc: ctypes.CDLL) -> None:
    """Return freed memory to the system each time the freed memory has grown by 16 MiB. Memory in use causes no trim.

    The bytes that a trim leaves raise the level only after the next trim has left them as well: the first trim may have
    run just before the process freed these bytes.
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
    """Return the resident bytes minus the bytes that malloc has given out, in arenas and in separate mappings.

    The resident bytes are read first, so that memory given out between the two reads does not count as free.
    """
    resident = _resident_bytes()
    info = libc.mallinfo2()
    return resident - int(info.uordblks + info.hblkhd)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
