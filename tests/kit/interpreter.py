"""Triton's interpreter with less work: it takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

import inspect
import math
import os
import threading
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Leave out work of the interpreter that has no result, where it is what runs kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _replace_language_once(interpreter, patch)
    _leave_arguments(interpreter, patch)
    _know_types(interpreter, patch)
    _compute_plainly(interpreter, patch)
    _launch_one_at_a_time(interpreter, patch)


def _launch_one_at_a_time(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """All threads share the interpreter's place in a grid."""
    launch, lock = interpreter.GridExecutor.__call__, threading.Lock()

    def launch_alone(*given: Any, **named: Any) -> Any:
        with lock:
            return launch(*given, **named)

    patch.setattr(interpreter.GridExecutor, "__call__", launch_alone)


def _replace_language_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Each launch, and each function that a kernel calls, would replace Triton's language by functions of numpy."""
    language, semantic = interpreter.tl, interpreter.interpreter_semantic

    class Kept:
        def set_attr(self, place: Any, name: str, value: object) -> None:
            patch.setattr(place, name, value, raising=False)

    def replaced(place: Any, name: str, member: Any, _builder: object, scope: Kept) -> None:
        function = getattr(member, "__wrapped__", member)  # without a check for what is given here

        def call(*given: Any, _semantic: object = None, **named: Any) -> Any:
            return function(*given, _semantic=semantic, **named)

        scope.set_attr(place, name, call)

    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(interpreter, "_LangPatchScope", Kept)
        meanwhile.setattr(interpreter, "_patch_attr", replaced)
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    patch.setattr(interpreter, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))


def _leave_arguments(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """They would be copied to the host, where they are, and back; and a function's parameters read at each launch."""
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda _, given, named: (given, named))
    patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    patch.setattr(inspect, "getfullargspec", cache(inspect.getfullargspec))


def _know_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Sizes and types of values would be checked and put into words for each of them."""
    core = interpreter.tl.core
    constant, equal, numpy_type = core.constexpr, core.dtype.__eq__, interpreter._get_np_dtype
    types: dict[str, Any] = {}

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
        return constant(math.prod(shape)), tuple(map(constant, shape))

    @cache
    def block(shape: tuple[int, ...]) -> tuple[int, str]:
        return math.prod(shape), str(shape)

    def tensor(self: Any, handle: object, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = sizes(kind.shape if kind.is_block() else ())

    def block_type(self: Any, element_type: Any, shape: Any) -> None:
        given = shape.value if isinstance(shape, constant) else shape
        self.shape = tuple([each.value if isinstance(each, constant) else each for each in given])
        self.element_ty = element_type
        self.numel, text = block(self.shape)
        self.name = f"<{text}, {element_type.name}>"

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def type_in_numpy(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in types:
            types[scalar.name] = numpy_type(scalar)
        return types[scalar.name]

    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(core.block_type, "__init__", block_type)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(core.dtype, "to_ir", lambda self, _builder: self)
    patch.setattr(interpreter.TensorHandle, "__init__", handle)
    patch.setattr(interpreter, "_get_np_dtype", type_in_numpy)


def _compute_plainly(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Sums of integers would be computed twice to find overflows, which are told only with the interpreter's `debug`;
    values broadcast to the shape that they have, and bfloat16 taken apart to be cut off."""
    tl, handle, convert = interpreter.tl, interpreter.TensorHandle, interpreter._convert_float
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug

    def broadcast(_builder: object, given: Any, shape: Any) -> Any:
        is_so = given.data.shape == tuple(shape)
        return handle(given.data if is_so else np.broadcast_to(given.data, shape), given.dtype.scalar)

    def converted(data: Any, source: Any, target: Any, rounding: object) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return (data.view(np.uint32) >> 16).astype(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter.InterpreterBuilder, "create_broadcast", broadcast)
    patch.setattr(interpreter, "_convert_float", converted)
