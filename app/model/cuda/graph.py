"""Work on a CUDA device recorded once and replayed as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NUM_WARM_UPS = 2  # compiles kernels, lets cuBLAS choose and allocate; what happens for the first time is not captured


class CudaCapture:
    """Captures functions into graphs that share one pool of memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record what `function` does on the device; the result replays it and returns the tensor it leaves it in.

        The function may neither wait for the device nor read anything from it.

        Raises:
            RuntimeError: it does.
        """
        stream = torch.cuda.current_stream(self._device)
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(stream),
        ):  # a failed capture leaves its own stream behind
            self._warm_up(function, stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device: another engine's, or Ray's.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> None:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(side)
