"""Runs many items on one engine, in a thread that steps the engine.

For streaming, `AsyncEngine` wakes a task for every token of every request. A bulk run does not stream: an item is
handed over once it is complete. `benchmarks.engine.throughput` uses the same loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from app.engine.engine import Engine
from app.engine.matcher import Matcher, Matchers
from app.engine.request import FinishReason, Request, TokenDelta
from app.errors import EngineStopped, Failure, InvalidRequest, described, traceback_of
from app.jobs.job import EngineOutput, ItemOutput
from app.text import GeneratedText, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedItem:
    """An item with its tokenized requests, ready for an engine."""

    number: int
    id: str
    requests: tuple[Request, ...]  # exactly one if the text is generated
    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop: bool = False
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # special tokens in `stop`: token id to text
    # Converts the numbers that each request produces (a vector, scores of labels, or log-probabilities of given tokens)
    # to the item's text. Raises Failure for invalid numbers. None means that the text is generated.
    text_of_numbers: Callable[[Sequence[Any]], str] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    def continued_after(self, token_ids: tuple[int, ...]) -> PreparedItem:
        """Return a copy that resumes after these output tokens. Only items with generated text can resume."""
        if not token_ids:
            return self
        [request] = self.requests
        return replace(self, requests=(replace(request, generated_token_ids=token_ids),))

    def failed(self, reason: str) -> ItemOutput:
        return ItemOutput(number=self.number, id=self.id, prompt_tokens=self.num_prompt_tokens, error=reason)


class EngineWorker:
    """One engine, the thread that steps it, and the items that it is computing."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, matchers: Matchers) -> None:
        """Start the thread. No other code may use the engine from now on. `close` also closes `matchers`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._matchers = matchers
        # `_changed` guards this field and all following fields.
        self._answers: dict[str, _Answer] = {}  # by the id of each unfinished request
        self._entering: list[_Answer] = []
        self._ended: list[_Answer] = []
        self._begun: list[int] = []
        self._num_tokens = 0
        self._num_open = 0  # requests of the items that `collect` has not returned yet
        self._num_ended = 0  # requests of the items in `_ended`
        self._wanted = 1
        self._failure: str | None = None
        self._is_stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="items", daemon=True)
        self._thread.start()

    def add(self, items: Sequence[PreparedItem]) -> None:
        """Check items, compile their grammars and queue them. `collect` returns each item exactly once."""
        answers = [self._checked(item) for item in items]  # in the caller's thread, so that the engine does not wait
        with self._changed:
            self._entering.extend(answers)
            self._num_open += sum(item.num_requests for item in items)
            self._changed.notify_all()

    def collect(self, *, at_least: int, within_s: float) -> EngineOutput:
        """Wait until items with `at_least` requests in total or all items have ended, for at most `within_s`.

        Returns the ended items and the progress of the other items since the last call. Raises EngineStopped if the
        engine has failed. All of its items are then lost.
        """
        with self._changed:
            self._wanted = at_least
            self._changed.wait_for(lambda: self._is_worth_taking(at_least), timeout=within_s)
            if self._failure is not None:
                raise EngineStopped(self._failure)
            ended, self._ended = self._ended, []
            begun, self._begun = self._begun, []
            num_tokens, self._num_tokens = self._num_tokens, 0
            news = {answer.item.number: token_ids for answer in self._answers.values() if (token_ids := answer.news())}
            self._num_open -= self._num_ended
            self._num_ended = 0
        # The texts are decoded in the caller's thread, so that the engine's thread can continue with the next steps.
        outputs = tuple(answer.output(self._tokenizer) for answer in ended)
        return EngineOutput(outputs=outputs, begun=tuple(begun), token_ids=news, num_tokens=num_tokens)

    def close(self) -> None:
        """Stop after the current step. Unfinished items are dropped."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._matchers.close()

    def _checked(self, item: PreparedItem) -> _Answer:
        answer = _Answer(item, self._tokenizer)
        try:
            for request in item.requests:
                self._engine.check(request)
            answer.matchers = [self._matchers.matcher_of(request).result() for request in item.requests]
        except InvalidRequest as error:
            answer.fail(error.message)
        return answer

    def _is_worth_taking(self, at_least: int) -> bool:
        return self._failure is not None or self._num_ended >= min(at_least, self._num_open)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._engine.prepare()
            while (answers := self._next_answers()) is not None:
                for answer in answers:
                    self._enter(answer)
                deltas = self._engine.step() if self._engine.idle_s == 0.0 else []
                with self._changed:
                    self._book(deltas)
        except Exception as error:  # for example, the device has failed; the pool sends the items to other engines
            num_items = len(set(self._answers.values()))
            logger.error("the engine failed with %d items: %s", num_items, traceback_of(error))
            with self._changed:
                self._failure = f"the engine failed with {num_items:,} items: {described(error)}"
                self._changed.notify_all()

    def _next_answers(self) -> list[_Answer] | None:
        """Block while the engine has no work, then return the new items. Returns None if the thread should stop."""
        with self._changed:
            while not (self._entering or self._is_stopping or (idle_s := self._engine.idle_s) == 0.0):
                self._changed.wait(idle_s)
            if self._is_stopping:
                return None
            answers, self._entering = self._entering, []
            return answers

    def _enter(self, answer: _Answer) -> None:
        added: list[str] = []
        try:
            for request, matcher in zip(answer.item.requests, answer.matchers, strict=False):
                self._engine.add_checked(request, matcher=matcher)
                added.append(request.request_id)
        except InvalidRequest as error:
            answer.fail(error.message)
        with self._changed:
            self._answers.update(dict.fromkeys(added, answer))
            if answer.is_ended:
                self._end(answer)

    def _book(self, deltas: Sequence[TokenDelta]) -> None:
        """Record a step's deltas. The caller must hold `_changed`, so that `collect` returns all of them or none."""
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is None:  # the item has ended, because another of its requests failed in this step
                continue
            self._num_tokens += len(delta.token_ids)
            if not answer.has_begun:
                self._begun.append(answer.item.number)
            answer.push(delta)
            if delta.finish_reason is not None:
                del self._answers[delta.request_id]
            if answer.is_ended:
                self._end(answer)
        if self._ended and self._is_worth_taking(self._wanted):
            self._changed.notify_all()

    def _end(self, answer: _Answer) -> None:
        """Hand over an answer and abort its other requests. The engine itself is unaware of stop strings and items."""
        self._ended.append(answer)
        self._num_ended += answer.item.num_requests
        for request in answer.item.requests:
            if self._answers.pop(request.request_id, None) is not None:
                self._engine.abort(request.request_id)


