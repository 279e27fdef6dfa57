"""Builders and fakes for tests of the engine: no torch, no weights."""

from __future__ import annotations

import itertools
import threading
import time
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from itertools import chain, count
from typing import Any

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig, names_of
from app.engine.adapter_store import AdapterStore
from app.engine.async_engine import AsyncEngine
from app.engine.batch import ScheduledSequence, StepBatch, StepResult, by_request
from app.engine.block_store import BlockStore, Fetch, name_of
from app.engine.engine import Engine
from app.engine.matcher import Matcher, Matchers, with_tokens
from app.engine.model_runner import ModelRunner
from app.engine.observer import StepObserver
from app.engine.prefix import Prefix
from app.engine.request import (
    FILTERS,
    Adapter,
    Address,
    FinishReason,
    Grammar,
    GrammarKind,
    ModelInfo,
    Pooling,
    PrefixSource,
    Request,
    SamplingParams,
    Thought,
    TokenDelta,
    TokenLogprobs,
)
from app.engine.sequence import EngineSequence
from app.engine.speculation.draft_model import ModelDrafter
from app.engine.speculation.drafter import Drafter, Take, one_by_one
from app.engine.state_pool import NO_STATE
from app.engine.stats import EngineStats, StoreStats
from app.errors import CarouselError, InvalidRequest

POLICIES = names_of(SchedulerConfig.model_fields["policy"])
VOCAB_SIZE = 50
EOS = 1
_numbers = count()


class BrokenPromise(BaseException):
    """A batch computes something else than it promises. No request is at fault, so an engine lets it through."""


