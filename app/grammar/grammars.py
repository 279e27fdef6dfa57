"""Compiles a model's grammars in separate threads of the engine's process, and caches them."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

from llguidance import LLMatcher

from app.child_process import lower_priority
from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind, Request
from app.errors import EngineStopped, InvalidRequest, InvalidSetup, Overloaded, Unavailable
from app.grammar.compile_queue import CompileQueue, WaitingRequest
from app.grammar.compiling import CUT_MARK, Unusable, new_matcher
from app.grammar.free_text import FreeText, TokenTable, Trigger
from app.grammar.matchers import GrammarMatcher, MatchingTime, TagContent, TaggedMatcher
from app.grammar.sandbox import Sandbox, WorkerKilled
from app.grammar.tags import Tag, read_tags
from app.grammar.thoughts import ThoughtMatcher, ThoughtText
from app.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_CACHED_CHARACTERS = 2_000_000  # a compiled schema may use a hundred times the memory of its text
# Matching makes a compiled grammar's internal cache grow by up to 80 MB per second of CPU time. A grammar is therefore
# recompiled after MAX_MATCHING_S of matching. If all cached grammars together exceed MAX_CACHED_S, those with the most
# matching time are dropped.
MAX_MATCHING_S = 1.0
MAX_CACHED_S = 5.0
# Two grammars are compiled concurrently, so that one tenant's expensive grammars do not delay another tenant.
_NUM_THREADS = 2

Key = bytes  # a digest, because the texts of refused grammars could use hundreds of megabytes

Begin = Callable[[LLMatcher], GrammarMatcher]  # creates a request's matcher from a copy of the compiled matcher
Begun = GrammarMatcher | TaggedMatcher | None  # None if any text is allowed


@dataclass(slots=True)
class _Compiled:
    begin: Callable[[Begin], Begun]
    end_token_ids: tuple[int, ...]  # the model's end tokens
    num_characters: int  # length of the grammar's text
    ignored_keywords: Sequence[str] = ()
    thought: ThoughtText | None = None
    matched: MatchingTime = field(default_factory=MatchingTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits on the cost of compiling. Not settings, because they protect the replica and higher values do not help."""

    timeout_s: float = 2.0  # CPU time for one grammar, during which the tenant's other requests wait
    memory_bytes: int = 1_024_000_000  # for compiling a grammar in the sandbox's process, in addition to the vocabulary
    max_waiting: int = 256  # waiting and compiling requests of all tenants; a single call may add 128
    max_cached: int = 256  # number of cached grammars; `MAX_CACHED_CHARACTERS` limits their memory


