"""Tensors whose memory on a device is given up for a while; they and all views of them stay."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class OffDevice:
    """Weights that wait in the host's memory, and scratch memory that nothing keeps.

    Storages are emptied in place (as FSDP does with those of its parameters): what holds a tensor need not know. Their
    addresses are others afterwards, so what was captured with them is of no use.
    """

    def __init__(self, weights: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor]) -> None:
        """No work that reads them may be under way. Memory of others, as of a mapped file, stays as it is."""
        self._weights = [(storage, _on_host(storage)) for storage in _storages(weights)]
        self._scratch = [(storage, storage.nbytes()) for storage in _storages(scratch)]
        for storage, _ in (*self._weights, *self._scratch):
            storage.resize_(0)

    def come_back(self) -> None:
        """Have the weights as they were, and zeros in the scratch memory. Raises OutOfMemoryError."""
        for storage, host in self._weights:
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
            _bytes(storage).zero_()
        if any(storage.device.type == "cuda" for storage, _ in self._weights):
            torch.cuda.synchronize()  # the host's copies go with this object


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, though tied weights and views share them."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return [storage for storage in found.values() if storage.nbytes() and storage.resizable()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it, [num_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_bytes(storage))
