"""Threads that share loops."""

from __future__ import annotations

import subprocess

import pytest

from app.model.cpu import library as native
from tests.model.cpu.builds import program


def test_no_member_goes_on_before_a_loop_is_done_and_none_computes_a_loop_again() -> None:
    compiler = native._compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source, flags = "thread_pool.cpp", ("-g", "-march=native")
    done = subprocess.run([program(compiler, source, *flags, "-fsanitize=thread")], capture_output=True, text=True)
    if "FATAL: ThreadSanitizer" in done.stderr:  # of some compilers it cannot start where addresses are very random
        done = subprocess.run([program(compiler, source, *flags)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
