"""Memory of bodies goes back to the system though small blocks between are kept."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")

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


@pytest.mark.parametrize("total_mib", [100, 28])
@pytest.mark.parametrize("size", [1 << 20, 32 << 10], ids=["large blocks", "small blocks"])
def test_what_bodies_took_goes_back_between_small_blocks_too(size: int, total_mib: int) -> None:
    assert _growth_mib("without", size, total_mib << 20) > total_mib / 2
    assert _growth_mib("with", size, total_mib << 20) < 18


@pytest.mark.parametrize("mode", ["in use at a look", "freed before a look", "read within a look"])
def test_a_look_at_any_moment_keeps_nothing_of_what_is_freed_later(mode: str) -> None:
    assert _growth_mib(mode, 32 << 10, 50 << 20) < 18
