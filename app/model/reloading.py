"""Lets a replica on a CPU sleep: frees its native model and loads it again on the next request."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from app.config import EngineConfig, SpeculationConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.errors import InvalidSetup
from app.model.adapters import read_adapter
from app.model.cpu.decoder import NativeDecoder
from app.model.host_blocks import HostBlocks
from app.model.implementations.native_decoder import NativeModel
from app.model.loader import LoadedRunner, load_runner
from app.model.runner import TorchModelRunner


class ReloadingRunner(ModelRunner):
    """Runs batches like the wrapped runner. While asleep, it holds neither weights nor KV memory."""

    adapts = can_sleep = True

    def __init__(self, runner: TorchModelRunner, load: Callable[[], TorchModelRunner]) -> None:
        """load: returns a new runner with the same weights and number of KV blocks. runner: must be native."""
        assert isinstance(runner.forward, NativeDecoder), "only native decoders are reloaded"
        self._runner: TorchModelRunner | None = runner
        self._load = load
        self._adapting = runner.forward.adapting

    def run(self, batch: StepBatch) -> StepResult:
        assert self._runner is not None, "no step may run while asleep"
        return self._runner.run(batch)

    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """See `ModelRunner.load_adapter`. Works while asleep."""
        weights = read_adapter(folder, self._adapting.sizes)
        make_room()
        return self._adapting.prepare(weights)

    def kv_memory(self) -> HostBlocks | None:
        runner = self._runner
        return None if runner is None else runner.kv_memory()

    def sleep(self) -> None:
        """Free the model, and make the allocator return its memory to the system."""
        memory = self.kv_memory()
        if memory is not None:
            memory.release()  # a thread that is waiting for a folder may still hold a reference
        self._runner = None
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def wake(self) -> None:
        """Load the model again. Raises like `load_runner`."""
        self._runner = self._load()


def runner_that_sleeps(config: EngineConfig, loaded: LoadedRunner) -> ModelRunner:
    """Return the loaded runner if it can sleep, or one that reloads the model. Raises InvalidSetup if neither works."""
    if loaded.runner.can_sleep:
        return loaded.runner
    if not (isinstance(loaded.model, NativeModel) and isinstance(loaded.runner, TorchModelRunner)):
        raise InvalidSetup(
            f"replicas.sleep_after_s: {config.model.path} runs on transformers' code, which cannot release its "
            f"weights. Only the native decoder can; see the log for why it was not chosen. Remove sleep_after_s"
        )
    again = config.with_setting("cache.num_blocks", loaded.num_blocks).with_setting("speculation", SpeculationConfig())

    def load() -> TorchModelRunner:
        runner = load_runner(again).runner
        assert isinstance(runner, TorchModelRunner), "the same settings yield the same kind of runner"
        return runner

    return ReloadingRunner(loaded.runner, load)
