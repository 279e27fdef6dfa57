"""Memory of bodies goes back to the system though small blocks between are kept, and cycles are found in pieces."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")

_PROGRAM = """
import sys, time
from deployments.serve import process

resident_bytes, bytes_not_in_use = process._resident_bytes, process._bytes_not_in_use
looks, steps = 0, {}

def resident_mib():
    return resident_bytes() / 2**20

def read_bodies():
    for _ in range(total // size):
        bodies.append(b"x" * size)
        kept.append(bytearray(600))

def look(libc):
    global looks
    looks += 1
    steps.pop(("before", looks), lambda: None)()
    return bytes_not_in_use(libc)

def resident_within_a_look():
    steps.pop(("within", looks), lambda: None)()
    return resident_bytes()

mode, size, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
process.TRIM_EVERY_S = 0.05
if mode in ("with", "in use at a look"):
    process.return_freed_memory()
large = bytes(4 << 20)
del large  # from now on glibc takes such blocks from the heap
kept = [bytearray(600) for _ in range(20_000)]  # larger than what Python allocates by itself: no hole is left for more
before, bodies = resident_mib(), []
read_bodies()
if mode == "in use at a look":
    time.sleep(0.5)
elif mode in ("freed before a look", "read within a look"):  # the second looks at what a trim left
    freed_first, bodies = bodies, []
    if mode == "freed before a look":
        read_bodies()
        steps = {("before", 2): bodies.clear}
    else:
        steps = {("within", 2): read_bodies, ("before", 3): bodies.clear}
    del freed_first
    process._bytes_not_in_use, process._resident_bytes = look, resident_within_a_look
    process.return_freed_memory()
    while steps:
        time.sleep(0.01)
bodies.clear()
left = time.monotonic() + 60
while mode != "without" and resident_mib() - before > 18 and time.monotonic() < left:
    time.sleep(0.05)
print(resident_mib() - before)
"""


def _growth_mib(mode: str, size: int, total: int) -> float:
    """After bodies of `size` bytes, `total` together."""
    command = [sys.executable, "-c", _PROGRAM, mode, str(size), str(total)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs_glibc
@pytest.mark.parametrize("total_mib", [100, 28])
@pytest.mark.parametrize("size", [1 << 20, 32 << 10], ids=["large blocks", "small blocks"])
def test_what_bodies_took_goes_back_between_small_blocks_too(size: int, total_mib: int) -> None:
    assert _growth_mib("without", size, total_mib << 20) > total_mib / 2
    assert _growth_mib("with", size, total_mib << 20) < 18


@needs_glibc
@pytest.mark.parametrize("mode", ["in use at a look", "freed before a look", "read within a look"])
def test_a_look_at_any_moment_keeps_nothing_of_what_is_freed_later(mode: str) -> None:
    assert _growth_mib(mode, 32 << 10, 50 << 20) < 18


_COLLECTIONS = """
import gc, sys, time, weakref
from deployments.serve import process

class Node:
    pass

def ended_cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node), node

process.COLLECT_EVERY_S, process.COLLECT_ALL_EVERY_S = 0.01, float(sys.argv[1])
process.freeze_loaded()
process.collect_in_pieces()
assert not gc.isenabled(), "nothing is collected at a moment of its own choice"
young, node = ended_cycle()
del node
old, node = ended_cycle()
gc.collect(1)  # it has become old while it was used
del node
left = time.monotonic() + 60
while young() is not None or (sys.argv[2] == "all" and old() is not None):
    assert time.monotonic() < left
    time.sleep(0.01)
print(old() is None)
"""


@pytest.mark.parametrize(("all_every_s", "what", "is_old_freed"), [("0.05", "all", "True"), ("1000", "young", "False")])
def test_cycles_are_found_in_pieces_those_of_old_objects_seldom(all_every_s: str, what: str, is_old_freed: str) -> None:
    command = [sys.executable, "-c", _COLLECTIONS, all_every_s, what]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == is_old_freed
