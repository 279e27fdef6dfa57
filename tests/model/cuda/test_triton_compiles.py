"""The Triton kernels go through the whole compiler, for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

PROJECT = Path(__file__).resolve().parents[3]
SHARED_OF_H100 = 227 * 1024
SHARED_OF_SMALL_GPUS = 99 * 1024  # Ada, consumer Blackwell


def test_the_kernels_compile_for_a_gpu_and_fit_into_its_memories(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.cuda.compile_kernels"],
        cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 4 + 2 * 2 + 3 * 2, done.stdout
    for kernel, shape, shared, spilled in lines:
        assert int(shared) <= (SHARED_OF_SMALL_GPUS if shape in ("llama8b", "bfloat16") else SHARED_OF_H100), kernel
        assert shape == "wide" or int(spilled) == 0, kernel
