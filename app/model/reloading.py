"""A runner that can free a native model on a CPU and load it again."""

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
    """Runs batches on a model. While asleep, the runner has neither weights nor KV memory."""

    adapts = can_sleep = True

    def __init__(self, runner: TorchModelRunner, load: Callable[[], TorchModelRunner]) -> None:
        """load: returns a runner with the weights and number of KV blocks of `runner`, which must be native."""
        assert isinstance(runner.forward, NativeDecoder), "only native decoders are reloaded"
        self._runner: TorchModelRunner | None = runner
        self._load = load
        self._adapting = runner.forward.adapting

    def run(self, batch: StepBatch) -> StepResult:
        assert self._runner is not None, "nothing is computed in sleep"
        return self._runner.run(batch)

    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """Load an adapter. The runner may be asleep."""
        weights = read_adapter(folder, self._adapting.sizes)
        make_room()
        return self._adapting.prepare(weights)

    def kv_memory(self) -> HostBlocks | None:
        runner = self._runner
        return None if runner is None else runner.kv_memory()

    def sleep(self) -> None:
        """Free the model, and return the memory that the allocator caches to the system."""
        memory = self.kv_memory()
        if memory is not None:
            memory.release()  # a thread that waits for a folder may still reference it
        self._runner = None
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def wake(self) -> None:
        """Load the model again. Raises the errors of loading."""
        self._runner = self._load()


def runner_that_sleeps(config: EngineConfig, loaded: LoadedRunner) -> ModelRunner:
    """Return a runner that can sleep: the model's, or one that reloads it. Raises InvalidSetup if neither can."""
    if loaded.runner.can_sleep:
        return loaded.runner
    if not (isinstance(loaded.model, NativeModel) and isinstance(loaded.runner, TorchModelRunner)):
        raise InvalidSetup(
            f"replicas.sleep_after_s: {config.model.path} runs on transformers' code, which keeps its weights; only "
            f"the native decoder gives them up (the log says why it was not chosen). Set no sleep_after_s"
        )
    again = config.with_setting("cache.num_blocks", loaded.num_blocks).with_setting("speculation", SpeculationConfig())

    def load() -> TorchModelRunner:
        runner = load_runner(again).runner
        assert isinstance(runner, TorchModelRunner), "as at the start"
        return runner

    return ReloadingRunner(loaded.runner, load)
