"""Less work for Triton's interpreter, which takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.model.cuda.attention import TritonAttention


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """A function that a kernel calls finds Triton's language replaced; the interpreter would do that again."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    again, replaced = interpreter._patch_lang, set()

    def called(function: Any, *given: Any, **named: Any) -> Any:
        if function.fn.__module__ not in replaced:
            replaced.add(function.fn.__module__)
            again(function.fn)
        return function.rewrite()(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_probe() -> Iterator[None]:
    """Models are compared at load with fewer tokens; tests of that comparison are in `test_loader.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model.loader._PROBE_TOKENS", 6)
        yield


@pytest.fixture
def triton_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes our kernels on this machine, and captures only where there is a GPU."""
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr("app.model.backends.CudaCapture", lambda device: lambda function: function)
