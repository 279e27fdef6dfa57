"""Runs several engines on a backlog of items, and replaces engines that die.

Each engine always has one call in flight, which sends it new items and returns ended ones. An engine is given three
times as many requests as it can run concurrently, so that it does not run idle before the next call. Items never wait
for each other. docs/design/jobs.md explains why Ray Data's `map_batches`, which sends items in blocks, is not used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from app.build import ONE_DEVICE, build_matchers, build_sync_engine
from app.config import EngineConfig, ReplicasConfig, ServedModelConfig
from app.engine.request import ModelInfo
from app.errors import Failure, InvalidSetup
from app.jobs.job import EngineOutput
from app.jobs.outputs import RecordFormat
from app.jobs.results import PartialOutputs
from app.jobs.runner import Executor, JobRun
from app.model.location import resolve_model_path
from app.text import Tokenizer
from deployments.bulk.engine_worker import EngineWorker, PreparedItem
from deployments.serve.process import freeze_loaded
from deployments.threads import RequestedThreads, pin_to_near_cpus, shorten_gil_switch_interval, with_threads

logger = logging.getLogger(__name__)


class EnginePool(Executor[PreparedItem]):
    """Computes the items of a run on its own engines."""

    def __init__(self, served: ServedModelConfig, run: JobRun[PreparedItem], partial: PartialOutputs) -> None:
        """Run one engine for each replica of `served`. `partial` stores tokens after which items resume."""
        super().__init__(run)
        self._served = served
        self._threads = [served.engine.model.num_threads] * self._size * served.replicas.tensor_parallel
        self._partial = partial
        self._form = RecordFormat()
        self._window = 3 * served.engine.scheduler.max_running
        self._num_ready = 0  # engines that have loaded their model and are alive
        self._num_deaths_in_a_row = 0
        self._model_info: Any = None  # Ray reference to a `ModelInfo`

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._work(number) for number in range(self._size)]

    @property
    def state(self) -> str:
        return f"{self._num_ready} of {self._size} engines are ready"

    @property
    def num_wanted(self) -> int:
        return self._size * self._window

    @property
    def _size(self) -> int:
        return self._served.replicas.num_replicas

    async def model_info(self) -> Any:
        """Return a Ray reference to the `ModelInfo` of an engine, which may still be loading."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._model_info is not None)
        return self._model_info

    async def _work(self, number: int) -> None:
        """Run one engine until no items are left, and replace it whenever it dies.

        Raises:
            InvalidSetup: the model cannot be loaded.
            Failure: several engines in a row have died without finishing an item.
        """
        while not self._is_over:
            actor = self._start()
            try:
                await self._load(actor)
                try:
                    await self._exchange_until_over(number, actor)
                finally:
                    self._num_ready -= 1
            except (RayError, TimeoutError) as error:
                self._lose(number, error)
                await self.has_changed()
            finally:
                ray.kill(actor)

    def _start(self) -> Any:
        replicas = self._served.replicas
        remote = ray.remote(EngineActor).options(
            num_cpus=replicas.reserved_cpus, num_gpus=replicas.reserved_gpus, max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD",  # by default, Ray would fill one machine first
        )  # fmt: skip
        return remote.remote(self._served.engine, self._threads, replicas)

    async def _load(self, actor: Any) -> None:
        model_info = actor.load.remote()
        if self._model_info is None:
            self._model_info = model_info
            await self.has_changed()
        try:
            await model_info
        except RayTaskError as error:
            raise InvalidSetup(f"the model cannot be loaded: {reason(error)}") from error
        except RayError:
            self._model_info = None if self._model_info is model_info else self._model_info
            raise
        self._num_ready += 1
        self._run.ready()

    async def _exchange_until_over(self, number: int, actor: Any) -> None:
        collect_within_s = 0.25
        hang_s = 120.0
        while True:
            if not self._backlog.items_on(number):
                await self._wait_for_items(number)
                if self._is_over:
                    return
            room = self._window - self._backlog.num_requests_on(number)
            if len(self._backlog.items_on(number)) < 2:  # send the next item before a large item ends
                room = max(room, 1)
            items = self._backlog.take(number, room=room, input_is_over=self._input_is_over)
            if items:
                await self.has_changed()  # the reader can continue, because the backlog has room again
            call = actor.exchange.remote(
                [item.continued_after(self._partial.token_ids(item.number)) for item in items],
                self._window // 3,
                collect_within_s,
            )
            async with asyncio.timeout(hang_s):  # `wait_for` loses cancellations in Python 3.11
                output: EngineOutput = await call
            await self._book(number, output)

    async def _wait_for_items(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_over or self._backlog.has_items_for(number, input_is_over=self._input_is_over)
            )

    async def _book(self, number: int, output: EngineOutput) -> None:
        self._backlog.begin(number, output.begun)
        self._run.generated(output, map(self._form.generated, output.outputs))
        self._backlog.settle(number, [each.number for each in output.outputs])
        if output.outputs:
            self._num_deaths_in_a_row = 0
        if self._is_over:
            await self.has_changed()

    def _lose(self, number: int, error: Exception) -> None:
        self._num_deaths_in_a_row += 1
        num_items = len(self._backlog.items_on(number))
        logger.warning("engine %d was lost; its %d items return to the backlog: %s", number, num_items, reason(error))
        loss = self._backlog.lose(number)
        self._run.lost(loss)
        if loss.given_up:
            self._num_deaths_in_a_row = 0
        max_deaths_in_a_row = 8
        if self._num_deaths_in_a_row > max_deaths_in_a_row:
            raise Failure(
                f"{self._num_deaths_in_a_row} engines in a row died without finishing an item; the last error: "
                f"{reason(error)}. The results so far have been saved: fix the cause, then resume with --resume"
            )


class EngineActor:
    """A Ray actor that runs one engine in its own process. The caller calls `exchange` repeatedly.

    If the actor dies, the caller must send the items that have not been returned to another actor.
    """

    def __init__(self, config: EngineConfig, threads: RequestedThreads, replicas: ReplicasConfig = ONE_DEVICE) -> None:
        """`threads` lists `model.num_threads` for every rank of every engine in the run, including this engine."""
        self._config, self._threads, self._replicas = config, threads, replicas
        self._worker: EngineWorker | None = None

    def load(self) -> ModelInfo:
        """Load the model. Raises InvalidSetup. If `__init__` raised it, Ray would only report a dead actor."""
        config = with_threads(self._config, self._threads, num_ranks=self._replicas.tensor_parallel)
        pin_to_near_cpus(self._threads, self._replicas)
        engine = build_sync_engine(config, self._replicas)
        model = config.model
        tokenizer = Tokenizer.load(resolve_model_path(model.path), model.revision)
        self._worker = EngineWorker(engine, tokenizer, build_matchers(config, engine.model_info))
        shorten_gil_switch_interval()
        freeze_loaded()
        return engine.model_info

    def exchange(self, items: Sequence[PreparedItem], at_least: int, within_s: float) -> EngineOutput:
        """Add items, and return ended items and progress. See `EngineWorker.collect`. Raises EngineStopped."""
        assert self._worker is not None, "`load` must be called before `exchange`"
        self._worker.add(items)
        return self._worker.collect(at_least=at_least, within_s=within_s)


def reason(error: Exception) -> str:
    """Return the first line of an error's message, or of its cause if Ray passed the error on."""
    cause = getattr(error, "cause", None)
    lines = str(cause or error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
