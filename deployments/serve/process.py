"""Sets up logging, garbage collection and malloc in the processes that Serve runs."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from pathlib import Path

# Parameters of glibc's mallopt(3). When large blocks are freed, glibc raises the size from which blocks are mapped
# separately, up to 32 MiB. Request bodies then lie between small blocks, so their memory never returns to the system.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
# Bodies of many small values leave free blocks between others. Returning these takes a thread about 5 ms.
TRIM_EVERY_S = 5.0
# Seconds between collections of new objects, and the least seconds between collections of all objects.
COLLECT_EVERY_S, COLLECT_ALL_EVERY_S = 0.25, 60.0


def log_where_serve_does() -> None:
    """Send the log records of `app` and `deployments` to Serve's handlers, at Serve's level.

    Otherwise, Ray drops records below WARNING and writes others to the worker's stderr instead of Serve's files.
    """
    serves = logging.getLogger("ray.serve")
    for room in ("app", "deployments"):
        ours = logging.getLogger(room)
        # In throughput mode, Serve buffers a thousand lines. Our few lines bypass the buffer, to appear at once.
        ours.handlers = [getattr(handler, "target", None) or handler for handler in serves.handlers]
        ours.setLevel(serves.getEffectiveLevel())
        ours.propagate = False


def collect_later() -> None:
    """Disable garbage collection while loading, which creates no garbage. `freeze_loaded` enables it again."""
    gc.disable()


def freeze_loaded() -> None:
    """Exclude all current objects from later collections. Call once everything is loaded."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # With Python's default of 700, collections would often visit the objects of running requests in vain: an ended
    # request leaves no cycles, except for a small one of Ray Serve if its client has gone.
    allocations_between = 5_000
    gc.set_threshold(allocations_between)


def collect_in_pieces() -> None:
    """Keep collections short in a process with thousands of running requests. Call after `freeze_loaded`.

    Python collects when it has created many more objects than it has freed. That is seldom while streams run, and then
    a collection visits the new objects of all streams: when many requests arrive or move at once, it takes 0.1 s with
    20,000 streams, and 0.4 s if it visits all objects. Instead of Python's schedule, a thread collects new objects so
    often that there are never many. It collects all objects while few streams run, or after ten minutes.

    Finalizers run in the collecting thread, which with Python's own schedule can be any thread. That is safe: tasks and
    futures only log, asyncio makes the event loop close asynchronous generators, and waiting tasks and open transports
    are never garbage, because their owners hold them.
    """
    gc.disable()
    threading.Thread(target=_keep_collected, name="collections", daemon=True).start()


def _keep_collected() -> None:
    """Collect new objects every `COLLECT_EVERY_S`, and all objects seldom. Never returns."""
    most_share = 0.001  # the largest share of time that collections of all objects may take
    quiet_s = 0.005  # while few streams run, collecting new objects takes less than this
    lately_s = 0.0  # the longest recent collection of new objects; decays within seconds
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

    Does nothing without glibc 2.33 or later. Meant only for processes that read request bodies: in a process that
    runs models, tensors are the large blocks, and mapping each of them would cost time.
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
    """Return freed memory to the system each time it has grown by 16 MiB above a level. Never returns.

    The level is what a trim cannot return. It only rises to bytes that two trims in a row have left, because the
    process may free bytes just after the first trim.
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
    """Return the resident bytes minus the bytes that malloc has allocated, in arenas and in separate mappings.

    The resident bytes are read first, so that memory allocated between the two reads does not count as free.
    """
    resident = _resident_bytes()
    info = libc.mallinfo2()
    return resident - int(info.uordblks + info.hblkhd)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
