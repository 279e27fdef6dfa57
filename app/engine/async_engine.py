"""Runs an engine in a thread, with an async stream for each request.

Callers use asyncio, and the engine runs in its own thread. Neither polls the other: callers pass commands through a
condition variable, and the thread passes all of a step's deltas to a receiver in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from msgspec import structs

from app.config import SchedulerConfig
from app.engine.adapter_store import HeldAdapter
from app.engine.batch import DeviceLost
from app.engine.engine import NO_ADAPTERS, Engine, StepError
from app.engine.matcher import Matcher, Matchers
from app.engine.prefix import Prefix
from app.engine.request import Adapter, Address, FinishReason, ModelInfo, Queued, Request, TokenDelta
from app.engine.sleep_controller import SleepController
from app.engine.snapshot import EngineSnapshot
from app.engine.stats import AWAKE, ChosenBackend, EngineMeasurements, EngineStats, SleepState, SleepStats
from app.errors import (
    CarouselError,
    DeviceFault,
    EngineStopped,
    Failure,
    InvalidRequest,
    Overloaded,
    UnsupportedAdapter,
    traceback_of,
)
from app.fair import RetryTimes

logger = logging.getLogger(__name__)


class DeltaReceiver(Protocol):
    """Receives the deltas of one or more requests, in order. Called in the event loop in which `submit` was called."""

    def put_all(self, deltas: Sequence[TokenDelta]) -> None:
        """Receive one step's deltas. A request's last delta has a finish reason and, if that is ERROR, an error."""
        ...


def ignored_by(matcher: Matcher | None) -> tuple[str, ...]:
    """Return the locations of the schema keywords that a request's grammar ignores, for the request's first delta."""
    return () if matcher is None else tuple(matcher.ignored_keywords)


class AsyncEngine:
    """Serves one engine to any number of concurrent callers, in any event loop of this process."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        max_waiting_tokens: int | None = None,
        matchers: Matchers | None = None,
        sleeper: SleepController | None = None,
    ) -> None:
        """Start the engine's thread. Blocks until the engine is prepared for its first step, or raises its error.

        A request is rejected if `max_requests` others are running or waiting. It is also rejected if it would raise the
        number of waiting prompt tokens above `max_waiting_tokens`, unless no other request is waiting. Background
        requests that can be preempted do not count towards these limits; they are accepted only while a slot is free.
        Without `matchers`, no request may have a grammar. Without a `sleeper`, the engine never sleeps.
        """
        self._engine = engine
        self.adapters = engine.adapters  # None if the model runner does not support adapters
        self._matchers = matchers
        self._sleeper = sleeper
        # Limit on running and waiting requests, excluding background requests that can be preempted.
        self.max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._num_entering = 0  # submitted requests that the engine's thread has not queued yet; guarded by _wake
        self._num_entering_tokens = 0  # prompt tokens of these requests; guarded by _wake
        self._retry_times = RetryTimes()  # guarded by _wake
        self._calls: set[Future[None]] = set()  # commands whose callers are waiting for the result; guarded by _wake
        # By request id. Callers add entries; any thread removes the entry of a request that ends.
        self._receivers: dict[str, _Subscription] = {}
        self._foreground: set[str] = set()  # ids of the foreground requests in `_receivers`
        self._commands: list[Callable[[], None]] = []  # guarded by _wake
        self._is_stopping = False  # guarded by _wake
        self._wake = threading.Condition()
        self._stats = engine.stats()  # an immutable snapshot, replaced by the engine's thread
        self._num_failed_in_a_row = 0
        self._step_began_at: float | None = None  # when the current step began, if any, by the engine's clock
        prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(prepared,), name="engine", daemon=True)
        self._thread.start()
        try:
            prepared.result()
        except BaseException:
            self.shutdown()
            raise
        if sleeper is not None:
            sleeper.listen(self._on_turns_changed)

    @property
    def model_info(self) -> ModelInfo:
        return self._engine.model_info

    @property
    def num_requests(self) -> int:
        """Number of submitted requests that have not ended. This number is more recent than `stats`."""
        return len(self._receivers)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Stream a request's deltas, one for each step.

        Closing the iterator aborts the request and frees its blocks at the next step.

        Raises the errors of `matcher_of`, `adapter_of` and `submit` before the first delta. If the request fails later,
        raises the error in its last delta.
        """
        stream = _Stream()
        matcher = await self.matcher_of(request)
        queued: Queued | None = self.submit(request, stream, matcher, await self.adapter_of(request))
        ignored = ignored_by(matcher)
        has_ended = False
        try:
            while not has_ended:
                delta = await stream.deltas.get()
                has_ended = delta.finish_reason is not None
                if delta.error is not None:
                    raise delta.error
                yield structs.replace(delta, queued=queued, ignored=ignored)
                queued, ignored = None, ()
        finally:
            if not has_ended:  # once the request has ended, another request may use its id
                self.abort(request.request_id)

    def prepare_for_grammars(self) -> None:
        """Start the preparations that the first grammar would otherwise have to wait for. Does not block."""
        if self._matchers is not None and self.model_info.generates:
            self._matchers.prepare()

    async def matcher_of(self, request: Request) -> Matcher | None:
        """Return the matcher that `submit` requires for a request with a grammar. Compiling it delays no other request.

        Raises:
            InvalidRequest: the grammar cannot be used.
            Overloaded: too many grammars are waiting to be compiled.
        """
        if request.sampling.grammar is None:
            return None
        self._engine.check(request)
        if self._matchers is None:
            raise InvalidRequest("this engine does not support structured output", param=request.sampling.grammar.param)
        return await asyncio.wrap_future(self._matchers.matcher_of(request))

    async def adapter_of(self, request: Request) -> HeldAdapter | None:
        """Return the adapter that `submit` requires, if the request has one. Loading it does not delay other requests.

        The adapter stays loaded until it is released, so submit the request before awaiting anything else.

        Raises:
            InvalidRequest: the engine can never serve the request.
            UnsupportedAdapter: the adapter cannot be loaded.
            Overloaded: other requests are using the maximum number of adapters.
        """
        if request.adapter is None:
            return None
        self._engine.check(request)
        return await self._held(request.adapter, tenant=request.tenant)

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter before a request needs it. Raises UnsupportedAdapter or Overloaded as `adapter_of` does."""
        (await self._held(adapter, tenant="")).release()

    async def _held(self, adapter: Adapter, *, tenant: str) -> HeldAdapter:
        store = self.adapters
        if store is None:
            raise UnsupportedAdapter(NO_ADAPTERS)
        loading = store.hold_async(adapter, tenant=tenant)
        if loading.done():
            return loading.result()
        try:
            return await asyncio.wrap_future(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_release_loaded)
            raise

    def submit(
        self,
        request: Request,
        receiver: DeltaReceiver,
        matcher: Matcher | None = None,
        adapter: HeldAdapter | None = None,
    ) -> Queued:
        """Queue a request. Its deltas go to `receiver`, in the running event loop, until it ends or is aborted.

        A request with a grammar requires the result of `matcher_of`. A request with an adapter requires the result of
        `adapter_of`; the engine releases this adapter when the request ends or is rejected.

        A request that fails after it was queued ends with an error in its last delta: DeadlineMissed, StepFailed (this
        request made the model fail), DeviceFault (the device failed on the whole batch), or EngineStopped.

        Raises:
            InvalidRequest: the request can never be served, or its id is in use. Nothing was queued.
            Overloaded: the engine is full; the error says when to try again. Nothing was queued.
            EngineStopped: the engine has shut down or died.
        """
        try:
            self.check_health()
            self._engine.check(request)
            assert (matcher is None) == (request.sampling.grammar is None), "a grammar requires a matcher"
            if request.request_id in self._receivers:
                raise InvalidRequest(
                    f"the request id {request.request_id} is already in use; send another one", param="request_id"
                )
            subscription = _Subscription(asyncio.get_running_loop(), receiver)
            arrived_at = self._engine.now()
            enter = partial(self._enter, request, arrived_at=arrived_at, matcher=matcher, adapter=adapter)
            with self._wake:
                self._check_room(request, arrived_at)
                wait_s = self._stats.estimated_wait_s + self.sleep.expected_wake_s
                queued = Queued(self._stats.num_waiting + self._num_entering, wait_s)
                self._command(enter)
                self._num_entering += 1
                self._num_entering_tokens += len(request.prompt_token_ids)
                self._receivers[request.request_id] = subscription
                if not request.is_background:
                    self._foreground.add(request.request_id)
        except BaseException:
            if adapter is not None:
                adapter.release()
            raise
        return queued

    def abort(self, request_id: str) -> None:
        """End a request. Its receiver gets no more deltas, and its blocks are freed at the next step."""
        if self._leave(request_id) is None:
            return
        try:
            self._command(lambda: self._abort(request_id))
        except EngineStopped:
            logger.debug("request %s aborted after the engine stopped", request_id)

    async def reconfigure(self, config: SchedulerConfig) -> None:
        """Replace the scheduler settings between two steps. Returns when they have taken effect. No request is lost.

        Raises:
            InvalidSetup: this engine cannot apply the settings without a restart. The old settings remain in effect.
            EngineStopped: the engine has shut down or died.
        """
        await asyncio.wrap_future(self._call(lambda: self._reconfigure(config)))
        self.max_requests = config.max_requests
        logger.info("now scheduling with strategy %s and policy %s", config.strategy.name, config.policy.name)

    def stats(self) -> EngineStats:
        """Return the statistics last published by the engine's thread. Thread-safe."""
        return self._stats

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step began, or 0 between two steps."""
        began_at = self._step_began_at
        return 0.0 if began_at is None else self._engine.now() - began_at

    def measurements(self) -> EngineMeasurements:
        measured = self._engine.measurements()
        return measured if self._sleeper is None else replace(measured, sleep=self._sleeper.stats)

    @property
    def sleep(self) -> SleepStats:
        """The engine's sleep state and statistics. May be read from any thread."""
        return AWAKE if self._sleeper is None else self._sleeper.stats

    @property
    def backend(self) -> ChosenBackend | None:
        """The backend that computes on a GPU, or None on a CPU. May be read from any thread."""
        return self._engine.runner.backend

    async def snapshot(self, *, is_full: bool = True) -> EngineSnapshot:
        """Return `Engine.snapshot` after the current step. Raises EngineStopped."""
        views: list[EngineSnapshot] = []
        await asyncio.wrap_future(self._call(lambda: views.append(self._engine.snapshot(is_full=is_full))))
        return views[0]

    def end_snapshots(self) -> None:
        """Stop recording events for snapshots before the next step."""
        with suppress(EngineStopped):
            self._command(self._engine.end_snapshots)

    def on_prefixes(self, note_held: Callable[[Prefix, bool], None]) -> None:
        """Call `Engine.on_prefixes` in the engine's thread, before the next step."""
        with suppress(EngineStopped):
            self._command(lambda: self._engine.on_prefixes(note_held))

    def serve_prefixes(self, host: str) -> Address | None:
        """See `Engine.serve_prefixes`."""
        return self._engine.serve_prefixes(host)

    def check_health(self) -> None:
        """Raise EngineStopped if the engine no longer serves."""
        if self._is_stopping or not self._thread.is_alive():
            raise EngineStopped("the engine is not running")
        try:
            self._engine.check_health()
        except DeviceLost as error:
            raise EngineStopped(f"the engine can no longer compute: {error}") from error

    def shutdown(self) -> None:
        """Stop after the current step. Every open request fails with EngineStopped. Safe to call twice."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()
        if self._matchers is not None:
            self._matchers.close()

    # ------------------------------------------------------------------ the callers' side

    def _leave(self, request_id: str) -> _Subscription | None:
        """Remove a request's subscription and return it, or None if it was already removed. Thread-safe."""
        self._foreground.discard(request_id)  # must come first: the next line lets another request reuse the id
        return self._receivers.pop(request_id, None)

    def _check_room(self, request: Request, now: float) -> None:
        """Raise Overloaded if the engine has no room for a request.

        A background request is accepted only if a slot is free. It never causes the rejection of a foreground request,
        unless it is running and cannot be preempted.
        """
        stats, num_tokens = self._stats, len(request.prompt_token_ids)
        if request.is_background:
            num_requests, max_requests = len(self._receivers), min(stats.max_running, self.max_requests)
            num_waiting_tokens = stats.num_waiting_tokens
        else:
            num_requests, max_requests = len(self._foreground) + stats.num_unpreemptible_background, self.max_requests
            num_waiting_tokens = stats.num_waiting_foreground_tokens
        num_waiting_tokens += self._num_entering_tokens
        if num_requests >= max_requests:
            problem = f"{num_requests:,} requests are being served"
        elif self._max_waiting_tokens is not None and 0 < num_waiting_tokens > self._max_waiting_tokens - num_tokens:
            problem = f"prompts of {num_waiting_tokens:,} tokens are waiting"
        elif request.no_queue and not self._can_start(request, num_requests):
            problem = f"{num_requests:,} requests are ahead of this one, which may not wait"
        else:
            return
        retry_after_s = self._retry_times.next_after(
            now, ended_per_s=stats.ended_per_s, tenant=request.tenant, delays_others=request.may_wait
        )
        raise Overloaded(f"the engine is full: {problem}; try again shortly", retry_after_s=retry_after_s)

    def _can_start(self, request: Request, num_before: int) -> bool:
        """Whether a slot and KV memory are free for a request. Strategies with whole batches require an idle engine."""
        stats = self._stats
        if self.sleep.state is not SleepState.AWAKE or num_before >= (1 if stats.batch_size else stats.max_running):
            return False
        return len(request.prompt_token_ids) < stats.num_free_blocks * stats.block_size

    def _command(self, command: Callable[[], None]) -> None:
        """Queue a command for the engine's thread, which runs it between two steps."""
        with self._wake:
            if self._is_stopping:
                raise EngineStopped("the engine is shutting down")
            self._commands.append(command)
            self._wake.notify()

    def _call(self, action: Callable[[], None]) -> Future[None]:
        """Queue an action for the engine's thread. The future completes when the action has returned or raised."""
        future: Future[None] = Future()

        def command() -> None:
            self._calls.discard(future)
            if future.set_running_or_notify_cancel():
                _resolve(future, action)

        with self._wake:
            self._command(command)
            self._calls.add(future)
        return future

    # ------------------------------------------------------------------ the engine's thread

    def _run(self, prepared: Future[None]) -> None:
        try:
            if _resolve(prepared, self._engine.prepare):
                self._serve()
        except Exception as error:
            logger.error("the engine stopped because of an unexpected error: %s", traceback_of(error))
        finally:
            with self._wake:
                self._is_stopping = True
                calls, self._calls = self._calls, set()
            for call in calls:
                if call.set_running_or_notify_cancel():
                    call.set_exception(EngineStopped("the engine stopped before it could run this command"))
            self._fail(list(self._receivers), EngineStopped("the engine stopped before the request was done"))
            self._close()

    def _serve(self) -> None:
        """Run commands and steps until the engine must stop."""
        while self._run_commands():
            if self._rest():
                continue  # new commands (aborts) may have arrived while the engine fell asleep or woke up
            if self._engine.idle_s == 0.0:
                self._step_began_at = self._engine.now()
                self._step()
                self._step_began_at = None
                self._rest()

    def _close(self) -> None:
        """Close the engine and its sleeper, even if closing one of them raises."""
        for part in (self._engine, self._sleeper):
            try:
                if part is not None:
                    part.close()
            except Exception as error:
                logger.error("the engine or its sleeper could not be closed: %s", traceback_of(error))

    def _rest(self) -> bool:
        """Put the engine to sleep or wake it if due. Returns whether it did. `step_age_s` excludes this time."""
        if self._sleeper is None or not self._sleeper.advance():
            return False
        self._stats = self._engine.stats()
        return True

    def _on_turns_changed(self) -> None:
        """Wake the engine's thread. Called by the thread that listens to the other engines on the device."""
        assert self._sleeper is not None, "only a `SleepController` listens to other engines"
        with self._wake:
            self._sleeper.note_change()
            self._wake.notify()

    def _due_in_s(self) -> float | None:
        """Return the seconds until the engine's thread has work if no command arrives, or None for never."""
        idle_s = self._engine.idle_s
        if self._sleeper is None or idle_s == 0.0:
            return idle_s
        times = [each for each in (idle_s, self._sleeper.due_in_s) if each is not None]
        return min(times, default=None)

    def _run_commands(self) -> bool:
        """Run the queued commands. Blocks until a command or a step is due. Returns False if the engine must stop."""
        with self._wake:
            while not (self._commands or self._is_stopping or (due_in_s := self._due_in_s()) == 0.0):
                self._wake.wait(due_in_s)
            if self._is_stopping:
                return False
            commands, self._commands = self._commands, []
            num_entering, num_entering_tokens = self._num_entering, self._num_entering_tokens
        if commands:
            for command in commands:
                self._run_command(command)
            with self._wake:  # from now on, `stats` counts these requests and their tokens
                self._stats = self._engine.stats()
                self._num_entering -= num_entering
                self._num_entering_tokens -= num_entering_tokens
        return True

    def _run_command(self, command: Callable[[], None]) -> None:
        """Run a command. An error is only logged, because it must not end the other requests."""
        try:
            command()
        except Exception as error:
            logger.error("a command for the engine failed: %s", traceback_of(error))

    def _enter(
        self, request: Request, *, arrived_at: float, matcher: Matcher | None, adapter: HeldAdapter | None
    ) -> None:
        """Pass a checked request to the engine. If the engine raises, only this request ends."""
        try:
            self._engine.add_checked(request, arrived_at=arrived_at, matcher=matcher, adapter=adapter)
        except Exception as error:
            failure = error if isinstance(error, CarouselError) else Failure("the engine could not accept this request")
            # If the engine rejected the request, it was not queued, and the id may belong to another request.
            was_queued = failure is not error and self._engine.abort(request.request_id) is not None
            if adapter is not None and not was_queued:
                adapter.release()
            self._fail([request.request_id], failure)  # last, because the caller may then need the adapter's slot
            raise

    def _reconfigure(self, config: SchedulerConfig) -> None:
        self._engine.reconfigure(config)
        self._stats = self._engine.stats()  # publish before `reconfigure` returns to its caller

    def _step(self) -> None:
        num_steps = self._stats.total_steps
        max_failed_in_a_row = 8
        try:
            deltas = self._compute()
        except StepError as error:
            logger.error("a step with the requests %s failed: %s", ", ".join(error.request_ids), traceback_of(error))
            self._fail(error.request_ids, DeviceFault("the model step that computed this request failed"))
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= max_failed_in_a_row:
                raise  # the device will not recover, so stop the engine to have the replica replaced
            return
        if self._stats.total_steps > num_steps:  # a step was computed; the call did not only end overdue requests
            self._num_failed_in_a_row = 0
        self._deliver(deltas)

    def _compute(self) -> list[TokenDelta]:
        try:
            return self._engine.step()
        finally:
            self._stats = self._engine.stats()  # publish before a receiver gets a delta of this step

    def _abort(self, request_id: str) -> None:
        if self._engine.abort(request_id) is not None:
            logger.info("request %s aborted", request_id)

    def _deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """Pass a step's deltas to their receivers, with one call per receiver."""
        batches: dict[DeltaReceiver, tuple[asyncio.AbstractEventLoop, list[TokenDelta]]] = {}
        for delta in deltas:
            ended = delta.finish_reason is not None
            subscription = self._leave(delta.request_id) if ended else self._receivers.get(delta.request_id)
            if subscription is None:
                continue
            batch = batches.get(subscription.receiver)
            if batch is None:
                batch = batches[subscription.receiver] = subscription.loop, []
            batch[1].append(delta)
        for receiver, (loop, batch_of_receiver) in batches.items():
            try:
                loop.call_soon_threadsafe(receiver.put_all, batch_of_receiver)
            except RuntimeError:  # the event loop has closed, so no one is waiting for the deltas
                logger.debug("%d deltas were for a closed event loop", len(batch_of_receiver))

    def _fail(self, request_ids: Iterable[str], error: CarouselError) -> None:
        self._deliver(TokenDelta(request_id, (), FinishReason.ERROR, error=error) for request_id in request_ids)


def _release_loaded(loading: Future[HeldAdapter]) -> None:
    """Release an adapter whose request was cancelled while the adapter was being loaded."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().release()


def _resolve(future: Future[None], action: Callable[[], None]) -> bool:
    """Run an action and set the future's result or its exception. Returns whether the action succeeded."""
    try:
        action()
    except Exception as error:
        future.set_exception(error)
        return False
    future.set_result(None)
    return True


@dataclass(frozen=True, slots=True)
class _Subscription:
    """The receiver of a request's deltas, and its event loop."""

    loop: asyncio.AbstractEventLoop
    receiver: DeltaReceiver


class _Stream:
    """The unread deltas of one request. Used only in the request's event loop."""

    def __init__(self) -> None:
        self.deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()

    def put_all(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.deltas.put_nowait(delta)
