"""Checks that this machine has enough memory for the replicas on its CPUs. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from app.config import GIB
from app.cores import available_memory, memory_of_machine
from app.errors import InvalidSetup

logger = logging.getLogger(__name__)


def check_host_memory(needed: str, num_bytes: int, way_out: str, *, detail: str = "") -> None:
    """Raise InvalidSetup if `num_bytes` exceeds the memory of this machine or the limit of its control groups.

    Call before the memory is allocated: a process that grows beyond its control group's limit is killed silently.

    needed: the message's subject and verb, such as "KV memory takes". way_out: which settings to change.
    """
    if num_bytes > memory_of_machine():
        raise InvalidSetup(f"{_compared(needed, num_bytes, detail, memory_of_machine())}: {way_out}")


@contextmanager
def allocating_host_memory(needed: str, num_bytes: int, way_out: str) -> Iterator[None]:
    """Wrap an allocation of `num_bytes` bytes. The arguments are those of `check_host_memory`.

    Logs a warning if the machine currently has fewer bytes available.

    Raises InvalidSetup like `check_host_memory`, or if the system refuses the memory to torch's allocator.
    """
    check_host_memory(needed, num_bytes, way_out)
    available = available_memory()
    if available is not None and num_bytes > available:
        compared = _compared(needed, num_bytes, "", available)
        logger.warning("%s available now, so this process may swap or be killed; %s", compared, way_out)
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        compared = _compared(needed, num_bytes, "", memory_of_machine())
        raise InvalidSetup(
            f"{compared}, but the system refuses to allocate them (see `ulimit -v` and vm.overcommit_memory); {way_out}"
        ) from error


def _compared(needed: str, num_bytes: int, detail: str, limit: int) -> str:
    return (
        f"{needed} {num_bytes / GIB:,.2f} GiB{detail}, and this machine and its control groups have "
        f"{limit / GIB:,.2f} GiB"
    )