class _Tools:
    """The vocabulary, tokenizer and sandboxes that the compiling threads use."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = vocabulary.for_matching()
        self.sandboxes = [
            Sandbox(vocabulary, timeout_s=limits.timeout_s, memory_bytes=limits.memory_bytes)
            for _ in range(_NUM_THREADS)
        ]
        self._idle = deque(self.sandboxes)

    @cached_property
    def table(self) -> TokenTable:
        """The vocabulary, indexed for free text."""
        return TokenTable(self.vocabulary)

    @contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """Reserve a sandbox for a `with` block. Prefers the last one used, because its process is already running."""
        sandbox = self._idle.pop()
        try:
            yield sandbox
        finally:
            self._idle.append(sandbox)


class Grammars:
    """Compiles grammars in two threads, at most one grammar per tenant at a time. Cached grammars do not wait."""

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        *,
        limits: CompileLimits = CompileLimits(),
    ) -> None:
        """`read_vocabulary` is called once, by `prepare` or for the first grammar. It may raise InvalidSetup."""
        self._limits = limits
        self._read_vocabulary = read_vocabulary
        self._tools: _Tools | None = None  # see `_get_tools`
        self._is_unreadable = False
        self._making_tools = threading.Lock()
        self._compiled: OrderedDict[Key, _Compiled] = OrderedDict()  # least recently used first; guarded by _lock
        self._num_characters = 0  # total length of the texts of `_compiled`
        self._refused: OrderedDict[Key, str] = OrderedDict()  # reasons for refusals, oldest first
        self._queue = CompileQueue(limits.max_waiting)  # guarded by _lock
        self._lock = threading.Lock()
        self._is_closed = False
        begin = lower_priority if sys.platform == "linux" else None  # only Linux supports priorities for single threads
        self._compiling = ThreadPoolExecutor(_NUM_THREADS, "grammars", initializer=begin)
        self._resuming = ThreadPoolExecutor(1, "resumed-grammars", initializer=begin)

    def prepare(self) -> None:
        """Start reading the vocabulary in a thread with normal priority, and return immediately.

        Otherwise, the first grammar would start this work. A separate process reads the vocabulary, which takes longer
        on busy cores. `Vocabulary.for_matching` would then block the engine's thread while requests are running.
        """
        threading.Thread(target=self._get_tools, name="vocabulary", daemon=True).start()

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
        try:
            if known is None:
                return self._queued(WaitingRequest(request, grammar))
            if request.generated_token_ids:
                return self._resuming.submit(self._begin, known, request, key)
        except RuntimeError:
            return _failed(_stopped())
        return _done(self._begin(known, request, key))

    def close(self) -> None:
        """Stop all threads and sandboxes. Waiting requests fail with EngineStopped. May be called twice."""
        with self._lock:
            self._is_closed = True
            left = self._queue.clear()
        for waiting in left:
            _fail(waiting.matcher, _stopped())
        for pool in (self._compiling, self._resuming):
            pool.shutdown(wait=False, cancel_futures=True)
        sandboxes = () if self._tools is None else self._tools.sandboxes
        for sandbox in sandboxes:
            sandbox.interrupt()
        for pool in (self._compiling, self._resuming):
            pool.shutdown()
        for sandbox in sandboxes:
            sandbox.close()

    # ------------------------------------------------------------------ the queue

    def _queued(self, new: WaitingRequest) -> Future[Matcher | None]:
        """Add a request to the queue, and return the future for its matcher. Raises RuntimeError after `close`."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("closed")
            refused = self._queue.add(new)
            num_waiting = len(self._queue)
        waits = weakref.ref(new)  # avoids a reference cycle: `new` refers to the future, and the future to its callback
        new.matcher.add_done_callback(lambda _: self._discard(waits()))  # also called after a cancellation
        if refused is not None:
            too_many = f"{num_waiting:,} requests are waiting for their grammars to be compiled; try again shortly"
            _fail(refused.matcher, Overloaded(too_many, retry_after_s=self._limits.timeout_s))
        if refused is not new:
            self._compiling.submit(self._compile_waiting)
        return new.matcher

    def _discard(self, left: WaitingRequest | None) -> None:
        if left is not None:
            with self._lock:
                self._queue.discard(left)

    def _compile_waiting(self) -> None:
        """Compile waiting grammars until the queue is empty, or the other thread serves every tenant in the queue."""
        while True:
            with self._lock:
                waiting = self._queue.take()
            if waiting is None:
                return
            try:
                if waiting.matcher.set_running_or_notify_cancel():
                    _settle(waiting.matcher, partial(self._compile, waiting.request, waiting.grammar))
            finally:
                with self._lock:
                    self._queue.end(waiting)
                del waiting  # avoids a reference cycle of this frame, the future, its error and the error's traceback

    # ------------------------------------------------------------------ the caches, under the lock

    def _known(self, key: Key) -> _Compiled | None:
        self._forget_the_largest()
        found = self._compiled.get(key)
        if found is None:
            return None
        if found.matched.seconds >= MAX_MATCHING_S:
            self._forget(key)
            return None
        self._compiled.move_to_end(key)
        return found

    def _forget_the_largest(self) -> None:
        """Drop the grammars with the most matching time until the total is at most MAX_CACHED_S."""
        while sum(each.matched.seconds for each in self._compiled.values()) > MAX_CACHED_S:
            self._forget(max(self._compiled, key=lambda key: self._compiled[key].matched.seconds))

    def _remember(self, key: Key, compiled: _Compiled) -> None:
        self._forget(key)
        self._compiled[key] = compiled
        self._num_characters += compiled.num_characters
        while len(self._compiled) > self._limits.max_cached or self._num_characters > MAX_CACHED_CHARACTERS:
            self._forget(next(iter(self._compiled)))

    def _forget(self, key: Key) -> None:
        if (forgotten := self._compiled.pop(key, None)) is not None:
            self._num_characters -= forgotten.num_characters

    # ------------------------------------------------------------------ the compiling threads

    def _compile(self, request: Request, grammar: Grammar) -> Matcher:
        key = _key(request, grammar)
        with self._lock:
            known, reason = self._known(key), self._refused.get(key)  # another request may have compiled it already
        try:
            if reason is not None:
                raise Unusable(reason)
            return self._begin(known or self._compile_now(grammar, key), request, key)
        except Unusable as unusable:
            self._refuse(key, str(unusable))
            raise _refusal(grammar, str(unusable)) from unusable
        except WorkerKilled as killed:  # not cached, because the grammar may compile at another time
            if self._is_closed:
                raise _stopped() from killed
            if killed.is_from_outside:
                raise Unavailable(f"{grammar.param}: {killed}; send the request again") from killed
            raise _refusal(grammar, str(killed)) from killed

    def _compile_now(self, grammar: Grammar, key: Key) -> _Compiled:
        tools = self._get_tools()
        if tools is None:
            raise InvalidRequest("structured output is not supported for this model's tokenizer", param=grammar.param)
        form, ignored = self._form(tools, grammar)
        compiled = _Compiled(form, tools.vocabulary.eos_token_ids, len(grammar.text), ignored)
        if grammar.thought is not None:
            with self._making_tools:
                compiled.thought = ThoughtText(tools.table, grammar.thought)
        with self._lock:
            self._remember(key, compiled)
        return compiled

    def _form(self, tools: _Tools, grammar: Grammar) -> tuple[Callable[[Begin], Begun], Sequence[str]]:
        """Compile a grammar. Returns a function that creates matchers, and the ignored schema keywords."""
        if grammar.kind is GrammarKind.TEXT:
            return lambda begin: None, ()
        with tools.sandbox() as sandbox:
            compiled = sandbox.compile(grammar)
        matchers = [new_matcher(tools.tokenizer, lark) for lark in compiled.larks]
        for matcher in matchers:
            matcher.compute_bitmask()  # the first mask takes the longest to compute, and no step should wait for it
        if grammar.kind is GrammarKind.TAGS:
            tags = read_tags(grammar.text)
            if tags[0].trigger:
                return self._in_free_text(tools, tags, matchers), compiled.dropped
        return lambda begin: begin(matchers[0].deep_copy()), compiled.dropped

    def _get_tools(self) -> _Tools | None:
        """Return `_tools`, which the first call creates, or None if the tokenizer cannot be used. Thread-safe."""
        with self._making_tools:
            if self._tools is None and not self._is_unreadable:
                try:
                    self._tools = _Tools(self._read_vocabulary(), self._limits)
                except InvalidSetup as error:
                    self._is_unreadable = True
                    logger.warning("requests for structured output will be refused: %s", error)
            return self._tools

    def _in_free_text(
        self, tools: _Tools, tags: Sequence[Tag], matchers: Sequence[LLMatcher]
    ) -> Callable[[Begin], TaggedMatcher]:
        with self._making_tools:
            table = tools.table
        free = FreeText(table, [Trigger(tag.trigger.encode(), tag.is_opening) for tag in tags])

        def begun(begin: Begin) -> TaggedMatcher:
            def piece(matcher: LLMatcher, tag: Tag) -> TagContent:
                return TagContent(lambda: begin(matcher.deep_copy()), tag.is_last)

            return TaggedMatcher(free, [piece(matcher, tag) for matcher, tag in zip(matchers, tags, strict=True)])

        return begun

    def _refuse(self, key: Key, reason: str) -> None:
        max_remembered_refusals, max_length = 1024, 600  # well below a megabyte in total, including the keys
        with self._lock:
            self._refused[key] = reason[:max_length]
            if len(self._refused) > max_remembered_refusals:
                self._refused.popitem(last=False)

    # ------------------------------------------------------------------ any thread

    def _begin(self, compiled: _Compiled, request: Request, key: Key) -> Matcher:
        """Return a matcher that has already consumed the request's generated tokens."""
        assert self._tools is not None, "`_tools` exists, because the grammar was compiled with it"
        texts = self._tools.vocabulary.tokens

        def begin(matcher: LLMatcher) -> GrammarMatcher:
            return GrammarMatcher(
                matcher,
                stop_token_ids=set(request.sampling.stop_token_ids),
                texts=texts,
                spent=compiled.matched,
                on_failure=partial(self._drop, key),
            )

        begin_output = partial(compiled.begin, begin)
        grammar = request.sampling.grammar
        begun: GrammarMatcher | TaggedMatcher | ThoughtMatcher | None
        if compiled.thought is not None and grammar is not None and grammar.thought is not None:
            ends = {*compiled.end_token_ids, *request.sampling.stop_token_ids}
            begun = ThoughtMatcher(compiled.thought, grammar.thought, begin_output, end_token_ids=ends)
        else:
            begun = begin_output()
        assert begun is not None, "a grammar without constraints (`GrammarKind.TEXT`) always has a thought"
        if grammar is not None:  # paths start with the request's field, because two fields may have equal schemas
            named = (each if each == CUT_MARK else f"{grammar.param}.{each}" for each in compiled.ignored_keywords)
            begun.ignored_keywords = tuple(named)
        for token_id in request.generated_token_ids:
            begun.advance(token_id)
        begun.catch_up()
        return begun

    def _drop(self, key: Key) -> None:
        """Drop a grammar after one of its matchers has exceeded a limit. The next request recompiles it."""
        with self._lock:
            self._forget(key)


