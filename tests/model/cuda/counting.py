"""Counts what some work costs a GPU, without one: kernel launches, waits of the host, bytes that our kernels move.

Triton's kernels are counted where its interpreter starts them, torch's where operators are dispatched. A step that is
replayed from a graph launches the same kernels, but in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from app.model.allocated_bytes import launches_kernel
from app.model.cuda.captured_inputs import StepSize
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.implementations.cuda_decoder import CudaModel

# Operators whose result has a size, or is a number, that the host has to ask the device for.
_WAITING = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "equal", "is_nonzero", "item",
})  # fmt: skip
_READS = frozenset({"tolist", "numpy", "cpu", "__array__"})  # methods that copy to the host and wait


@dataclass(slots=True)
class Traffic:
    """One launch of one of our kernels, and the bytes that it moves."""

    kernel: str
    loaded: int = 0  # by all programs together
    stored: int = 0
    read: int = 0  # each byte once
    written: int = 0


@dataclass(slots=True)
class Counts:
    """What some work would do on a GPU."""

    kernels: list[Traffic] = field(default_factory=list)  # of ours, in their order
    operators: list[str] = field(default_factory=list)  # of torch, which launch a kernel each
    waits: list[str] = field(default_factory=list)  # of the host for the device

    @property
    def num_launches(self) -> int:
        return len(self.kernels) + len(self.operators)

    def traffic(self, kernel: str) -> Traffic:
        """Of the first launch of a kernel."""
        return next(each for each in self.kernels if each.kernel == kernel)


@contextmanager
def counting(*, computes: bool = True) -> Iterator[Counts]:
    """Around some work on a CPU, with Triton's interpreter. Tensors of the host and of the device are not told apart:
    whatever is read from a tensor counts as a wait.

    computes: whether our kernels are run. Without it they are launched only, and no bytes are counted.
    """
    counts = Counts()
    with pytest.MonkeyPatch.context() as patch, _Operators(counts), _Methods(counts):
        _count_launches(patch, counts, computes=computes)
        yield counts


def launches_of_a_layer(runner: GraphModelRunner, model: CudaModel, size: StepSize) -> Counter[str]:
    """By name: of kernels of ours and of operators of torch, in a step of two layers beyond one of the first alone.

    Nothing may wait for the device.
    """
    layers = []
    for num_layers in (1, 2):
        runner._forward = CudaDecoder(model.weights, runner._attention, num_layers=num_layers)
        with counting(computes=False) as counts:
            runner.compute_padding(size)
        assert not counts.waits
        layers.append(Counter([*counts.operators, *(each.kernel for each in counts.kernels)]))
    return layers[1] - layers[0]


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            made_of = func.decompose(*args, **(kwargs or {}))
        if made_of is not NotImplemented:
            return made_of
        name = func.overloadpacket.__name__
        if name in _WAITING or _has_unknown_size(name, args, kwargs or {}):
            self._counts.waits.append(name)
        if launches_kernel(func):
            self._counts.operators.append(name)
        return func(*args, **(kwargs or {}))


def _has_unknown_size(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the sizes of its result follow from numbers on the device."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    tensors = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
    return name in ("index", "index_put", "index_put_") and any(each.dtype is torch.bool for each in tensors[:1])


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            self._counts.waits.append(name)
        return func(*args, **(kwargs or {}))


def _count_launches(patch: pytest.MonkeyPatch, counts: Counts, *, computes: bool) -> None:
    run = InterpretedFunction.run
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        traffic = Traffic(kernel.fn.__name__)
        counts.kernels.append(traffic)
        if not computes:
            return None
        loads, stores = _Bytes(), _Bytes()
        with _disable_current_modes(), torch._C.DisableTorchFunction(), pytest.MonkeyPatch.context() as inside:

            def counted_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
                loads.add(pointers, mask)
                return load(builder, pointers, mask, *others)

            def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
                stores.add(pointers, mask)
                return store(builder, pointers, value, mask, *others)

            inside.setattr(InterpreterBuilder, "create_masked_load", counted_load)
            inside.setattr(InterpreterBuilder, "create_masked_store", counted_store)
            result = run(kernel, *args, **kwargs)
        traffic.loaded, traffic.read = loads.total, loads.once
        traffic.stored, traffic.written = stores.total, stores.once
        return result

    patch.setattr(InterpretedFunction, "run", counted_run)


class _Bytes:
    """Of the accesses of one kernel."""

    def __init__(self) -> None:
        self._places: list[tuple[int, np.ndarray[Any, Any]]] = []

    def add(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self._places.append((size, pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]))

    @property
    def total(self) -> int:
        return sum(size * places.size for size, places in self._places)

    @property
    def once(self) -> int:
        sizes = {size for size, _ in self._places}
        return sum(
            size * np.unique(np.concatenate([places for own, places in self._places if own == size])).size
            for size in sizes
        )
