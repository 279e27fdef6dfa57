"""Shares packed weights among the processes of a machine: the first process packs them, later ones map them.

The memory is an anonymous file (memfd) in large pages. Its name includes a digest of everything that the packed weights
depend on. A process finds the file by this name among the open files of the user's processes. The file exists as long
as one of them has it open. A complete file is sealed, so that nobody can write to it, and only sealed files are mapped.
A process that ends while it packs leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from app.config import GIB
from app.cores import numa_nodes_of_thread
from app.disk import locked_if_possible
from app.model.cpu.library import in_large_pages
from app.model.cpu.weights import Allocate, NativeWeights, weights_at
from app.progress import step_within

logger = logging.getLogger(__name__)

LARGE_PAGE = 2**21
_GROWTH = 16 * LARGE_PAGE  # in large steps, because growing the file needs a system call that waits for all cores
_SIZE_BYTES = 8  # the length of the number that ends a file
_NAME = "carousel-weights"
# Linux constants that Python does not define. They are equal on x86 and Arm.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_WHOLE = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Pack = Callable[[Allocate], NativeWeights]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which processes share weights: all those on a NUMA node that pass the same digest."""

    digest: str  # of the model's files and everything else that the packed weights depend on
    folder: Path  # for a lock file, so that only one process packs at a time


def shared_weights(pack: Pack, sharing: Sharing | None) -> NativeWeights:
    """Return weights that another process has packed, or pack them. Falls back to private memory if sharing fails.

    The memory is unmapped with the last tensor in it. pack: packs the weights with the allocator that it receives.
    sharing: None to share with no other process.
    """
    try:
        return _weights_in(_packed(pack, _NAME) if sharing is None else _found_or_packed(pack, sharing))
    except OSError as error:
        logger.warning("weights are stored in this process's own memory, because shared memory failed: %s", error)
        return pack(in_large_pages)


def _found_or_packed(pack: Pack, sharing: Sharing) -> int:
    """Return a descriptor of a complete file, which is shared only within a NUMA node."""
    name = "-".join(filter(None, (_NAME, sharing.digest, numa_nodes_of_thread())))
    without = "replicas that start at the same time do not share their weights"
    with locked_if_possible(sharing.folder / f"{name}.lock", without=without, waiting=_waiting):
        found = _find(name)
        if found is None:
            return _packed(pack, name)
        logger.info("weights: %.2f GiB are shared with another process", os.fstat(found).st_size / GIB)
        return found


def _packed(pack: Pack, name: str) -> int:
    """Pack the weights into a new file and return a descriptor of it."""
    began = time.monotonic()
    with _GrowingFile(name) as file:
        descriptor = file.finish(pack(file.allocate).layout(file.memory))
        logger.info(
            "weights: %.2f GiB have been packed in %.1f s, in %s pages",
            file.num_bytes / GIB, time.monotonic() - began, "large" if file.is_in_large_pages else "small",
        )  # fmt: skip
        return descriptor


def _weights_in(descriptor: int) -> NativeWeights:
    """Return views of a complete file, which stays open for other processes to find until the last view is freed."""
    num_bytes, layout = _layout_in(descriptor)
    addresses = _Addresses(num_bytes)
    addresses.map(descriptor)
    weakref.finalize(addresses.memory, os.close, descriptor)
    return weights_at(layout, addresses.memory)


@contextmanager
def _waiting() -> Iterator[None]:
    logger.info("weights: waiting for another process to pack them")
    with step_within("waiting for the weights, which another replica is loading"):
        yield


