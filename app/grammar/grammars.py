"""The grammars of one model: compiled in threads beside the engine, and cached."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind, Request
from app.errors import EngineStopped, InvalidRequest, InvalidSetup, Overloaded
from app.grammar.compiling import Unusable, new_matcher, tags_of
from app.grammar.free_text import FreeText, TokenTable, Trigger
from app.grammar.matchers import GrammarMatcher, TagContent, TaggedMatcher
from app.grammar.sandbox import Sandbox
from app.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_REMEMBERED_REFUSALS = 1024
MAX_CACHED_CHARACTERS = 2_000_000  # a large schema compiles to about a hundred times its size
# A compiled grammar caches what it learns in matching, which only grows: after so many requests it is compiled anew.
MAX_USES = 256
_NICENESS = 10

Key = tuple[str, GrammarKind, str, bool]  # the first is the cache salt: where prefixes are not shared, grammars are not


Begin = Callable[[LLMatcher], GrammarMatcher]  # of one request


class _Plain:
    """A grammar of a whole output: a matcher at its beginning, to be copied."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def begun(self, begin: Begin) -> GrammarMatcher:
        return begin(self._matcher.deep_copy())


class _Tagged:
    """A grammar of pieces in a free text: a matcher at the beginning of each, to be copied when one begins."""

    def __init__(self, text: FreeText, pieces: Sequence[tuple[LLMatcher, bool]]) -> None:
        """Each piece with whether it is the last."""
        self._text = text
        self._pieces = pieces

    def begun(self, begin: Begin) -> TaggedMatcher:
        def piece(matcher: LLMatcher, is_last: bool) -> TagContent:
            return TagContent(lambda: begin(matcher.deep_copy()), is_last)

        return TaggedMatcher(self._text, [piece(matcher, is_last) for matcher, is_last in self._pieces])


@dataclass(slots=True)
class _Compiled:
    grammar: _Plain | _Tagged
    num_uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """What compiling may cost. Constants: they protect the replica, and no request gets more for a higher one."""

    timeout_s: float = 2.0  # of one grammar: other requests wait for it
    memory_bytes: int = 1_024_000_000  # of the process that compiles one grammar first, which has no model
    max_waiting: int = 64  # requests: at `timeout_s` each, the last one waits for two minutes at most
    max_cached: int = 256  # compiled grammars; `MAX_CACHED_CHARACTERS` bounds their memory


