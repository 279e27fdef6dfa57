"""The engine: schedule, run, update. Everything else in this room serves these three lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from app.config import SchedulerConfig
from app.engine.batch import Batch, StepResult
from app.engine.isolation import DeviceFailed, Quarantine, run_in_parts
from app.engine.matcher import Matcher, TokenSet
from app.engine.request import (
    MAX_DEADLINE_S,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PRIORITY,
    MAX_TENANT_LENGTH,
    Grammar,
    ModelFacts,
    Request,
    TokenDelta,
)
from app.engine.scheduler import Scheduler
from app.engine.stats import EngineMeasurements, EngineStats
from app.engine.trace.entries import FailureKind
from app.engine.trace.recorder import Recorder
from app.errors import ContextTooLong, InvalidRequest, InvalidSetup, Quarantined, StepFailed

logger = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """Turns a batch into tokens: the border between deciding and computing."""

    def run(self, batch: Batch) -> StepResult:
        """Compute the batch and draw one token id for each of `batch.sampled`; log-probabilities for those who ask."""
        ...


class PendingStep(Protocol):
    """A step that the device may still be computing."""

    def result(self) -> StepResult:
        """Wait for the step. Called once."""
        ...


@runtime_checkable
class LaunchingRunner(ModelRunner, Protocol):
    """A model runner whose device computes while the host goes on. Steps run in the order they were launched in."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start computing the batch. A negative token id -1 - n in it is what the step launched before draws as its
        n-th token."""
        ...


class Engine:
    """A scheduler and a model runner behind add, abort and step. One thread uses it."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        facts: ModelFacts,
        clock: Callable[[], float] = time.monotonic,
        largest_step: SchedulerConfig | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`clock` gives monotonic seconds. `largest_step` is what memory was sized for, where a step takes any.

        `recorder` is told everything that comes from outside, and everything that is decided.
        """
        self.facts = facts
        self._scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._largest_step = largest_step
        self._recorder = recorder or Recorder()
        self._quarantine = Quarantine()

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended; a step may still have to wait for its time, see `idle_s`."""
        return self._scheduler.has_work

    @property
    def idle_s(self) -> float | None:
        """Seconds until the next step has something to do if nobody arrives; 0: now; None: never."""
        now = self._clock()
        due_at = self._scheduler.due_at(now)
        return None if due_at is None else max(0.0, due_at - now)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the engine could never serve the request. Changes nothing; any thread may call."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if max_tokens < 0:
            raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 0", param="max_tokens")
        if 0 < max_tokens <= len(request.generated_token_ids):
            raise InvalidRequest(
                f"{len(request.generated_token_ids):,} tokens are generated and max_tokens is {max_tokens:,}; "
                f"nothing is left to generate",
                param="max_tokens",
            )
        if num_prompt + max_tokens > self.facts.max_model_len:
            raise ContextTooLong(
                f"prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}; "
                f"this model accepts {self.facts.max_model_len:,} together",
                param="max_tokens",
            )
        self._check_logprobs(request)
        self._check_pooling(request)
        _check_place(request)
        if request.sampling.grammar is not None:
            _check_grammar(request.sampling.grammar, request, self.facts)
        if self._quarantine.holds(request):
            raise Quarantined(
                "this prompt with these sampling parameters has made the model fail before; it is not tried again",
                param="prompt",
                code="quarantined",
            )
        for name, token_ids in self._token_ids(request):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.facts.vocab_size):
                wrong = next(token for token in token_ids if not 0 <= token < self.facts.vocab_size)
                raise InvalidRequest(
                    f"{name} has token id {wrong}; this model's ids are 0 to {self.facts.vocab_size - 1:,}", param=name
                )

    def add(self, request: Request, *, arrived_at: float | None = None, matcher: Matcher | None = None) -> None:
        """Queue a request that arrived now, or earlier at `arrived_at` by the engine's clock.

        A request with a grammar comes with its matcher, behind the tokens that it has generated.

        Raises:
            InvalidRequest: it can never be served, or a request of this id is being served.
        """
        self.check(request)
        assert (matcher is None) == (request.sampling.grammar is None), "grammars come with their matchers"
        self.add_checked(request, arrived_at=arrived_at, matcher=matcher)

    def add_checked(self, request: Request, *, arrived_at: float | None = None, matcher: Matcher | None = None) -> None:
        """As `add`, of a request that `check` has passed, perhaps in another thread: long prompts are not walked twice.

        Raises:
            InvalidRequest: a request of this id is being served.
        """
        if self._scheduler.has_request(request.request_id):
            raise InvalidRequest(f"a request with the id {request.request_id} is being served", param="request_id")
        now = self._clock() if arrived_at is None else arrived_at
        if matcher is None and request.sampling.allowed_token_ids:
            matcher = TokenSet(request.sampling.allowed_token_ids, vocab_size=self.facts.vocab_size)
        self._scheduler.add(request, now=now, matcher=matcher)
        self._recorder.arrived(request, at=now)

    def now(self) -> float:
        """The engine's clock, in seconds; any thread may read it."""
        return self._clock()

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request and free its blocks; None when it has ended already."""
        delta = self._scheduler.abort(request_id)
        if delta is not None:
            self._recorder.aborted(request_id)
        return delta

    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence by one step; nothing is computed while the strategy waits.

        When the model runner raises, the batch is run in parts: the requests that make it fail end with an error
        (a delta with `error`), the others go on with the tokens that they would have had.

        Raises:
            StepError: every part fails, so it is the device. The requests of that batch have ended, and it names them.
        """
        self._recorder.began()
        batch = self._scheduler.schedule(self._clock())
        self._recorder.scheduled(batch, self._scheduler.take_decision())
        result = self._run(batch) if batch else StepResult([])
        self._end_the_unmatched(batch)
        self._recorder.drew(batch, result.token_ids)
        ended_at = self._clock()
        deltas = self._scheduler.update(batch, result, now=ended_at)
        self._recorder.told(deltas, at=ended_at)
        return deltas

    def _run(self, batch: Batch) -> StepResult:
        try:
            return self.runner.run(batch)
        except Exception as error:
            return self._run_in_parts(batch, error)

    def _run_in_parts(self, batch: Batch, error: Exception) -> StepResult:
        try:
            found = run_in_parts(self.runner.run, batch, error)
        except DeviceFailed:
            if len(batch.scheduled) == 1:  # alone it may also be the request; if it comes again, it will be
                self._quarantine.note_failure(batch.sequences[0].request)
            self._recorder.failed(FailureKind.DEVICE, batch.sequences)
            raise StepError(self._scheduler.fail(batch)) from error
        self._recorder.failed(FailureKind.REQUESTS, [sequence for sequence, _ in found.culprits])
        if not found.culprits:
            logger.warning("a step of %d requests failed as a whole, not in parts: %r", len(batch.scheduled), error)
        for sequence, failure in found.culprits:
            logger.error("request %s made its step fail", sequence.request.request_id, exc_info=failure)
            self._quarantine.note_failure(sequence.request)
            self._scheduler.fail_one(sequence, StepFailed("this request made the model fail; others were not affected"))
        return found.result(batch)

    def _end_the_unmatched(self, batch: Batch) -> None:
        """End those whose matcher could not say which tokens may be drawn in this step."""
        if not batch.needs_history:
            return
        failed = [each for each in batch.sequences if each.matcher is not None and each.matcher.failure is not None]
        if failed:
            self._recorder.failed(FailureKind.MATCHERS, failed)
        for sequence in failed:
            assert sequence.matcher is not None, "it has failed"
            grammar = sequence.request.sampling.grammar
            param = None if grammar is None else grammar.param
            error = InvalidRequest(sequence.matcher.failure or "", param=param, code="grammar_too_complex")
            self._scheduler.fail_one(sequence, error)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Schedule by other settings from the next step on. No request is lost.

        Raises:
            InvalidSetup: memory was sized for smaller steps; nothing has changed.
        """
        largest = self._largest_step
        for name in ("max_step_tokens", "max_running", "max_scored_tokens"):
            if largest is not None and getattr(config, name) > getattr(largest, name):
                raise InvalidSetup(
                    f"scheduler.{name}: got {getattr(config, name):,}; this replica's memory was sized for "
                    f"{getattr(largest, name):,} when it started: change it in the application's args"
                )
        self._scheduler.reconfigure(config)
        self._recorder.reconfigured(config)

    def clear_prefix_cache(self) -> None:
        """Forget every shared prefix: prompts that come later are computed from their start."""
        self._scheduler.clear_prefix_cache()
        self._recorder.cache_cleared()

    def close(self) -> None:
        """Let the recorder finish what it has; nothing may be asked of the engine afterwards."""
        self._recorder.close()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def measurements(self) -> EngineMeasurements:
        """What has been measured since the start. Any thread may ask."""
        return self._scheduler.measurements()

    def _check_logprobs(self, request: Request) -> None:
        sampling, vocab_size = request.sampling, self.facts.vocab_size
        for name, num_top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if num_top is not None and not 0 <= num_top <= vocab_size:
                raise InvalidRequest(f"{name} is {num_top}; it must be from 0 to {vocab_size:,}", param=name)

    def _check_pooling(self, request: Request) -> None:
        if request.pooling is None:
            return
        if self.facts.embedding_size is None:
            raise InvalidRequest("this model gives no embeddings; ask another", param="model")
        if request.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {request.sampling.max_tokens}; a request for an embedding generates nothing",
                param="max_tokens",
            )

    @staticmethod
    def _token_ids(request: Request) -> tuple[tuple[str, tuple[int, ...]], ...]:
        sampling = request.sampling
        return (
            ("prompt", request.prompt_token_ids),
            ("generated_token_ids", request.generated_token_ids),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", tuple(token for word in sampling.bad_words for token in word)),
        )


def _check_place(request: Request) -> None:
    """What a request may say about its place in the queue."""
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {request.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    if len(request.tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequest(
            f"tenant has {len(request.tenant):,} characters; at most {MAX_TENANT_LENGTH} are accepted", param="tenant"
        )
    deadline_s = request.deadline_s
    if deadline_s is not None and not (math.isfinite(deadline_s) and 0 < deadline_s <= MAX_DEADLINE_S):
        raise InvalidRequest(
            f"deadline_s is {deadline_s}; it must be above 0 and at most {MAX_DEADLINE_S:g} seconds", param="deadline_s"
        )


def _check_grammar(grammar: Grammar, request: Request, facts: ModelFacts) -> None:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{grammar.param} has {len(grammar.text):,} characters; at most {MAX_GRAMMAR_CHARACTERS:,} are accepted",
            param=grammar.param,
        )
    if request.sampling.allowed_token_ids:
        raise InvalidRequest(
            f"allowed_token_ids and {grammar.param} both say which tokens may be drawn; send one of them",
            param="allowed_token_ids",
        )
    if not facts.eos_token_ids:
        raise InvalidRequest(
            f"this model has no end token, so nothing could end an output in a given form; leave {grammar.param} out",
            param=grammar.param,
        )


class StepError(Exception):
    """The device fails on every request of a step; they have ended. Stays inside: callers hear `DeviceFault`."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"a step failed with {len(request_ids)} requests in it")
        self.request_ids = request_ids
