"""Triton's interpreter with less work: it takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest


def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Leave out work of the interpreter that has no result, where there is Triton.

    A function that a kernel calls finds Triton's language replaced; it would be replaced again. Sums of integers would
    be computed twice to find overflows, which are told only with the interpreter's `debug`. The table of numpy's types
    would be built for each value.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
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

    patch.setattr(interpreter.InterpretedFunction, "__call__", called)
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug
    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