class Grammars:
    """Compiles one grammar after the other in a thread of its own; a cached grammar does not wait for it."""

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        *,
        vocab_size: int,
        limits: CompileLimits = CompileLimits(),
    ) -> None:
        """`read_vocabulary` is called when the first grammar comes; it may raise InvalidSetup."""
        self._limits = limits
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None  # these five belong to the compiling thread
        self._vocabulary: Vocabulary | None = None
        self._table: TokenTable | None = None  # made when the first grammar with tags comes
        self._sandbox: Sandbox | None = None
        self._is_unreadable = False
        self._compiled: OrderedDict[Key, _Compiled] = OrderedDict()  # the longest unused first; guarded by _lock
        self._num_characters = 0  # of those
        self._refused: OrderedDict[Key, str] = OrderedDict()  # why
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, "grammars", initializer=_step_back)
        self._resuming = ThreadPoolExecutor(1, "resumed-grammars", initializer=_step_back)

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        """See `Matchers`. Does not block."""
        grammar = request.sampling.grammar
        if grammar is None:
            return _done(None)
        key = _key(request, grammar)
        with self._lock:
            reason = self._refused.get(key)
            if reason is not None:
                return _failed(_refusal(grammar, reason))
            known = self._known(key)
            if known is None:
                if self._num_waiting >= self._limits.max_waiting:
                    return _failed(self._too_many())
                self._num_waiting += 1
        try:
            if known is None:
                compiling: Future[Matcher | None] = self._compiling.submit(self._compile, request, grammar, key)
                compiling.add_done_callback(self._one_waits_less)  # also where its caller has gone
                return compiling
            if request.generated_token_ids:
                return self._resuming.submit(self._begin, known, request, key)
        except RuntimeError:
            return _failed(EngineStopped("the engine is shutting down"))
        return _done(self._begin(known, request, key))

    def close(self) -> None:
        """Stop both threads and the sandbox; what waits for them is cancelled. Safe to call twice."""
        for pool in (self._compiling, self._resuming):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._sandbox is not None:
            self._sandbox.interrupt()
        for pool in (self._compiling, self._resuming):
            pool.shutdown()
        if self._sandbox is not None:
            self._sandbox.close()

    # ------------------------------------------------------------------ the caches, under the lock

    def _too_many(self) -> Overloaded:
        return Overloaded(
            f"{self._num_waiting:,} requests wait for their grammars to be compiled; try again shortly",
            retry_after_s=self._limits.timeout_s,
        )

    def _one_waits_less(self, _compiled: Future[Matcher | None]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _known(self, key: Key) -> _Plain | _Tagged | None:
        found = self._compiled.get(key)
        if found is None:
            return None
        found.num_uses += 1
        if found.num_uses >= MAX_USES:
            self._forget(key)
        else:
            self._compiled.move_to_end(key)
        return found.grammar

    def _remember(self, key: Key, grammar: _Plain | _Tagged) -> None:
        self._forget(key)
        self._compiled[key] = _Compiled(grammar)
        self._num_characters += len(key[2])
        while len(self._compiled) > self._limits.max_cached or self._num_characters > MAX_CACHED_CHARACTERS:
            self._forget(next(iter(self._compiled)))

    def _forget(self, key: Key) -> None:
        if self._compiled.pop(key, None) is not None:
            self._num_characters -= len(key[2])

    # ------------------------------------------------------------------ the compiling thread

    def _compile(self, request: Request, grammar: Grammar, key: Key) -> Matcher:
        with self._lock:
            known = self._known(key)  # another request may have brought it meanwhile
        try:
            return self._begin(known or self._compile_now(grammar, key), request, key)
        except Unusable as reason:
            self._refuse(key, str(reason))
            raise _refusal(grammar, str(reason)) from reason

    def _compile_now(self, grammar: Grammar, key: Key) -> _Plain | _Tagged:
        tools = self._tools()
        if tools is None:
            raise InvalidRequest("no grammar can be matched by this model's tokenizer", param=grammar.param)
        tokenizer, sandbox = tools
        matchers = [new_matcher(tokenizer, lark) for lark in sandbox.compile(grammar)]
        for matcher in matchers:
            matcher.compute_bitmask()  # the first takes longest, and would else be waited for in a step
        has_tags = grammar.kind is GrammarKind.TAGS
        compiled = self._tagged(grammar.text, matchers) if has_tags else _Plain(matchers[0])
        with self._lock:
            self._remember(key, compiled)
        return compiled

    def _tools(self) -> tuple[LLTokenizer, Sandbox] | None:
        """What grammars are compiled with, made for the first one; None where the tokenizer cannot be used."""
        if self._is_unreadable:
            return None
        if self._tokenizer is None or self._sandbox is None:
            try:
                vocabulary = self._read_vocabulary()
            except InvalidSetup as error:
                self._is_unreadable = True
                logger.warning("structured outputs are refused: %s", error)
                return None
            self._sandbox = Sandbox(
                vocabulary,
                timeout_s=self._limits.timeout_s,
                memory_bytes=self._limits.memory_bytes,
            )
            self._vocabulary = vocabulary
            self._tokenizer = vocabulary.for_matching()
        return self._tokenizer, self._sandbox

    def _tagged(self, text: str, matchers: Sequence[LLMatcher]) -> _Plain | _Tagged:
        assert self._vocabulary is not None, "matchers were made of it"
        tags = tags_of(text, self._vocabulary.special_texts)
        if not tags[0].trigger:
            return _Plain(matchers[0])
        if self._table is None:
            self._table = TokenTable(self._vocabulary)
        free = FreeText(self._table, [Trigger(tag.trigger.encode(), tag.is_opening) for tag in tags])
        return _Tagged(free, [(matcher, tag.is_last) for matcher, tag in zip(matchers, tags, strict=True)])

    def _refuse(self, key: Key, reason: str) -> None:
        with self._lock:
            self._refused[key] = reason
            if len(self._refused) > MAX_REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)

    # ------------------------------------------------------------------ any thread

    def _begin(self, grammar: _Plain | _Tagged, request: Request, key: Key) -> Matcher:
        """A matcher behind the request's generated tokens."""

        def begin(matcher: LLMatcher) -> GrammarMatcher:
            return GrammarMatcher(
                matcher,
                stop_token_ids=set(request.sampling.stop_token_ids),
                vocab_size=self._vocab_size,
                on_failure=partial(self._drop, key),
            )

        begun = grammar.begun(begin)
        for token_id in request.generated_token_ids:
            begun.advance(token_id)
        begun.catch_up()
        return begun

    def _drop(self, key: Key) -> None:
        """Forget a grammar when a matcher of it has reached its limits: the next request compiles a new one."""
        with self._lock:
            self._forget(key)


def _key(request: Request, grammar: Grammar) -> Key:
    return (request.cache_salt, grammar.kind, grammar.text, grammar.is_lenient)


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{grammar.param}: this {grammar.kind.in_words} cannot be used: {reason}",
        param=grammar.param,
        code="invalid_grammar",
    )


def _step_back() -> None:
    """Lower the priority of the calling thread. Only on Linux does a thread have one of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _done(matcher: Matcher | None) -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    future.set_result(matcher)
    return future


def _failed(error: Exception) -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    future.set_exception(error)
    return future
