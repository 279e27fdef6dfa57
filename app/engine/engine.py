"""The engine: schedule, run, update. All other modules of this package serve `Engine.step`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from app.config import SchedulerConfig
from app.engine.adapter_store import AdapterStore, HeldAdapter
from app.engine.batch import EMPTY_BATCH, StepBatch, StepLimits, StepResult, kept_tokens
from app.engine.in_flight import InFlight
from app.engine.isolation import DeviceFailed, Quarantine, run_in_parts, run_or_error
from app.engine.matcher import Matcher, TokenSet
from app.engine.model_runner import ModelRunner
from app.engine.observer import EndedStep, StepObserver
from app.engine.prefix import Prefix
from app.engine.request import Address, ModelInfo, Request, TokenDelta
from app.engine.request_checks import check_request
from app.engine.scheduler import Scheduler
from app.engine.sequence import EngineSequence
from app.engine.snapshot import EngineSnapshot
from app.engine.stats import EngineMeasurements, EngineStats, MeasurementCollector
from app.engine.trace.entries import FailureKind
from app.engine.trace.viewer import Viewer
from app.engine.tuner import Tuner, Tuning
from app.errors import InvalidRequest, InvalidSetup, Quarantined, StepFailed, described, traceback_of

logger = logging.getLogger(__name__)

NO_ADAPTERS = (
    "this replica does not support adapters, which require replicas.tensor_parallel: 1 and a model that is neither an "
    "encoder nor simulated; on a GPU, also set engine.model.max_loaded_adapters, because the memory for adapters is "
    "allocated at startup"
)


class Engine:
    """A scheduler and a model runner behind `add`, `abort` and `step`. For use by one thread, unless stated otherwise.

    If the runner can launch steps, each is launched before the previous step's results are read (see `InFlight`).
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        model_info: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
        largest_step: SchedulerConfig | None = None,
        recorder: StepObserver | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """clock: returns monotonic seconds. largest_step: the limits for which memory was sized, or None if it was not.

        recorder: observes every event and decision. adapters: if None, requests with an adapter are rejected.
        """
        self.model_info = model_info
        self.adapters = adapters
        self._scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._largest_step = largest_step
        self._measurements = MeasurementCollector(settings=scheduler.config.version)
        # Measurements come first, because they complete the deltas. The tuner comes last, because the other observers
        # must learn of a step's events before they learn of the tuner's changes.
        self._observers: list[StepObserver] = [self._measurements]
        if recorder is not None:
            self._observers.append(recorder)
        self._viewer: Viewer | None = None  # from the first `snapshot` to `end_snapshots`
        self._tuner = self._new_tuner()
        self._quarantine = Quarantine()
        self._is_asleep = False
        self._in_flight: InFlight | None = None
        self._has_failed = False  # whether a launched step failed, so that the next one must run unlaunched

    def prepare(self) -> None:
        """Do the first step's slow preparations in advance. Call at most once, in the thread that calls `step`."""
        self.runner.prepare()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended. The next step may still have to wait for a timer (see `idle_s`)."""
        return self._scheduler.has_work

    @property
    def idle_s(self) -> float | None:
        """Seconds until the next step has work if no request arrives: 0 if it has work now, None if never."""
        if self._in_flight is not None:
            return 0.0
        now = self._clock()
        due_at = self._scheduler.expires_at(now) if self._is_asleep else self._scheduler.due_at(now)
        return None if due_at is None else max(0.0, due_at - now)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the engine can never serve the request. Changes nothing. Thread-safe."""
        check_request(request, self.model_info)
        if request.adapter is not None and self.adapters is None:
            raise InvalidRequest(NO_ADAPTERS, param="model")
        if self._quarantine.holds(request):
            raise Quarantined(
                "this prompt with these sampling parameters has made the model fail before; it will not be retried",
                param="prompt",
                code="quarantined",
            )

    def add(self, request: Request, *, arrived_at: float | None = None, matcher: Matcher | None = None) -> None:
        """Queue a request that arrived now, or at `arrived_at` by the engine's clock.

        A request with a grammar requires a matcher that has advanced past the request's generated tokens.

        Raises:
            InvalidRequest: the request can never be served, or a request with this id is being served.
            UnsupportedAdapter, Overloaded: the request's adapter cannot be loaded.
        """
        self.check(request)
        assert (matcher is None) == (request.sampling.grammar is None), "a grammar requires a matcher"
        adapter = None
        if request.adapter is not None and self.adapters is not None:
            adapter = self.adapters.hold(request.adapter, tenant=request.tenant)
        self.add_checked(request, arrived_at=arrived_at, matcher=matcher, adapter=adapter)

    def add_checked(
        self,
        request: Request,
        *,
        arrived_at: float | None = None,
        matcher: Matcher | None = None,
        adapter: HeldAdapter | None = None,
    ) -> None:
        """Queue a request that the caller has already passed to `check`, in any thread.

        The caller must also have loaded the request's adapter. The engine releases the adapter when the request ends.

        Raises:
            InvalidRequest: a request with this id is being served.
        """
        assert (adapter is None) == (request.adapter is None), "the request's adapter was not loaded"
        if self._scheduler.has_request(request.request_id):
            raise InvalidRequest(
                f"the request id {request.request_id} is already in use; send another one", param="request_id"
            )
        now = self._clock() if arrived_at is None else arrived_at
        if matcher is None and request.sampling.allowed_token_ids:
            matcher = TokenSet(request.sampling.allowed_token_ids, vocab_size=self.model_info.vocab_size)
        self._scheduler.add(request, now=now, matcher=matcher, adapter=adapter)
        for observer in self._observers:
            observer.arrived(request, at=now)

    def now(self) -> float:
        """Return the time of the engine's clock in seconds. Thread-safe."""
        return self._clock()

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request and free its blocks. Returns the last delta, or None if the request has already ended."""
        delta = self._scheduler.abort(request_id)
        if delta is not None:
            for observer in self._observers:
                observer.aborted(request_id)
        return delta

    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence by one step. Computes nothing while the strategy waits.

        If the runner can launch steps, each call launches one and returns the deltas of the step launched before it.

        If the model runner raises, the engine runs the batch in parts. Requests that make a part fail end with an
        error (a delta with `error`). The other requests continue with unchanged tokens. If the step was launched, the
        engine undoes the launched steps, and the next call computes a step without launching it.

        While the engine sleeps, this method only ends overdue requests.

        Raises:
            StepError: every part failed, so the device is at fault. The error names the requests, which have ended.
            DeviceLost: no further step can be computed; the engine must no longer be used.
        """
        for observer in self._observers:
            observer.step_began()
        before, self._in_flight = self._in_flight, None
        if before is None and (self._is_asleep or self._has_failed or not self.runner.launches):
            self._has_failed = False
            batch = EMPTY_BATCH if self._is_asleep else self._schedule()
            return self._settle(batch, self._run(batch)) if batch else self._end_without_step()
        if before is None or not (self._has_failed or self._is_waited_for(before.batch)):
            self._in_flight = self._launch(is_ahead=before is not None)
        return self._end_without_step() if before is None else self._settle_launched(before)

    def _is_waited_for(self, batch: StepBatch) -> bool:
        """Whether the next step must not be scheduled until the tokens of this batch are known."""
        if batch.has_drafts or batch.launched_alone:  # after waiting in vain for drafts, do not wait again
            return batch.has_drafts
        return self._scheduler.hopes_for_drafts()

    def _schedule(self, *, is_ahead: bool = False) -> StepBatch:
        batch = self._scheduler.schedule(self._clock(), is_ahead=is_ahead)
        for observer in self._observers:
            observer.scheduled(batch)
        return batch

    def _launch(self, *, is_ahead: bool) -> InFlight | None:
        batch = self._schedule(is_ahead=is_ahead)
        if not batch:
            return None  # all sequences wait for their last token, or the strategy waits for its timer
        pending = run_or_error(self.runner.launch, batch)
        if isinstance(pending, Exception):  # no sequence has advanced, so the same batch will be scheduled again
            self._retry_after(FailureKind.LAUNCH, batch, pending)
            return None
        step = InFlight(batch, pending)
        if not batch.lacks_history:
            step.commit()
        return step

    def _draw(self, step: InFlight) -> InFlight | None:
        """Draw the tokens of a launched step, now that the tokens of the previous step are known."""
        step.batch = self._scheduler.with_history(step.batch)
        error = run_or_error(step.pending.draw, step.batch)
        if isinstance(error, Exception):  # handled like a failed launch
            self._retry_after(FailureKind.LAUNCH, step.batch, error)
            return None
        step.commit()
        return step

    def _settle_launched(self, step: InFlight) -> list[TokenDelta]:
        """Wait for the result of a launched step and return its deltas. If the step failed, undo all launched steps."""
        result = run_or_error(step.pending.result)
        if not isinstance(result, Exception):
            return self._settle(step.batch, result, is_committed=step.is_committed)
        self._retry_after(FailureKind.RESULT, step.batch, result)
        self._discard_in_flight()  # that step reads the failed step's tokens
        step.roll_back()
        return self._end_without_step()

    def _settle(self, batch: StepBatch, result: StepResult, *, is_committed: bool = False) -> list[TokenDelta]:
        """Process a step's result and return the deltas. Rejected drafts are dropped."""
        if batch.has_drafts:
            result = kept_tokens(batch, result)
        self._fail_unmatched(batch)
        for observer in self._observers:
            observer.sampled(batch, result.token_ids, result.num_kept)
        ended_at = self._clock()
        deltas = self._scheduler.update(batch, result, now=ended_at, is_committed=is_committed)
        if self._in_flight is not None and self._in_flight.batch.lacks_history:
            self._in_flight = self._draw(self._in_flight)
        return self._end_step(batch, deltas, at=ended_at)

    def _discard_in_flight(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is not None:
            step.discard()

    def _retry_after(self, how: FailureKind, batch: StepBatch, error: Exception) -> None:
        logger.warning("a step of %d requests failed and will be retried: %s", len(batch.scheduled), described(error))
        self._note_failed(how)
        self._has_failed = True

    def _end_step(self, batch: StepBatch, deltas: list[TokenDelta], *, at: float) -> list[TokenDelta]:
        throughput = self._scheduler.throughput
        step = EndedStep(batch, deltas, at, throughput.last_step_s, throughput.last_gap_s)
        for observer in self._observers:
            observer.step_ended(step)
        return deltas

    def _end_without_step(self) -> list[TokenDelta]:
        """Return the deltas of sequences that ended without a step."""
        ended_at = self._clock()
        deltas = self._scheduler.update(EMPTY_BATCH, StepResult([]), now=ended_at)
        return self._end_step(EMPTY_BATCH, deltas, at=ended_at)

    def _note_failed(self, how: FailureKind, sequences: Sequence[EngineSequence] = ()) -> None:
        for observer in self._observers:
            observer.failed(how, sequences)

    @property
    def running(self) -> list[EngineSequence]:
        """The running sequences in order. The caller must not change the list."""
        return self._scheduler.running

    def _run(self, batch: StepBatch) -> StepResult:
        result = run_or_error(self.runner.run, batch)
        return self._run_in_parts(batch, result) if isinstance(result, Exception) else result

    def _run_in_parts(self, batch: StepBatch, error: Exception) -> StepResult:
        try:
            found = run_in_parts(self.runner.run, batch, error)
        except DeviceFailed:
            if len(batch.scheduled) == 1:  # the request may be at fault, not the device, so count the failure
                self._quarantine.note_failure(batch.sequences[0].request)
            self._note_failed(FailureKind.DEVICE, batch.sequences)
            raise StepError(self._scheduler.fail(batch)) from error
        self._note_failed(FailureKind.REQUESTS, [sequence for sequence, _ in found.culprits])
        if not found.culprits:
            logger.warning(
                "a step of %d requests failed, but succeeded when it was split: %s",
                len(batch.scheduled),
                described(error),
            )
        for sequence, failure in found.culprits:
            logger.error("request %s made its step fail: %s", sequence.request.request_id, traceback_of(failure))
            self._quarantine.note_failure(sequence.request)
            self._scheduler.fail_one(
                sequence, StepFailed("this request made the model fail; other requests were not affected")
            )
        return found.result(batch)

    def _fail_unmatched(self, batch: StepBatch) -> None:
        """End the requests whose matcher could not compute the allowed tokens of this step."""
        failed = [each for each in batch.sequences if each.matcher is not None and each.matcher.failure is not None]
        if failed:
            self._note_failed(FailureKind.MATCHERS, failed)
        for sequence in failed:
            assert sequence.matcher is not None, "`failed` has only sequences with a matcher"
            grammar = sequence.request.sampling.grammar
            param = None if grammar is None else grammar.param
            error = InvalidRequest(sequence.matcher.failure or "", param=param, code="grammar_too_complex")
            self._scheduler.fail_one(sequence, error)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Replace the scheduler settings from the next step on. No request is lost.

        Raises:
            InvalidSetup: memory was sized for smaller steps. The settings are unchanged.
        """
        largest = self._largest_step
        for name in ("max_step_tokens", "max_running"):
            if largest is not None and getattr(config, name) > getattr(largest, name):
                raise InvalidSetup(
                    f"scheduler.{name}: got {getattr(config, name):,}, but this replica's memory was sized for "
                    f"{getattr(largest, name):,} at startup; to raise this limit, change the application's `args`"
                )
        self._scheduler.reconfigure(config)
        for observer in self._observers:
            observer.reconfigured(config)
        self._stop_observing(self._tuner)
        self._tuner = self._new_tuner()

    def limit(self, limits: StepLimits) -> None:
        """Replace the step limits from the next step on, until `reconfigure`. No limit may exceed the settings."""
        self._scheduler.limits = limits
        for observer in self._observers:
            observer.limited(limits)

    def on_prefixes(self, note_held: Callable[[Prefix, bool], None]) -> None:
        """See `BlockPool.on_prefixes`. Must be called in the engine's thread."""
        self._scheduler.pool.on_prefixes(note_held)

    def serve_prefixes(self, host: str) -> Address | None:
        """Let other replicas fetch prefixes from KV memory. Returns the address, or None if no store supports this.

        Thread-safe. Raises OSError if this machine does not have the address `host`.
        """
        return self._scheduler.fetches.serve(host)

    def clear_prefix_cache(self) -> None:
        """Drop every cached prefix. Later prompts are then computed from their start."""
        self._scheduler.pool.clear_cache()
        for observer in self._observers:
            observer.cache_cleared()

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def sleep(self) -> None:
        """Release the memory of the weights and the KV cache until `wake`.

        Running requests return to the queue and are recomputed after `wake`, with the same tokens. Requests may be
        added and aborted while the engine sleeps, and their deadlines still apply.
        """
        assert not self._is_asleep, "the engine is asleep"
        self._discard_in_flight()
        self._is_asleep = True
        self._scheduler.release_memory()
        for observer in self._observers:
            observer.slept()
        if self.adapters is not None:
            self.adapters.unload_unused()
        self.runner.sleep()
        if self._scheduler.drafter is not None:
            self._scheduler.drafter.sleep()

    def wake(self) -> None:
        """Allocate the memory again, which may take seconds. If the model runner raises, the engine stays asleep."""
        assert self._is_asleep, "the engine is awake"
        self.runner.wake()
        try:
            if self._scheduler.drafter is not None:
                self._scheduler.drafter.wake()
        except BaseException:
            self.runner.sleep()
            raise
        self._is_asleep = False
        for observer in self._observers:
            observer.woke()

    def close(self) -> None:
        """Write the recorder's buffered events and stop the runner's processes. Do not use the engine afterwards.

        Every part is closed even if another raises. The last error is then raised.
        """
        with ExitStack() as last_first:
            last_first.callback(self.runner.close)
            store = self._scheduler.fetches.store
            if store is not None:
                last_first.callback(store.close)
            if self.adapters is not None:
                last_first.callback(self.adapters.close)
            for observer in reversed(self._observers):
                last_first.callback(observer.close)

    def check_health(self) -> None:
        """Raise DeviceLost if the engine can no longer compute steps. Thread-safe."""
        self.runner.check()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def snapshot(self, *, is_full: bool = True) -> EngineSnapshot:
        """Return the running and waiting requests and recent events. The first call starts recording events.

        If `is_full` is false, `EngineSnapshot.reported` lists the requests that have only grown since the last call.
        """
        now = self._clock()
        if self._viewer is None:
            self._viewer = Viewer(self._scheduler.running, now=now)
            self._observers.insert(1, self._viewer)
        return self._viewer.snapshot(self._scheduler, self.tuning, now=now, is_full=is_full)

    def end_snapshots(self) -> None:
        self._stop_observing(self._viewer)
        self._viewer = None

    @property
    def tuning(self) -> Tuning | None:
        """The limits since the tuner's last decision, or None without targets. May be read from any thread."""
        return None if self._tuner is None else self._tuner.tuning

    def measurements(self) -> EngineMeasurements:
        """Return all measurements since the engine started. Thread-safe."""
        scheduler = self._scheduler
        return EngineMeasurements(
            max_running=scheduler.limits.max_running,
            block_size=scheduler.pool.block_size,
            num_outstanding_tokens=scheduler.num_outstanding_tokens,
            num_padding_tokens=self.runner.num_padding_tokens,
            num_steps_without_graph=self.runner.num_steps_without_graph,
            backend=self.runner.backend,
            tuning=self.tuning,
            adapters=None if self.adapters is None else self.adapters.stats(),
            sleep=None,  # `AsyncEngine.measurements` adds the statistics of its `SleepController`
            store=scheduler.fetches.stats(),
            **self._measurements.distributions(),
        )

    def _new_tuner(self) -> Tuner | None:
        """Return a tuner that observes from now on, or None if the current settings have no targets."""
        if not self._scheduler.config.targets:
            return None
        tuner = Tuner(self._scheduler.config, running=self._scheduler.running, limit=self.limit)
        self._observers.append(tuner)
        return tuner

    def _stop_observing(self, observer: StepObserver | None) -> None:
        if observer is not None:
            self._observers.remove(observer)


class StepError(Exception):
    """The device failed on every request of a step. The requests have ended. Internal: callers get `DeviceFault`."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"a step of {len(request_ids)} requests failed")
        self.request_ids = request_ids
