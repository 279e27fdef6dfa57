"""Less work for Triton's interpreter, which takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from app.model.cuda.attention import TritonAttention


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Without work of the interpreter that has no result.

    A function that a kernel calls finds Triton's language replaced; it would be replaced again. Sums of integers would
    be computed twice to find overflows, which are told only with the interpreter's `debug`. The table of numpy's types
    would be built for each value.
    """
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

    of_pointers, of_numbers = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_type(of: Any) -> Any:
        scalar = of.scalar
        return of_pointers(scalar) if scalar.is_ptr() else of_numbers(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        assert not options.debug
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_probe() -> Iterator[None]:
    """Models are compared at load with fewer tokens; tests of that comparison are in `test_loader.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model.verification.NUM_TOKENS", 6)
        yield


@pytest.fixture
def triton_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes our kernels on this machine, and captures only where there is a GPU."""
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr("app.model.ways.gpu.CudaCapture", lambda device: lambda function: function)
