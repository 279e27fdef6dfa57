"""Memory of large bodies goes back to the system though small blocks are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
from deployments.serve.memory import return_large_blocks

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "with":
    return_large_blocks()
large = bytes(4 << 20)
del large  # from now on glibc takes such blocks from the heap
kept = [bytearray(600) for _ in range(20_000)]  # larger than what Python allocates by itself: no hole is left for more
before, bodies = resident_mib(), []
for number in range(100):
    bodies.append(b"x" * (1 << 20))
    kept.append(bytearray(600))
del bodies
print(resident_mib() - before)
"""


def _growth_mib(mode: str) -> float:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's allocator that is told")
def test_what_large_bodies_took_goes_back_between_small_blocks_too() -> None:
    assert _growth_mib("without") > 50
    assert _growth_mib("with") < 10