class CountingRunner(ModelRunner):
    """Draws the last token plus one, so a sequence's tokens show whether it was computed from the right ones.

    It also checks what every batch promises: token by token, nothing is skipped and nothing computed without a block.
    """

    may_write_twice = False  # the same token into a slot in one step
    window_tokens = 0  # of window groups

    def __init__(self, block_size: int = 4) -> None:
        self.batches: list[StepBatch] = []
        self.deductions: list[dict[int, float]] = []  # by token, of every draw with adjustments
        self._block_size = block_size
        self._slots: dict[int, int] = {}  # slot → the token whose KV it holds
        self._groups: dict[int, int] = {}  # slot → the group of layers whose KV it holds
        self.states: dict[int, list[int]] = {NO_STATE: []}  # slot for a state → the tokens before the state

    def run(self, batch: StepBatch) -> StepResult:
        self.batches.append(batch)
        try:
            self._write(batch)
        except AssertionError as error:
            raise BrokenPromise(str(error)) from error
        num_prompt_tokens = {each.request.request_id: each.num_prompt_tokens for each in batch.sequences}
        for item in batch.sampled:
            if item.adjustments is not None:
                self._check_adjustments(item, num_prompt_tokens[item.request_id])
        token_ids = [self._draw(item) for item in batch.sampled]
        result = self._with_logprobs(batch, token_ids) if batch.has_logprobs else StepResult(token_ids)
        pooled = {item.request_id: self._pooled(item) for item in batch.scheduled if item.pooling is not None}
        assert batch.has_pooling == bool(pooled)
        return result._replace(pooled=pooled)

    def _write(self, batch: StepBatch) -> None:
        written: set[int] = set()
        for item in batch.scheduled:
            for position, token in enumerate(item.token_ids, start=item.start):
                for group, block_ids in enumerate((item.block_ids, *item.window_ids)):
                    slot = self._slot(block_ids, position)
                    is_same = self.may_write_twice and self._slots.get(slot) == token
                    assert is_same or slot not in written, f"slot {slot} written twice in one step"
                    written.add(slot)
                    self._slots[slot], self._groups[slot] = token, group
        for item in batch.scheduled:
            self._check_windows(item)
        self._write_states([item for item in batch.scheduled if item.states is not None])

    def _write_states(self, items: list[ScheduledSequence]) -> None:
        """Each state follows from the one that is read, which nothing overwrites."""
        reads, writes = Counter[int](), Counter[int]()
        for item in items:
            assert item.states is not None, "chosen for it"
            reads[item.states.read] += 1
            before = self.states[item.states.read]
            assert before == self._seen(item.block_ids, item.start), "a state of other tokens"
            for num_tokens, slot in item.states.writes:
                writes[slot] += 1
                self.states[slot] = [*before, *item.token_ids[:num_tokens]]
            assert self.states[item.states.writes[-1][1]] == self._seen(item.block_ids, item.end)
        assert not writes.keys() & reads.keys()
        assert all(number == 1 for number in writes.values())

    def _check_windows(self, item: ScheduledSequence) -> None:
        """All that its tokens look back to is there, in blocks of each group's own."""
        first = max(0, item.start + 1 - self.window_tokens)
        seen = self._seen(item.block_ids, item.end)[first:]
        tables = [[self._slot(ids, position) for position in range(first, item.end)] for ids in item.window_ids]
        for group, slots in enumerate(tables, 1):
            assert [(self._slots[slot], self._groups[slot]) for slot in slots] == [(token, group) for token in seen]
        in_all = [*chain.from_iterable(tables), *(self._slot(item.block_ids, at) for at in range(item.end))]
        assert len(set(in_all)) == len(in_all)

    def _check_adjustments(self, item: ScheduledSequence, num_prompt_tokens: int) -> None:
        """They are those of the tokens in the KV cache, all of them."""
        adjustments, sampling = item.adjustments, item.sampling
        assert adjustments is not None, "there is something to check"
        seen = self._seen(item.block_ids, item.end)
        assert sorted(adjustments.seen) == (sorted(seen) if sampling.repetition_penalty != 1.0 else [])
        deductions = dict(zip(adjustments.deducted, adjustments.deductions, strict=True))
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        counts = Counter(seen[num_prompt_tokens:] if any(penalties) else ())
        assert deductions == {token: -(penalties[0] + penalties[1] * count) for token, count in counts.items()}
        self.deductions.append(deductions)

    def _pooled(self, item: ScheduledSequence) -> list[float]:
        first = item.start if item.pooling == Pooling.MEAN else item.end - 1
        states = [hidden_state(self._seen(item.block_ids, place + 1)) for place in range(first, item.end)]
        return [sum(column) for column in zip(*states, strict=True)]

    def _with_logprobs(self, batch: StepBatch, token_ids: list[int]) -> StepResult:
        drawn = zip(batch.sampled, token_ids, strict=True)
        return StepResult(
            token_ids,
            by_request(
                (item.request_id, self._logprobs(item, item.end, token_id, item.sampling.logprobs))
                for item, token_id in drawn
                if item.sampling.logprobs is not None
            ),
            {
                item.request_id: tuple(
                    self._logprobs(item, position, token_id, item.sampling.prompt_logprobs or 0)
                    for position, token_id in enumerate(item.targets, start=item.first_target)
                )
                for item in batch.scheduled
                if item.targets
            },
        )

    def _logprobs(self, item: ScheduledSequence, position: int, token_id: int, num_top: int) -> TokenLogprobs:
        assert item.start < position <= item.end, "only tokens that are computed in this step predict"
        return logprobs_after(self._seen(item.block_ids, position), token_id, num_top)

    def _draw(self, item: ScheduledSequence) -> int:
        """A function of every token in the KV cache, as a real model's is."""
        return next_token(self._seen(item.block_ids, item.end))

    def _seen(self, block_ids: list[int], end: int) -> list[int]:
        """The tokens in the KV cache before a position."""
        return [self._slots[self._slot(block_ids, position)] for position in range(end)]

    def content(self, block_id: int) -> list[int]:
        """The tokens in the slots of a block."""
        first = block_id * self._block_size
        return [self._slots[slot] for slot in range(first, first + self._block_size)]

    def fill(self, block_id: int, token_ids: Sequence[int]) -> None:
        """Have these tokens in the slots of a block."""
        self._slots |= zip(count(block_id * self._block_size), token_ids, strict=False)

    def _slot(self, block_ids: list[int], position: int) -> int:
        return block_ids[position // self._block_size] * self._block_size + position % self._block_size


class SlotStore(BlockStore):
    """Keeps what a CountingRunner has in its slots, at once. It fills blocks only when it is told to.

    Where the runner has states, what it keeps and gives is cut at snapshots, as `BlockStore` says.
    """

    namespace = b"slots"

    def __init__(self, runner: CountingRunner, *, has_states: bool = False) -> None:
        self.blocks: dict[bytes, tuple[int, ...]] = {}
        self.snapshots: dict[bytes, list[int]] = {}  # by the name of the prefix: all of its tokens
        self._has_states = has_states
        self.fetches: list[Fetch] = []
        self._runner = runner
        self.num_fetched = 0

    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        found = [*itertools.takewhile(lambda name: request.generated_token_ids or name in self.blocks, names)]
        while found and self._has_states and not request.generated_token_ids and found[-1] not in self.snapshots:
            found.pop()
        return len(found)

    def expected_s(self, num_blocks: int, request: Request) -> float:
        return 0.0

    def begin(self, fetch: Fetch) -> None:
        self.fetches.append(fetch)

    def offer(self, prefix: Prefix) -> None:
        if prefix.snapshot is not None:
            self.snapshots[name_of(prefix, self.namespace)] = self._runner.states[prefix.snapshot.slot]
        at: Prefix | str = prefix
        while isinstance(at, Prefix) and at.is_held and (name := name_of(at, self.namespace)) not in self.blocks:
            self.blocks[name] = tuple(self._runner.content(at.block.block_id))
            at = at.parent

    def stats(self) -> StoreStats:
        return StoreStats(num_read=self.num_fetched)

    def settle(self, timeout_s: float) -> None:
        """All is kept at once. A fetch goes on."""

    def close(self) -> None:
        """Nothing is left to do."""

    def move(self, num_blocks: int, *, fails: bool = False) -> None:
        """Fill so many blocks of the first fetch. It is done with its last, or where it fails or is not wanted."""
        if not self.fetches:
            return
        fetch = self.fetches[0]
        while fetch.is_wanted and num_blocks and fetch.num_filled < len(fetch.blocks):
            if fetch.names[fetch.num_filled] not in self.blocks:
                fails = True
                break
            self._runner.fill(fetch.blocks[fetch.num_filled].block_id, self.blocks[fetch.names[fetch.num_filled]])
            fetch.num_filled += 1
            self.num_fetched += 1
            num_blocks -= 1
        if fails or not fetch.is_wanted or fetch.num_filled == len(fetch.blocks):
            if fetch.slot is not None:
                self._fill_slot(fetch, fetch.slot)
            fetch.is_done = True
            del self.fetches[0]

    def _fill_slot(self, fetch: Fetch, slot: int) -> None:
        with_snapshot = [at for at, name in enumerate(fetch.names[: fetch.num_filled], 1) if name in self.snapshots]
        fetch.num_covered_by_snapshot = max(with_snapshot, default=0)
        if with_snapshot:
            self._runner.states[slot] = self.snapshots[fetch.names[fetch.num_covered_by_snapshot - 1]]

    def move_to(self, runner: CountingRunner) -> None:
        """The process of its engine has died, and another one begins with what is kept."""
        self._runner = runner
        self.fetches.clear()


def next_token(token_ids: list[int]) -> int:
    """What the fake model generates after these tokens; never the end token."""
    total = sum((position + 1) * token for position, token in enumerate(token_ids))
    return 2 + total % (VOCAB_SIZE - 2)


class SteadyDrafter(Drafter):
    """Drafts for one sequence after the other, in every step."""

    @abstractmethod
    def draft_of(self, sequence: EngineSequence) -> list[int]:
        """The tokens that may follow those of a sequence."""

    def begin(self, num_sequences: int) -> bool:
        return True

    def draft(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> Iterator[tuple[int, Sequence[int]]]:
        return one_by_one(sequences, take, self.draft_of)

    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        """Nothing to learn."""


class KnowingDrafter(SteadyDrafter):
    """Drafts what a CountingRunner will draw, at most `num_drafts` tokens; some drafts are wrong, by their place."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def draft_of(self, sequence: EngineSequence) -> list[int]:
        known = list(sequence.token_ids(0, sequence.num_tokens))
        drafts: list[int] = []
        for place in range(self._num_drafts):
            drafts.append(next_token(known + drafts) if (sequence.num_tokens + place) % 5 else 3)
        return drafts[: sequence.num_tokens % (self._num_drafts + 1)]


class EagerModelDrafter(ModelDrafter):
    """Drafts four tokens in every step, whatever it takes."""

    def begin(self, num_sequences: int) -> bool:
        super().begin(num_sequences)
        self._number = 4
        return True


def hidden_state(token_ids: list[int]) -> list[float]:
    """What the fake model makes of the last of these tokens, behind the others."""
    return [float(next_token(token_ids)), float(len(token_ids))]


POOLINGS_OF_DECODERS = (Pooling.LAST, Pooling.MEAN)


def expected_embedding(prompt: tuple[int, ...], pooling: Pooling) -> bytes:
    """What stands for a prompt, computed the plain way."""
    states = [hidden_state(list(prompt[:end])) for end in range(1, len(prompt) + 1)]
    last = states[-1]
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    return array("f", last if pooling is Pooling.LAST else mean).tobytes()


def logprobs_after(token_ids: list[int], token_id: int, num_top: int) -> TokenLogprobs:
    """How likely the fake model finds a token after these."""
    first = next_token(token_ids)
    rank = 1 + (token_id - first) % VOCAB_SIZE
    top = tuple((first + place) % VOCAB_SIZE for place in range(num_top))
    return TokenLogprobs(-float(rank), rank, top, tuple(-1.0 - place for place in range(num_top)))


def expected_tokens(prompt: tuple[int, ...], max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> list[int]:
    """What the fake model generates for a prompt, computed the plain way."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt) :]


def tokens_of(request: Request) -> list[int]:
    """What the fake model still generates for a request, computed the plain way."""
    sampling = request.sampling
    whole = expected_tokens(request.prompt_token_ids, sampling.max_tokens, sampling.stop_token_ids)
    return whole[len(request.generated_token_ids) :]


def build_fake_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    runner: ModelRunner | None = None,
    max_model_len: int = 1000,
    clock: Callable[[], float] = time.monotonic,
    recorder: StepObserver | None = None,
    drafter: Drafter | None = None,
    adapters: AdapterStore | None = None,
    store: BlockStore | None = None,
    num_window_groups: int = 0,
    window_tokens: int = 0,
    num_state_slots: int = 0,
    state_interval_tokens: int = 8,
    labels: tuple[str, ...] = (),
    **scheduler: Any,
) -> Engine:
    settings: dict[str, Any] = {"max_running": 8, "max_step_tokens": 32, "prefill_chunk_tokens": 16} | scheduler
    return assemble(
        SchedulerConfig(**settings),
        CacheConfig(block_size=block_size),
        num_blocks=num_blocks,
        runner=runner or CountingRunner(block_size),
        model_info=ModelInfo(
            max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), embedding_size=2,
            num_window_groups=num_window_groups, window_tokens=window_tokens, labels=labels,
            num_state_slots=num_state_slots, state_interval_tokens=state_interval_tokens,
        ),
        clock=clock,
        recorder=recorder,
        drafter=drafter,
        adapters=adapters,
        store=store,
    )  # fmt: skip


