"""Imports modules of Triton kernels, and runs copies beside the steps.

Kernels are imported on first use, because a machine without Triton also imports the modules that launch the kernels.
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
    """Return the kernels in a module of this package for a device, or `NoKernels` for the meta device."""
    return NoKernels() if device.type == "meta" else import_module(f"app.model.cuda.{module}")


class NoKernels:
    """Kernels that do nothing, for a model on the meta device, where tensors have only sizes. Triton is not needed."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def copy_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run copies after the steps launched so far, beside later steps that do not read the memory. Waits at the end."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
