"""Triton's interpreter with less work: it takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Callable
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
    _know_operators(interpreter, patch)
    _leave_what_is_so(interpreter, patch)
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


_INTEGERS = ("int32", "int64")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_REVERSED = ("add", "sub", "mul")  # also with a number on the left


def _know_operators(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """The type and the shape of a result follow from the types and the shapes of the operands: an operator of the
    language finds both once, and computes in numpy after this. Other pairs of types are converted each time."""
    tensor = interpreter.tl.core.tensor
    for name, compute in _OPERATORS.items():
        patch.setattr(tensor, f"__{name}__", _known(interpreter, getattr(tensor, f"__{name}__"), name, compute))
    for name in _REVERSED:
        reverse = _known(interpreter, getattr(tensor, f"__r{name}__"), name, _turned(_OPERATORS[name]))
        patch.setattr(tensor, f"__r{name}__", reverse)


def _turned(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: compute(other, one)


def _known(
    interpreter: Any, operator: Callable[[Any, Any], Any], name: str, compute: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Return an operator that remembers the types of results. Its `plainly` is the language's own operator."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    tensor, constant = core.tensor, core.constexpr
    known: dict[tuple[str, Any], Any] = {}
    made = tensor.__new__

    def find(one: Any, other: Any, key: tuple[str, Any]) -> Any:
        result, scalar = operator(one, other), one.type.scalar
        if scalar.is_ptr() and name == "add" and type(other) is tensor and other.dtype.name in _INTEGERS:
            width = max(1, one.handle.get_element_ty().primitive_bitwidth // 8)
            known[key] = (lambda data, offset: data + width * offset.astype(np.uint64), result)
        elif _may_be_left_to_numpy(scalar.name, other.dtype.name if type(other) is tensor else other, name):
            known[key] = (compute, result)
        return result

    def call(one: Any, other: Any, _semantic: object = None) -> Any:
        kind = type(other)
        if kind is constant:
            other = other.value
            kind = type(other)
        if kind is tensor:
            key, data = (one.type.name, other.type.name), other.handle.data
        elif (kind is int and -(2**31) <= other < 2**31) or (kind is float and _is_of_32_bits(other)):
            key, data = (one.type.name, kind), other
        else:
            return operator(one, other)
        found = known.get(key)
        if found is None:
            return find(one, other, key)
        function, like = found
        result = made(tensor)
        result.handle = handle(function(one.handle.data, data), like.handle.dtype)
        result.type, result.dtype, result.numel, result.shape = like.type, like.dtype, like.numel, like.shape
        return result

    call.plainly = operator  # type: ignore[attr-defined]
    return call


def _is_of_32_bits(number: float) -> bool:
    """Return whether Triton makes a 32-bit float of this number."""
    return number == 0 or 1e-37 < abs(number) < 1e38 or math.isinf(number)


def _may_be_left_to_numpy(one: str, other: Any, operator: str) -> bool:
    """Return whether numpy converts operands of these types, or a number, in the way in which Triton does."""
    if operator in ("and", "or"):
        return one == other == "int1"
    if one in _INTEGERS:
        return other in _INTEGERS or type(other) is int
    return one == "fp32" and (other == "fp32" or type(other) in (int, float))


def _leave_what_is_so(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Values of one shape need no other, and a value needs no type that it has; both would be compared in parts."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        # `_know_types` gives values of one shape one tuple of sizes.
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def cast_others(self: Any, value: Any, target: Any, rounding: Any = None) -> Any:
        return value if value.dtype is target else cast(self, value, target, rounding)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(semantic, "cast", cast_others)