@contextmanager
def async_engine(
    runner: ModelRunner | None = None,
    *,
    max_requests: int = 100,
    max_waiting_tokens: int | None = None,
    matchers: Matchers | None = None,
    **settings: Any,
) -> Iterator[AsyncEngine]:
    """A fake engine in its thread, until the end of the block."""
    engine = AsyncEngine(
        build_fake_engine(runner=runner, **settings), max_requests=max_requests, max_waiting_tokens=max_waiting_tokens,
        matchers=matchers,
    )  # fmt: skip
    try:
        yield engine
    finally:
        if isinstance(runner, GatedRunner):
            runner.gate.release(1000)  # else the thread would wait in its step
        engine.shutdown()


class MatchedRunner(CountingRunner):
    """A CountingRunner that draws only what the matchers of its batch allow."""

    def run(self, batch: StepBatch) -> StepResult:
        result = super().run(batch)
        token_ids = [
            token if item.matcher is None else first_allowed(item.allowed(), token)
            for token, item in zip(result.token_ids, batch.sampled, strict=True)
        ]
        return result._replace(token_ids=token_ids)


def first_allowed(allowed: bytes, token: int) -> int:
    """The first allowed token from `token` on, round the vocabulary."""
    wanted = [each % VOCAB_SIZE for each in range(token, token + VOCAB_SIZE)]
    return next(each for each in wanted if allowed[each >> 3] >> (each & 7) & 1)


