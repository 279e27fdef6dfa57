"""A replica in a process of its own, which has to quicken the interpreter for itself."""

from __future__ import annotations

from threading import Barrier

import pytest

from benchmarks.gpu import sharing
from benchmarks.gpu.bench import Bench
from tests.kit.interpreter import quicken_interpreter

_SERVE_HALF = sharing._serve_half  # before a test replaces it


def serve_half(bench: Bench, number: int, barrier: Barrier) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quicken_interpreter(patch)
        _SERVE_HALF(bench, number, barrier)