class _Answer:
    """The output of one item. Tokens are decoded at the end, or as they arrive if the item has stop strings."""

    def __init__(self, item: PreparedItem, tokenizer: Tokenizer) -> None:
        self.item = item
        self.matchers: Sequence[Matcher | None] = ()  # one per request; empty if the item is invalid
        self.has_begun = False
        self.is_ended = False
        self._token_ids: list[int] = []
        self._num_reported = len(item.requests[0].generated_token_ids)
        self._num_tokens = 0
        self._stopping = _stopping_text(item, tokenizer) if item.stop else None
        self._pieces: list[str] = []
        self._numbers: dict[str, Any] = {}  # for `text_of_numbers`, by request id
        self._num_open = len(item.requests)
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None
        if item.requests[0].generated_token_ids:  # generated by another engine before it was lost
            self._take(TokenDelta(item.requests[0].request_id, item.requests[0].generated_token_ids))

    def push(self, delta: TokenDelta) -> None:
        self.has_begun = True
        if delta.error is not None:
            self.fail(delta.error.message)
            return
        if self.item.text_of_numbers is None:
            self._take(delta)
        else:
            self._take_numbers(delta)
        self.is_ended = self._finish_reason is not None

    def news(self) -> tuple[int, ...]:
        """Return the tokens that were added since the last call."""
        news = tuple(self._token_ids[self._num_reported :])
        self._num_reported += len(news)
        return news

    def _take(self, delta: TokenDelta) -> None:
        is_shown = delta.stop_token_id is None or self.item.include_stop
        self._token_ids += delta.token_ids if is_shown else delta.token_ids[:-1]
        if self._stopping is None:
            self._num_tokens += len(delta.token_ids)
            self._finish_reason = delta.finish_reason
            return
        added = self._stopping.push(delta)
        self._num_tokens += added.num_tokens
        self._pieces.append(added.text)
        self._finish_reason = added.finish_reason

    def _take_numbers(self, delta: TokenDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        if delta.embedding is not None:
            self._numbers[delta.request_id] = numpy.frombuffer(delta.embedding, numpy.float32)
        elif delta.logprobs:
            self._numbers[delta.request_id] = delta.logprobs[0].top_logprobs
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._finish_reason = None if self._num_open else FinishReason.STOP

    def fail(self, reason: str) -> None:
        self._error = reason
        self.is_ended = True

    def output(self, tokenizer: Tokenizer) -> ItemOutput:
        if self._error is not None:
            return self.item.failed(self._error)
        assert self._finish_reason is not None, "an item that ends without an error has a finish reason"
        try:
            text = self._text(tokenizer)
        except Failure as error:  # the model produced invalid numbers
            return self.item.failed(error.message)
        return ItemOutput(
            number=self.item.number,
            id=self.item.id,
            text=text,
            finish_reason=self._finish_reason.value,
            prompt_tokens=self.item.num_prompt_tokens,
            completion_tokens=self._num_tokens,
        )

    def _text(self, tokenizer: Tokenizer) -> str:
        if self.item.text_of_numbers is not None:
            return self.item.text_of_numbers([self._numbers[request.request_id] for request in self.item.requests])
        if self._stopping is not None:
            return "".join(self._pieces)
        hidden = tokenizer.special_token_ids if self.item.skip_special_tokens else frozenset[int]()
        shown = [token_id for token_id in self._token_ids if token_id not in hidden]
        return tokenizer.decode(shown, skip_special_tokens=False)


def _stopping_text(item: PreparedItem, tokenizer: Tokenizer) -> GeneratedText:
    return GeneratedText(
        tokenizer,
        stop=item.stop,
        stop_tokens=item.stop_tokens,
        min_tokens=item.requests[0].sampling.min_tokens,
        skip_special_tokens=item.skip_special_tokens,
        include_stop=item.include_stop,
    )
