"""A native model on a CPU that can be given up and loaded again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from app.engine.batch import Batch, StepResult
from app.model.adapters import read_adapter
from app.model.cpu.decoder import NativeDecoder
from app.model.runner import TorchModelRunner


class ReloadingRunner:
    """Runs batches on a model; asleep, it has neither weights nor KV memory."""

    def __init__(self, runner: TorchModelRunner, load: Callable[[], TorchModelRunner]) -> None:
        """load: a runner with the same weights and as much KV memory as `runner`, whose forward pass is native."""
        assert isinstance(runner.forward, NativeDecoder), "others are not reloaded"
        self._runner: TorchModelRunner | None = runner
        self._load = load
        self._adapting = runner.forward.adapting

    def run(self, batch: Batch) -> StepResult:
        """See ModelRunner."""
        assert self._runner is not None, "nothing is computed in sleep"
        return self._runner.run(batch)

    adapts = True  # see AdaptingRunner

    def load_adapter(self, folder: Path) -> object:
        """See AdaptingRunner; it may be asleep."""
        return self._adapting.prepare(read_adapter(folder, self._adapting.sizes))

    def unload_adapter(self, adapter: object) -> None:
        """As `TorchModelRunner` has it."""

    def sleep(self) -> None:
        """See Sleeping. What the allocator keeps goes back to the system."""
        self._runner = None
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def wake(self) -> None:
        """See Sleeping. Raises what loading raises."""
        self._runner = self._load()
