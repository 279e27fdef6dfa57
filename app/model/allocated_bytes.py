"""Counts the memory that operators allocate, for devices whose allocator keeps no statistics.

A step on the meta device, whose tensors have sizes but no data, thus predicts the memory of a real step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that create a tensor without launching a kernel. Views need not be listed.
_WITHOUT_KERNEL = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach_",
})  # fmt: skip


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts allocations in `with AllocatedBytes(device) as allocated: ...`.

    Counts only a few of the internal buffers of operators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self.peak = 0  # the most bytes allocated inside the block that existed at the same time
        self.num_kernels = 0  # the number of operators that would launch a kernel
        self._now = 0
        self._known: set[int] = set()  # addresses of all storages seen so far

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._see(tensor.untyped_storage(), 0)  # weights and inputs count 0: they existed before the block
        with self:
            made_of = func.decompose(*args, **kwargs)
        if made_of is not NotImplemented:
            return made_of
        output = _computed(func, args, kwargs)
        self.num_kernels += launches_kernel(func)
        self.peak = max(self.peak, self._now + _inside_of(func, args))
        for tensor in _tensors(output):
            if tensor.device.type == self._device:
                self._see(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return output

    def _see(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        address = storage._cdata
        if address in self._known:
            return
        self._known.add(address)
        self._now += num_bytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, address, num_bytes).atexit = False

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self._now -= num_bytes


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:  # torch only supports bfloat16
        return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
    return func(*args, **kwargs)


def launches_kernel(func: Any) -> bool:
    """Return whether a torch operator computes or copies data, so that a GPU launches a kernel for it."""
    return not (func.is_view or func.overloadpacket.__name__ in _WITHOUT_KERNEL)


def _inside_of(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates for internal buffers, as measured with torch's CPU allocator."""
    if func is torch.ops.aten.logsumexp.default:  # allocates the exponentials
        return int(args[0].nbytes)
    if func in (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList) and not args[0].is_floating_point():
        return int(args[0].numel()) * torch.long.itemsize  # allocates a copy in the result's type
    return 0


def num_bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the total bytes of the tensors' storages. A storage that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
