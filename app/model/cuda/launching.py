"""The modules of Triton kernels, and work beside the steps.

Kernels are imported on first use: a machine without Triton imports what launches them, too.
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
    """The kernels in a module of this package, for a device; `NoKernels` for the meta device."""
    return NoKernels() if device.type == "meta" else import_module(f"app.model.cuda.{module}")


class NoKernels:
    """For a model on the meta device, where tensors have sizes and nothing is computed. Needs no Triton."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def beside_steps(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Around copies to memory that later steps do not read before they are complete: after the steps launched so far,
    beside those launched meanwhile. Waits for the copies."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
