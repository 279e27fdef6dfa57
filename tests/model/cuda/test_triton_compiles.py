"""The Triton kernels go through the whole compiler, for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

PROJECT = Path(__file__).resolve().parents[3]
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}  # that a program may have
ALL = ("llama8b", "wide", "odd")


@pytest.mark.parametrize(("architecture", "shapes"), [(80, ALL[:1]), (89, ALL[:1]), (90, ALL), (100, ALL[:1])])
def test_the_kernels_compile_for_a_gpu_and_fit_into_its_memories(
    architecture: int, shapes: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.cuda.compile_kernels", str(architecture), *shapes],
        cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(shapes) * 4 + 2 * 2, done.stdout
    for kernel, shape, shared, spilled in lines:
        assert int(shared) <= SHARED_KIB[architecture] * 1024, (kernel, shape)
        assert shape == "wide" or int(spilled) == 0, (kernel, shape)
