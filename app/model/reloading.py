"""A native model on a CPU that can be given up and loaded again."""

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
from app.model.loader import LoadedRunner, load_runner
from app.model.runner import TorchModelRunner
from app.model.ways.native_decoder import NativeModel


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

    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """It may be asleep."""
        weights = read_adapter(folder, self._adapting.sizes)
        make_room()
        return self._adapting.prepare(weights)

    def kv_memory(self) -> HostBlocks | None:
        runner = self._runner
        return None if runner is None else runner.kv_memory()

    def sleep(self) -> None:
        """What the allocator keeps goes back to the system."""
        memory = self.kv_memory()
        if memory is not None:
            memory.leave()  # a thread that waits for a folder may hold it
        self._runner = None
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def wake(self) -> None:
        """Raises what loading raises."""
        self._runner = self._load()


def runner_that_sleeps(config: EngineConfig, loaded: LoadedRunner) -> ModelRunner:
    """The model's runner, or one that loads the model again. Raises InvalidSetup where there is neither."""
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
