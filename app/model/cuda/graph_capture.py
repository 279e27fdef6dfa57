"""Captures work on a GPU as CUDA graphs, which are replayed with one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Takes a function on tensors at fixed addresses. Returns a function that repeats the work and writes its result to the
# same tensor.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

_NUM_WARM_UPS = 2  # a first call compiles kernels, and cuBLAS chooses and allocates: none of this can be captured


class CudaCapture:
    """Captures functions as graphs. The graphs share one memory pool, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.renew()
        # All warm-ups and captures share one stream, which has no other work. cuBLAS has a workspace of some 32 MiB for
        # each stream. When a graph of another owner on the same stream is destroyed, torch frees the workspace although
        # the remaining graphs use it (pytorch issue 193402).
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def renew(self) -> None:
        """Use a new memory pool from now on: a pool cannot be used again after all its graphs are destroyed."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the work of `function` on the device. Returns a function that replays it and returns the same tensor.

        Raises:
            RuntimeError: `function` waits for the device or reads from the device.
        """
        stream = torch.cuda.current_stream(self._device)
        # Restores the current stream: a failed capture would leave its own stream as the current one.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._warm_up(function, stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device during the capture: threads of another engine, or of Ray.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> None:
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(self._stream)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage once, then disable collection: freeing a graph or an event could break a capture under way."""
    is_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