class _Addresses:
    """A range of reserved addresses, which is released when nothing refers to `memory` any more."""

    def __init__(self, num_bytes: int) -> None:
        """num_bytes: a multiple of `LARGE_PAGE`. Raises OSError if the addresses cannot be reserved."""
        reserved = _mapped(None, num_bytes + LARGE_PAGE, _PROT_NONE)
        self._start, self._num_bytes = -(-reserved // LARGE_PAGE) * LARGE_PAGE, num_bytes
        self.memory: ctypes.Array[Any] = (ctypes.c_uint8 * num_bytes).from_address(self._start)
        weakref.finalize(self.memory, _libc.munmap, reserved, num_bytes + LARGE_PAGE).atexit = False

    def map(self, descriptor: int) -> None:
        """Map a complete file read-only, and load its pages now instead of on first use."""
        _mapped(self._start, self._num_bytes, mmap.PROT_READ, descriptor)
        _libc.madvise(self._start, self._num_bytes, _MADV_POPULATE_READ)

    def map_to_write(self, descriptor: int, first: int, end: int) -> bool:
        """Map an empty part of a file, which must consist of whole large pages. Return whether the pages are large.

        Collapsing small pages into a large one requires that one of them exists. From Linux 6.1 on, this works even if
        the system does not use large pages for shared memory on its own (`shmem_enabled`).
        """
        start = self._start + first
        _mapped(start, end - first, mmap.PROT_READ | mmap.PROT_WRITE, descriptor, first)
        _libc.madvise(start, end - first, mmap.MADV_HUGEPAGE)
        for page in range(start, start + end - first, LARGE_PAGE):
            ctypes.memset(page, 0, 1)
        return bool(_libc.madvise(start, end - first, _MADV_COLLAPSE) == 0)

    def unmap(self) -> None:
        _mapped(self._start, self._num_bytes, _PROT_NONE)


class _GrowingFile:
    """A file in memory that grows while weights are packed into it. Leaving its context unmaps and closes it."""

    def __init__(self, name: str) -> None:
        most_bytes = 2**40  # limit for a model's weights; reserving addresses takes no memory
        self._addresses = _Addresses(most_bytes)
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._descriptor, 0o600)
        self._used = self._mapped = 0
        self.is_in_large_pages = True

    def __enter__(self) -> _GrowingFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._addresses.unmap()
        os.close(self._descriptor)

    @property
    def memory(self) -> ctypes.Array[Any]:
        return self._addresses.memory

    @property
    def num_bytes(self) -> int:
        """The bytes in use, rounded up to whole large pages."""
        return -(-self._used // LARGE_PAGE) * LARGE_PAGE

    def allocate(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        assert device is None or device.type == "cpu", "tensors on the meta device need no file"
        alignment = 64  # bytes of a cache line
        offset, count = -(-self._used // alignment) * alignment, prod(shape)
        self._used = offset + count * dtype.itemsize
        if self._used > self._mapped:
            end = -(-self._used // _GROWTH) * _GROWTH
            os.ftruncate(self._descriptor, end)
            is_large = self._addresses.map_to_write(self._descriptor, self._mapped, end)
            self.is_in_large_pages &= is_large
            self._mapped = end
        return torch.frombuffer(self.memory, dtype=dtype, offset=offset, count=count).view(shape)

    def finish(self, layout: bytes) -> int:
        """Append the layout, seal the file, and return a read-only descriptor of it."""
        os.ftruncate(self._descriptor, self.num_bytes)
        os.pwrite(self._descriptor, layout + self.num_bytes.to_bytes(_SIZE_BYTES, "little"), self.num_bytes)
        self._addresses.unmap()
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _WHOLE)
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)


def _layout_in(descriptor: int) -> tuple[int, bytes]:
    """Return the size of the weights, which is the last number in the file, and the layout stored before it."""
    end = os.fstat(descriptor).st_size - _SIZE_BYTES
    num_bytes = int.from_bytes(os.pread(descriptor, _SIZE_BYTES, end), "little")
    return num_bytes, os.pread(descriptor, end - num_bytes, num_bytes)


def _find(name: str) -> int | None:
    """Return a descriptor of a complete file that a process of this user has open under this name, or None."""
    for path in _open_files(f"/memfd:{name} (deleted)"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # the process has ended or belongs to another user
            continue
        if os.fstat(descriptor).st_uid == os.geteuid() and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _WHOLE:
            return descriptor
        os.close(descriptor)
    return None


def _open_files(target: str) -> Iterator[str]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{process}/fd"
        try:
            paths = [f"{folder}/{descriptor}" for descriptor in os.listdir(folder)]
        except OSError:  # the process has ended or belongs to another user
            continue
        yield from (path for path in paths if _target_of(path) == target)


def _target_of(link: str) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # the file has been closed
        return None


def _mapped(address: int | None, num_bytes: int, protection: int, descriptor: int = -1, offset: int = 0) -> int:
    """Map a file, or private memory if there is no descriptor. Replaces any mapping at `address`. Raises OSError."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE if descriptor < 0 else mmap.MAP_SHARED
    flags = kind if address is None else kind | _MAP_FIXED
    found: int | None = _libc.mmap(address, num_bytes, protection, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{num_bytes:,} bytes of memory cannot be mapped")
    return found
