"""Sets up logging, garbage collection and malloc in the processes that Serve runs."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from pathlib import Path

# Parameters of glibc's mallopt(3). Whenever a large block is freed, glibc raises the size above which blocks are mapped
# separately, up to 32 MiB. Request bodies are then allocated between small blocks, and their memory is never returned.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
# Bodies with many small values leave free blocks between blocks in use. It takes a thread about 5 ms to return these.
TRIM_EVERY_S = 5.0
# Seconds between collections of new objects, and the minimum between collections of all objects.
COLLECT_EVERY_S, COLLECT_ALL_EVERY_S = 0.25, 60.0


def log_where_serve_does() -> None:
    """Send the log records of `app` and `deployments` to Serve's handlers, at Serve's level.

    Otherwise, records below WARNING would be dropped, and other records written to the worker's stderr.
    """
    serves = logging.getLogger("ray.serve")
    for room in ("app", "deployments"):
        ours = logging.getLogger(room)
        # In throughput mode, Serve buffers a thousand lines. Our few lines bypass the buffer to appear immediately.
        ours.handlers = [getattr(handler, "target", None) or handler for handler in serves.handlers]
        ours.setLevel(serves.getEffectiveLevel())
        ours.propagate = False


def collect_later() -> None:
    """Disable garbage collection during loading, which creates no garbage. `freeze_loaded` enables it again."""
    gc.disable()


def freeze_loaded() -> None:
    """Exclude all current objects from later collections. Call once everything is loaded."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # With Python's default of 700, collections would often visit the objects of running requests and find nothing. An
    # ended request leaves no cycles, except for a small one in Ray Serve if the client has disconnected.
    allocations_between = 5_000
    gc.set_threshold(allocations_between)


def collect_in_pieces() -> None:
    """Keep collections short in a process with thousands of running requests. Call after `freeze_loaded`.

    Python collects when it has created many more objects than it has freed. This is rare while streams are running, and
    each collection then visits the new objects of all streams. If many of 20,000 streams start or move together, it
    takes 0.1 s, or 0.4 s if it visits all objects. Instead, a thread collects new objects so often that there are never
    many. It collects all objects while few streams are running, or after ten minutes.

    Finalizers run in the collecting thread; with Python's own schedule, this could be any thread. This is safe: tasks
    and futures only log, asyncio makes the event loop close asynchronous generators, and waiting tasks and open
    transports are never garbage, because their owners refer to them.
    """
    gc.disable()
    threading.Thread(target=_keep_collected, name="collections", daemon=True).start()


def _keep_collected() -> None:
    """Collect new objects every `COLLECT_EVERY_S`, and occasionally all objects. Never returns."""
    most_share = 0.001  # collections of all objects may take at most this share of the time
    quiet_s = 0.005  # collecting new objects takes less than this while few streams are running
    lately_s = 0.0  # duration of the longest recent collection of new objects; decays within seconds
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
    """Make glibc return the memory of large request bodies to the system. Call this before all other work.

    Requires glibc 2.33, and otherwise does nothing. Only for processes that read request bodies: in a process that runs
    models, the large blocks are tensors, and mapping each of them separately would cost time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    mmapped_from_bytes = 256 * 1024
    libc.mallopt(_M_MMAP_THRESHOLD, mmapped_from_bytes)
    max_arenas = 2  # instead of eight per core, because each thread leaves free memory in its arena
    libc.mallopt(_M_ARENA_MAX, max_arenas)
    libc.mallinfo2.restype = _MallocInfo
    threading.Thread(target=_keep_trimmed, args=(libc,), name="memory", daemon=True).start()


def _keep_trimmed(libc: ctypes.CDLL) -> None:
    """Return freed memory to the system whenever it exceeds a level by 16 MiB. Never returns.

    The level is the number of free bytes that a trim cannot return. It only rises to a value that two consecutive
    checks have found, because the process may free bytes just after the first trim.
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
    """The result of glibc's mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _bytes_not_in_use(libc: ctypes.CDLL) -> int:
    """Return the resident bytes that malloc has not allocated, neither in arenas nor in separate mappings.

    The resident bytes are read first, so that memory that is allocated in between does not count as free.
    """
    resident = _resident_bytes()
    info = libc.mallinfo2()
    return resident - int(info.uordblks + info.hblkhd)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
