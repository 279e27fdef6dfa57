"""The modules of Triton kernels, imported on first use: a machine without Triton imports what launches them, too."""

from __future__ import annotations

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
