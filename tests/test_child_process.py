"""What processes of ours do at their beginning."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.child_process import child_environment

# As in a worker of Ray, which 15 steps back, and which only root could bring nearer.
IN_A_WORKER = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
from app.child_process import lower_priority

os.nice(max(0, 15 - os.nice(0)))
if os.getuid() == 0:
    os.setuid(65534)
with ThreadPoolExecutor(1, initializer=lower_priority) as pool:
    of_thread = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
print(of_thread, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux does a thread have a priority of its own")
def test_a_thread_of_a_worker_that_is_not_roots_steps_back_further_and_the_others_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_WORKER], env=child_environment(), capture_output=True, text=True, check=True
    )
    of_thread, of_the_others = map(int, done.stdout.split())
    assert of_the_others >= 15
    assert of_thread == min(19, of_the_others + 4)
