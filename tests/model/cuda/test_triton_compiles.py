"""The Triton kernels go through the whole compiler, for a GPU that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.disk import cache_folder

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

PROJECT = Path(__file__).resolve().parents[3]
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
SPILLED = {  # bytes; of all others none
    ("decode_kernel", "gemma9b-fp8", "90"): 8,
    ("prefill_kernel", "qwen7b", "89"): 80,  # 7 heads share keys and values, and 5: no powers of two
    ("prefill_kernel", "qwen14b", "89"): 80,
}
# Powers of two and quotients may be a little off. Logarithms may not: near 1, where the noise of the tokens that win
# comes from, an approximate one has few bits.
APPROXIMATE = {"ex2.approx.ftz.f32", "div.full.f32"}


def test_the_kernels_compile_for_gpus_and_fit_into_their_memories() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder() / "triton-tests")  # a minute of CPU time where it is empty
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.cuda.compile_kernels"],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    kernels = {kernel for kernel, *_ in lines}
    assert kernels == entry_points(), "each kernel is launched by `compile_kernels.py`"
    for kernel, shape, architecture, spilled, shared, approximate in lines:
        assert int(shared) <= SHARED_KIB[int(architecture)] * 1024, (kernel, shape, architecture)
        assert int(spilled) <= SPILLED.get((kernel, shape, architecture), 0), (kernel, shape, architecture)
        if kernel in ("draw_kernel", "logprobs_kernel"):
            assert APPROXIMATE.issuperset(approximate.split(",")), (kernel, architecture)


def entry_points() -> set[str]:
    """The names of all kernels of the package that are launched."""
    files = (PROJECT / "app" / "model" / "cuda").glob("*kernels.py")
    return {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}
