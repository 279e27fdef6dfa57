"""Run the tests of the kernels on this card with pytest, without this project's options: some options need plugins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.gpu.bench import Bench
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.machine import PROJECT

# Compilation for other cards needs no GPU and is tested elsewhere.
_TESTS = ("tests/model/cuda", "--ignore=tests/model/cuda/test_triton_compiles.py")
_STANDING_IN = ("tests/model/cuda/test_block_tables.py",)


def measure(bench: Bench) -> None:
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        bench.skip(f"the tests need {' and '.join(missing)}")
        return
    command = [
        sys.executable, "-m", "pytest", *bench.sized(_TESTS, _STANDING_IN), "-q", "-rfE", "-c", "/dev/null",
        "--rootdir", ".", "-W", "default", "-p", "no:cacheprovider", "-p", "benchmarks.gpu",
        "--continue-on-collection-errors",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    (bench.out / "pytest.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = done.stdout.strip().splitlines()
    bench.put(tests=lines[-1].strip("= ") if lines else done.stderr[-300:])
    for line in lines:
        if found := re.match(r"(FAILED|ERROR) (.*)", line):
            bench.row("failed tests", test=found[2][:200])
    if done.returncode != 0:
        raise BenchmarkError(f"pytest ended with status {done.returncode}; see {bench.out / 'pytest.log'}")
