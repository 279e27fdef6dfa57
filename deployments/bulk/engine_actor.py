"""One engine of the pool, in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from app.build import ONE_DEVICE, Devices, build_matchers, build_sync_engine
from app.config import EngineConfig
from app.engine.request import ModelInfo
from app.jobs.job import EngineOutput
from app.model.location import resolve_model_path
from app.text import Tokenizer
from deployments.bulk.engine_worker import EngineWorker, PreparedItem
from deployments.threads import AskedThreads, keep_waits_for_the_interpreter_short, with_threads


class EngineActor:
    """A Ray actor. Items go in and come out by one call that is repeated.

    What has been given to it and has not come back is lost when it dies; its caller knows what that is.
    """

    def __init__(self, config: EngineConfig, threads: AskedThreads, devices: Devices = ONE_DEVICE) -> None:
        """`threads`: of all engines that run beside it, itself included."""
        self._config, self._threads, self._devices = config, threads, devices
        self._worker: EngineWorker | None = None

    def load(self) -> ModelInfo:
        """Load the model. Raises InvalidSetup. Not in the constructor: Ray reports its errors as a death."""
        config = with_threads(self._config, self._threads, num_ranks=self._devices.tensor_parallel)
        engine = build_sync_engine(config, self._devices)
        model = config.model
        tokenizer = Tokenizer.load(resolve_model_path(model.path), model.revision)
        self._worker = EngineWorker(engine, tokenizer, build_matchers(config, engine.facts))
        keep_waits_for_the_interpreter_short()
        gc.collect()
        gc.freeze()  # what was loaded stays: no later collection need look at it
        return engine.facts

    def exchange(self, items: Sequence[PreparedItem], at_least: int, within_s: float) -> EngineOutput:
        """Take items and give those that have ended, see `EngineWorker.collect`. Raises EngineStopped."""
        assert self._worker is not None, "items come after `load`"
        self._worker.add(items)
        return self._worker.collect(at_least=at_least, within_s=within_s)
