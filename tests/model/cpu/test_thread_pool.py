"""Threads that share loops."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.model.cpu.builds import program

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def test_no_member_goes_on_before_a_loop_is_done_and_none_computes_a_loop_again() -> None:
    assert COMPILER is not None
    source, flags = "thread_pool.cpp", ("-g", "-march=native")
    done = subprocess.run([program(COMPILER, source, *flags, "-fsanitize=thread")], capture_output=True, text=True)
    if "FATAL: ThreadSanitizer" in done.stderr:  # of some compilers it cannot start where addresses are very random
        done = subprocess.run([program(COMPILER, source, *flags)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
