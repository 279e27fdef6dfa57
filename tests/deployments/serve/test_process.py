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

def resident_mib():
    return process._resident_bytes() / 2**20

mode, size, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
process.TRIM_EVERY_S = 0.05
if mode != "without":
    process.return_freed_memory()
large = bytes(4 << 20)
del large  # from now on glibc takes such blocks from the heap
kept = [bytearray(600) for _ in range(20_000)]  # larger than what Python allocates by itself: no hole is left for more
before, bodies = resident_mib(), []
for number in range(total // size):
    bodies.append(b"x" * size)
    kept.append(bytearray(600))
    if mode == "looked at while in use" and number == total // size - 1:
        time.sleep(0.5)
del bodies
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


def test_a_look_while_bodies_are_in_use_keeps_nothing_of_what_is_freed_later() -> None:
    assert _growth_mib("looked at while in use", 32 << 10, 100 << 20) < 18
