"""A native model on a CPU that can be given up and loaded again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from app.engine.batch import StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.model.adapters import read_adapter
from app.model.cpu.decoder import NativeDecoder
from app.model.runner import TorchModelRunner


class ReloadingRunner(ModelRunner):
    """Runs batches on a model; asleep, it has neither weights nor KV memory."""

    adapts = can_sleep = True

    def __init__(self, runner: TorchModelRunner, load: Callable[[], TorchModelRunner]) -> None:
        """load: a runner with the same weights and as much KV memory as `runner`, whose forward pass is native."""
        assert isinstance(runner.forward, NativeDecoder), "others are not reloaded"
        self._runner: TorchModelRunner | None = runner
        self._load = load
        self._adapting = runner.forward.adapting

    def run(self, batch: StepBatch) -> StepResult:
        assert self._runner is not None, "nothing is computed in sleep"
        return self._runner.run(batch)

    def load_adapter(self, folder: Path) -> object:
        """It may be asleep."""
        return self._adapting.prepare(read_adapter(folder, self._adapting.sizes))

    def sleep(self) -> None:
        """What the allocator keeps goes back to the system."""
        self._runner = None
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def wake(self) -> None:
        """Raises what loading raises."""
        self._runner = self._load()
