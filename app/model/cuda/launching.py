"""Imports Triton kernels on first use, and runs copies alongside steps.

Machines without Triton also import the modules that launch kernels, so these modules must not import kernels directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def kernels_of(module: str, device: torch.device) -> Any:
    """Import and return a module of kernels from this package. Returns `NoKernels` for the meta device."""
    return NoKernels() if device.type == "meta" else import_module(f"app.model.cuda.{module}")


class NoKernels:
    """Replaces kernels with no-ops on the meta device, where tensors have no data. Does not need Triton."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def copy_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run copies on a stream, after the steps launched so far. Blocks at the end until the copies are done.

    Later steps may run at the same time, so they must not use the copied memory. If `stream` is None, nothing changes.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