def _key(request: Request, grammar: Grammar) -> Key:
    """Return a digest of a grammar's text and options.

    It includes the cache salt, so that requests with different salts never share a compiled grammar.
    """
    end_of_thought = "" if grammar.thought is None else grammar.thought.end
    digest = hashlib.sha256()
    for part in (request.cache_salt, grammar.kind, grammar.text, str(grammar.is_lenient), end_of_thought):
        written = part.encode("utf-8", errors="surrogatepass")
        digest.update(len(written).to_bytes(8))
        digest.update(written)
    return digest.digest()


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{grammar.param}: this {grammar.kind.in_words} cannot be used: {reason}",
        param=grammar.param,
        code="invalid_grammar",
    )


def _done(matcher: Matcher | None) -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    future.set_result(matcher)
    return future


def _failed(error: Exception) -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    future.set_exception(error)
    return future


def _settle(future: Future[Matcher | None], make: Callable[[], Matcher]) -> None:
    """Set the result or error of `make` on a running future."""
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)
        del future, make  # avoids a reference cycle, as in `_compile_waiting`


def _fail(future: Future[Matcher | None], error: Exception) -> None:
    """Set an error on a pending future. Does nothing if the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _stopped() -> EngineStopped:
    return EngineStopped("the engine is shutting down")
