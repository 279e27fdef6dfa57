"""The quick operators of Triton's interpreter give the results of the interpreter's own operators."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from tests.kit.interpreter import _OPERATORS, _REVERSED

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="there is no interpreter here")

SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()), ((), (4,)), ((1,), ()), ((4, 1), (1, 4)), ((4,), (4, 4)), ((4, 4), (4, 4)),
)  # fmt: skip
NAMES = [f"__{name}__" for name in _OPERATORS] + [f"__r{name}__" for name in _REVERSED]
TYPES = {
    "int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
    "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
NUMBERS = (0, 3, -5, 2**31 - 1, -(2**31), 2**31, 2**40, 0.1, -1.5, 1e300, float("inf"), True)


def value_of(kind: str, shape: tuple[int, ...], source: np.random.Generator) -> Any:
    """A tensor of Triton's with such numbers, among them the largest and the least."""
    from triton.runtime import interpreter

    language = interpreter.tl
    data = source.integers(-120, 120, shape or (1,))
    data.flat[0] = source.choice([0, 1, 127])
    numbers = data.astype(np.uint64 if kind == "pointer" else TYPES[kind])
    if kind in ("fp32", "fp64"):
        numbers = (numbers * source.random(numbers.shape)).astype(TYPES[kind])
    if kind in ("int32", "int64") and source.random() < 0.3:
        numbers.flat[0] = np.iinfo(TYPES[kind]).max
    scalar = language.pointer_type(language.float32) if kind == "pointer" else language.dtype(kind)
    found = language.block_type(scalar, shape) if shape else scalar
    return language.core.tensor(interpreter.TensorHandle(numbers, scalar), found)


def told(call: Any, one: Any, other: Any) -> Any:
    """The types, the numbers and their place of a result, or the name of its error."""
    with np.errstate(all="ignore"):
        try:
            result = call(one, other)
        except Exception as error:
            return type(error).__name__
    data = result.handle.data
    sizes = [each.value for each in result.shape], result.numel.value
    return (
        str(result.type), str(result.dtype), str(result.handle.dtype), sizes, data.dtype, data.shape, data.tobytes()
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_gives_what_the_interpreters_own_gives(name: str) -> None:
    from triton.runtime import interpreter

    operator = getattr(interpreter.tl.core.tensor, name)
    source = np.random.default_rng(0)
    kinds = [*TYPES, "pointer"]
    for kind, of_other, (shape, other_shape) in product(kinds, [*kinds, *NUMBERS], SHAPES):

        def operands() -> tuple[Any, Any]:
            other = value_of(of_other, other_shape, source) if isinstance(of_other, str) else of_other  # noqa: B023
            return value_of(kind, shape, source), other  # noqa: B023

        told(operator, *operands())  # from now on it knows the types
        one, other = operands()
        assert told(operator, one, other) == told(operator.plainly, one, other), (kind, of_other, shape, other_shape)
