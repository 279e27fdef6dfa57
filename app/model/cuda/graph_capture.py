"""Captures functions on a GPU as CUDA graphs, each of which replays with a single launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Records a function on tensors at fixed addresses. The returned function repeats the work and overwrites the result.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

_NUM_WARM_UPS = 2  # first calls compile kernels and let cuBLAS allocate, neither of which can be captured


class CudaCapture:
    """Captures functions as graphs, which share one memory pool: no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.renew()
        # Warm-ups and captures share one stream, because cuBLAS allocates a workspace of some 32 MiB for each stream.
        # Nothing else uses this stream: when another owner's graph on the stream is destroyed, torch frees the
        # workspace although the remaining graphs use it (pytorch issue 193402).
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def renew(self) -> None:
        """Start a new memory pool. Needed after all graphs are destroyed, because their pool cannot be reused."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the device work of `function`. Returns a function that replays the work and returns the same tensor.

        Raises RuntimeError if `function` waits for the device or reads from the device.
        """
        stream = torch.cuda.current_stream(self._device)
        # Restore the current stream in any case: a failed capture leaves its own stream current.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._warm_up(function, stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, of another engine or of Ray, may use the device during the capture.
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
    """Collect garbage once, then pause collections, because freeing a graph or an event could break a capture."""
    is_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
