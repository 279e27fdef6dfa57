"""The engine: schedule, run, update. Everything else in this room serves these three lines."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from app.engine.batch import Batch
from app.engine.facts import ModelFacts
from app.engine.request import Request, TokenDelta
from app.engine.scheduler import Scheduler
from app.engine.stats import EngineStats
from app.errors import ContextTooLong, InvalidRequest


class ModelRunner(Protocol):
    """Turns a batch into tokens: the border between deciding and computing."""

    def run(self, batch: Batch) -> list[int]:
        """Compute the batch and draw one token id for each of `batch.sampled`, in that order."""
        ...


class PendingStep(Protocol):
    """A step that the device may still be computing."""

    def result(self) -> list[int]:
        """Wait for the step; one token id for each of the batch's `sampled`, in that order. Called once."""
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

    def __init__(self, *, scheduler: Scheduler, runner: ModelRunner, facts: ModelFacts) -> None:
        self.facts = facts
        self._scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the engine could never serve the request. Changes nothing; any thread may call."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1", param="max_tokens")
        if num_prompt + max_tokens > self.facts.max_model_len:
            raise ContextTooLong(
                f"prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}; "
                f"this model accepts {self.facts.max_model_len:,} together",
                param="max_tokens",
            )
        for name, token_ids in self._token_ids(request):
            wrong = next((token for token in token_ids if not 0 <= token < self.facts.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{name} has token id {wrong}; this model's ids are 0 to {self.facts.vocab_size - 1:,}", param=name
                )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served, or a request of this id is being served.
        """
        self.check(request)
        self.add_checked(request)

    def add_checked(self, request: Request) -> None:
        """Queue a request that `check` has passed, perhaps in another thread: long prompts are not walked twice.

        Raises:
            InvalidRequest: a request of this id is being served.
        """
        if self._scheduler.has_request(request.request_id):
            raise InvalidRequest(f"a request with the id {request.request_id} is being served", param="request_id")
        self._scheduler.add(request)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request and free its blocks; None when it has ended already."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence by one step.

        Whatever the model runner raises passes through, after the requests of that batch were ended:
        `StepError.request_ids` names them.
        """
        batch = self._scheduler.schedule()
        try:
            token_ids = self.runner.run(batch)
        except Exception as error:
            raise StepError(self._scheduler.fail(batch)) from error
        return self._scheduler.update(batch, token_ids)

    def clear_prefix_cache(self) -> None:
        """Forget every shared prefix: prompts that come later are computed from their start."""
        self._scheduler.clear_prefix_cache()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    @staticmethod
    def _token_ids(request: Request) -> tuple[tuple[str, tuple[int, ...]], ...]:
        sampling = request.sampling
        return (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
        )


class StepError(Exception):
    """A step raised; its requests have ended. Stays inside the process: callers hear `StepFailed`."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"a step failed with {len(request_ids)} requests in it")
        self.request_ids = request_ids