BAD_GRAMMAR = "bad"


class SteppingMatcher:
    """Allows one token after the other, round and round; it can fail behind so many."""

    def __init__(self, token_ids: Sequence[int], *, fails_after: int | None = None) -> None:
        self._token_ids = token_ids
        self._fails_after = fails_after
        self.num_advanced = 0
        self.failure: str | None = None
        self.ignored_keywords: Sequence[str] = ()

    def allowed(self) -> bytes:
        if self.num_advanced == self._fails_after:
            self.failure = "it has failed"
        token_id = self._token_ids[self.num_advanced % len(self._token_ids)]
        return with_tokens(bytes(-(-VOCAB_SIZE // 8)), [token_id])

    def prepare(self) -> None:
        """Nothing is left to find out."""

    def advance(self, token_id: int) -> None:
        assert self.num_allowed([token_id]), "it was not allowed"
        self.num_advanced += 1

    def after(self, token_id: int) -> SteppingMatcher:
        other = copy(self)
        if self.num_allowed([token_id]):
            other.num_advanced += 1
        else:
            other.failure = "it was not allowed"
        return other

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        pairs = enumerate(zip(token_ids, self.forced(len(token_ids)), strict=True))
        return next((at for at, (given, allowed) in pairs if given != allowed), len(token_ids))

    def forced(self, at_most: int) -> list[int]:
        places = range(self.num_advanced, self.num_advanced + at_most)
        return [self._token_ids[place % len(self._token_ids)] for place in places]


class MadeMatchers:
    """Grammars whose text is token ids; a `!` behind them fails after as many tokens as there are."""

    is_closed = False

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        future: Future[Matcher | None] = Future()
        grammar = request.sampling.grammar
        if grammar is None:
            future.set_result(None)
        elif grammar.text == BAD_GRAMMAR:
            future.set_exception(InvalidRequest("this grammar is no use", param=grammar.param))
        else:
            token_ids = [int(each) for each in grammar.text.removesuffix("!").split()]
            matcher = SteppingMatcher(token_ids, fails_after=len(token_ids) if "!" in grammar.text else None)
            for token_id in request.generated_token_ids:
                matcher.advance(token_id)
            future.set_result(matcher)
        return future

    def prepare(self) -> None:
        """Nothing to read."""

    def close(self) -> None:
        self.is_closed = True


class GatedRunner(CountingRunner):
    """Steps only when let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.is_waiting = False  # in a step, at the gate

    def shut(self) -> None:
        """Let nothing through that was not let through by now."""
        while self.gate.acquire(blocking=False):
            pass

    def run(self, batch: StepBatch) -> StepResult:
        self.is_waiting = True
        self.gate.acquire()
        self.is_waiting = False
        return super().run(batch)


class FakeClock:
    """Seconds that pass only when a test says so, and by `step_s` whenever a TimedRunner computes a step."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds


class TimedRunner(CountingRunner):
    """A CountingRunner whose steps take time on a FakeClock."""

    def __init__(self, clock: FakeClock, *, block_size: int = 4, step_s: float = 0.01) -> None:
        super().__init__(block_size)
        self._clock = clock
        self._step_s = step_s

    def run(self, batch: StepBatch) -> StepResult:
        self._clock.advance(self._step_s)
        return super().run(batch)


class PoisonedRunner(CountingRunner):
    """Fails, after some of it was written, on every batch with a request that is called so; `""`: on every batch."""

    def __init__(self, poison: str = "bad") -> None:
        super().__init__()
        self.poison = poison
        self.num_runs = 0

    def run(self, batch: StepBatch) -> StepResult:
        self.num_runs += 1
        for end, item in enumerate(batch.scheduled):
            if item.request_id.startswith(self.poison):
                super().run(StepBatch(batch.scheduled[:end], batch.sequences[:end]))
                raise RuntimeError("poison")
        return super().run(batch)


def make_request(
    prompt: tuple[int, ...] = (5, 6, 7),
    *,
    request_id: str | None = None,
    cache_salt: str = "",
    priority: int = 0,
    tenant: str = "",
    deadline_s: float | None = None,
    pooling: Pooling | None = None,
    adapter: Adapter | None = None,
    **sampling: object,
) -> Request:
    settings: dict[str, object] = {"max_tokens": 4, "temperature": 0.0} | sampling
    return Request(
        request_id=request_id or f"request-{next(_numbers)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**settings),  # type: ignore[arg-type]
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
        deadline_s=deadline_s,
        pooling=pooling,
        adapter=adapter,
    )


def make_full_request() -> Request:
    """A request without any field at its default. A new field without a value here fails, and so reaches all tests."""
    grammar = Grammar(GrammarKind.REGEX, "a+", True, "regex", Thought("<think>", "</think>", True, max_tokens=3))
    sampling = SamplingParams(
        max_tokens=9, min_tokens=1, temperature=0.5, seed=2**62, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.5, logit_bias=((3, -1.5),), stop_token_ids=(7, 8), ignore_eos=True, grammar=grammar,
        allowed_token_ids=(3, 4), bad_words=((5, 6),), logprobs=2, prompt_logprobs=1, logprob_token_ids=(9,), **FILTERS,
    )  # fmt: skip
    request = Request(
        request_id="full", prompt_token_ids=(5, 6, 7), sampling=sampling, generated_token_ids=(8,),
        prediction_token_ids=(8, 9), pooling=Pooling.MEAN, second_text_at=1, num_scored_tokens=2, cache_salt="salt",
        priority=-3, tenant="ä", deadline_s=9.5, group="group", preset="preset", is_background=True, session="session",
        call="call", no_queue=True, adapter=Adapter(name="sql", path="/sql", digest="12ab"),
        prefix_at=PrefixSource(Address("127.0.0.1", 1, "secret"), 2),
    )  # fmt: skip
    for each in (request, sampling, grammar):
        kept = [field.name for field in fields(each) if getattr(each, field.name) == field.default]
        assert not kept, f"give {', '.join(kept)} of {type(each).__name__} a value here"
    return request


class Outcome:
    """What the callers of an engine have heard."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.embeddings: dict[str, bytes] = {}
        self.reasons: dict[str, FinishReason] = {}  # in the order in which they ended
        self.errors: dict[str, CarouselError] = {}
        self.num_cached_tokens = 0  # of all prompts
        self.predicted: dict[str, tuple[int, int]] = {}  # accepted and rejected tokens of predictions, where any

    def book(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, f"{delta.request_id} was heard of after its end"
            self.token_ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            self.num_cached_tokens += delta.num_cached_tokens
            self.prompt_logprobs.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            if delta.embedding is not None:
                self.embeddings[delta.request_id] = delta.embedding
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason
            if delta.num_accepted or delta.num_rejected:
                before = self.predicted.get(delta.request_id, (0, 0))
                self.predicted[delta.request_id] = before[0] + delta.num_accepted, before[1] + delta.num_rejected
            assert (delta.error is not None) == (delta.finish_reason is FinishReason.ERROR)
            if delta.error is not None:
                self.errors[delta.request_id] = delta.error

    def check(self, *requests: Request) -> None:
        """They have the tokens of plain generation, in whatever steps they came."""
        for request in requests:
            assert self.token_ids[request.request_id] == tokens_of(request), request.request_id


def run_to_end(
    engine: Engine,
    *requests: Request,
    max_steps: int = 10_000,
    clock: FakeClock | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Add the requests and step until nothing is left, letting time pass where the engine waits for it.

    outcome: what was heard before; it grows.
    """
    outcome = outcome or Outcome()
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            return outcome
        if engine.idle_s:
            assert clock is not None, "the engine waits for its clock"
            clock.advance(engine.idle_s)
        outcome.book(engine.step())
    raise AssertionError(f"the engine still has work after {max_steps} steps")


class TimedEngine:
    """An engine on a FakeClock, with steps of 10 ms; what it has computed, and what its callers have heard."""

    def __init__(self, *, step_s: float = 0.01, **settings: Any) -> None:
        self.clock = FakeClock()
        self.runner = TimedRunner(self.clock, step_s=step_s)
        given = {"runner": self.runner, "clock": self.clock, "num_blocks": 256} | settings
        self.engine: Engine = build_fake_engine(**given)
        self.outcome = Outcome()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self, times: int = 1) -> list[str]:
        """Step so often; returns the requests that the last step has computed."""
        num_before = 0
        for _ in range(times):
            num_before = len(self.runner.batches)
            self.outcome.book(self.engine.step())
        return [item.request_id for batch in self.runner.batches[num_before:] for item in batch.scheduled]

    def finish(self, *requests: Request) -> Outcome:
        """Add these and step until nothing is left; returns all that was heard."""
        return run_to_end(self.engine, *requests, clock=self.clock, outcome=self.outcome)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def computed(self) -> list[str]:
        """The requests of each step, one step after the other."""
        return [item.request_id for batch in self.runner.batches for item in batch.scheduled]

    @property
    def begun(self) -> list[str]:
        """The requests in the order in which something was first computed for them."""
        return list(dict.fromkeys(self.computed))
