"""Packed weights in memory that the processes of a machine share: the first packs them, the others map them.

The memory is a file without a folder (memfd), in large pages. Its name has a digest of all that the packed weights
depend on, and it is found by that among the open files of this user's processes; it lives as long as one of them has
it. When it is whole it is sealed: nothing can write it from then on, and only a sealed one is mapped. So a process that
ends while it packs leaves nothing behind.
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
from app.cores import own_nodes
from app.disk import locked_if_possible
from app.model.cpu.library import in_large_pages
from app.model.cpu.weights import Allocate, NativeWeights, weights_at
from app.progress import step_within

logger = logging.getLogger(__name__)

LARGE_PAGE = 2**21
_GROWTH = 16 * LARGE_PAGE  # each takes a system call that waits for all cores
_SIZE_BYTES = 8  # of the number at a file's end
_NAME = "carousel-weights"
# Not in Python: of Linux, the same on x86 and Arm.
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
    """With which processes weights are shared: those that have the same digest."""

    digest: str  # of the model's files, and of all else that packed weights depend on
    folder: Path  # has a file to lock, so that only one process packs


def shared_weights(pack: Pack, sharing: Sharing | None) -> NativeWeights:
    """Those of another process, else packed here. Their memory is let go of with the last of their tensors.

    pack: reads and packs them, into memory that it is given. sharing: None with no other process.
    """
    try:
        return _weights_in(_packed(pack, _NAME) if sharing is None else _found_or_packed(pack, sharing))
    except OSError as error:
        logger.warning("weights: in the memory of this process alone, which cannot have another: %s", error)
        return pack(in_large_pages)


def _found_or_packed(pack: Pack, sharing: Sharing) -> int:
    """A descriptor of a whole file, for processes on one NUMA node of its own."""
    name = "-".join(filter(None, (_NAME, sharing.digest, own_nodes())))
    without = "replicas that start at the same time do not share their weights"
    with locked_if_possible(sharing.folder / f"{name}.lock", without=without, waiting=_waiting):
        found = _find(name)
        if found is None:
            return _packed(pack, name)
        logger.info("weights: %.2f GiB are shared with another process", os.fstat(found).st_size / GIB)
        return found


def _packed(pack: Pack, name: str) -> int:
    """A descriptor of a new file."""
    began = time.monotonic()
    with _GrowingFile(name) as file:
        descriptor = file.finish(pack(file.allocate).layout(file.memory))
        logger.info(
            "weights: %.2f GiB packed in %.1f s, in %s pages",
            file.num_bytes / GIB, time.monotonic() - began, "large" if file.is_in_large_pages else "small",
        )  # fmt: skip
        return descriptor


def _weights_in(descriptor: int) -> NativeWeights:
    """Views of a whole file. It is closed with the last of them, so other processes find it until then."""
    num_bytes, layout = _layout_in(descriptor)
    addresses = _Addresses(num_bytes)
    addresses.map(descriptor)
    weakref.finalize(addresses.memory, os.close, descriptor)
    return weights_at(layout, addresses.memory)


@contextmanager
def _waiting() -> Iterator[None]:
    logger.info("weights: another process packs them; waiting for it")
    with step_within("waiting for the weights, which another replica loads"):
        yield


class _Addresses:
    """Addresses that stay reserved until nothing refers to their memory."""

    def __init__(self, num_bytes: int) -> None:
        """num_bytes: whole large pages. Raises OSError if there are no such addresses."""
        reserved = _mapped(None, num_bytes + LARGE_PAGE, _PROT_NONE)
        self._start, self._num_bytes = -(-reserved // LARGE_PAGE) * LARGE_PAGE, num_bytes
        self.memory: ctypes.Array[Any] = (ctypes.c_uint8 * num_bytes).from_address(self._start)
        weakref.finalize(self.memory, _libc.munmap, reserved, num_bytes + LARGE_PAGE).atexit = False

    def map(self, descriptor: int) -> None:
        """A whole file, read-only."""
        _mapped(self._start, self._num_bytes, mmap.PROT_READ, descriptor)
        _libc.madvise(self._start, self._num_bytes, _MADV_POPULATE_READ)

    def map_to_write(self, descriptor: int, first: int, end: int) -> bool:
        """A part of a file, whole large pages without content. Gives whether they are large ones.

        A page is made large when one of its small ones is there: also where the system has none for shared memory by
        itself (`shmem_enabled`), from Linux 6.1 on.
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
    """Memory that weights are packed into, one after the other."""

    def __init__(self, name: str) -> None:
        most_bytes = 2**40  # of a model's weights: addresses that are reserved while they are packed
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
        """In whole large pages."""
        return -(-self._used // LARGE_PAGE) * LARGE_PAGE

    def allocate(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        assert device is None or device.type == "cpu", "sizes alone need no file"
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
        """A descriptor to read the file, which nothing can write any more."""
        os.ftruncate(self._descriptor, self.num_bytes)
        os.pwrite(self._descriptor, layout + self.num_bytes.to_bytes(_SIZE_BYTES, "little"), self.num_bytes)
        self._addresses.unmap()
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _WHOLE)
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)


def _layout_in(descriptor: int) -> tuple[int, bytes]:
    """How many bytes of weights a file has, which is its end, and the layout between them and that."""
    end = os.fstat(descriptor).st_size - _SIZE_BYTES
    num_bytes = int.from_bytes(os.pread(descriptor, _SIZE_BYTES, end), "little")
    return num_bytes, os.pread(descriptor, end - num_bytes, num_bytes)


def _find(name: str) -> int | None:
    """A descriptor of a whole file of this name that a process of this user has open."""
    for path in _open_files(f"/memfd:{name} (deleted)"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # the process has ended, or is another user's
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
        except OSError:  # the process has ended, or is another user's
            continue
        yield from (path for path in paths if _target_of(path) == target)


def _target_of(link: str) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # it has been closed
        return None


def _mapped(address: int | None, num_bytes: int, protection: int, descriptor: int = -1, offset: int = 0) -> int:
    """Map a file, or nothing; at an address instead of what is there. Raises OSError."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE if descriptor < 0 else mmap.MAP_SHARED
    flags = kind if address is None else kind | _MAP_FIXED
    found: int | None = _libc.mmap(address, num_bytes, protection, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{num_bytes:,} bytes of memory cannot be mapped")
    return found
