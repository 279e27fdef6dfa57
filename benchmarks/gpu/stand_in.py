"""What takes the place of a GPU in a run that stands in: the code around it is that of a GPU, its kernels run in
Triton's interpreter, graphs do their work again. Nothing here says anything about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch


class WorkAgain:
    """Stands for `CudaCapture`: like a graph it writes each result to where the first one was."""

    def __init__(self, device: torch.device) -> None:
        """device: is not used."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = function()
        return lambda: output.copy_(function())


@contextmanager
def standing_in() -> Iterator[None]:
    """The engine takes the CPU for a GPU: where it would choose Triton's kernels and graphs, it does."""
    with ExitStack() as patches:
        for name, replacement in {
            "app.model.cuda.attention.TritonAttention.fits": staticmethod(lambda device: True),
            "app.model.ways.gpu.CudaCapture": WorkAgain,
            "app.model.ways.gpu.verify_steps": lambda *_, **__: None,  # many steps, and the interpreter is slow
            "app.model.verification.NUM_TOKENS": 4,
            "torch.cuda.synchronize": lambda device=None: None,
        }.items():
            patches.enter_context(patch(name, replacement))
        yield
