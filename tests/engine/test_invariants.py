"""Random workloads against the engine: what must hold after every step, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from app.config import SchedulerConfig
from app.engine.batch import StepBatch, StepLimits, StepResult
from app.engine.engine import StepError
from app.engine.observer import StepObserver
from app.engine.prefix import Prefix
from app.engine.request import FinishReason, Request
from app.engine.speculation.drafter import Drafter, LookupDrafter
from app.engine.state_pool import NO_STATE
from app.errors import DeadlineMissed, Quarantined, StepFailed
from tests.kit.engine import (
    POLICIES,
    POOLINGS_OF_DECODERS,
    FakeClock,
    KnowingDrafter,
    Outcome,
    SlotStore,
    TimedRunner,
    build_fake_engine,
    expected_embedding,
    expected_tokens,
    logprobs_after,
    make_request,
)

pytestmark = pytest.mark.usefixtures("small_lengths")

STRATEGIES: list[Any] = [
    "continuous",
    {"name": "hybrid", "prefill_share": 0.3},
    {"name": "static", "max_wait_ms": 40},
    {"name": "dynamic", "max_wait_ms": 40},
    {"name": "bucketed", "max_wait_ms": 40},
    {"name": "sorted", "max_wait_ms": 40},
    {"name": "adaptive", "target_latency_ms": 60, "max_wait_ms": 40},
]


class FailingOnDemand(TimedRunner):
    """Raises for every batch with a poisonous request in it; for all batches while it is broken."""

    is_broken = False
    poison: str | None = None

    def run(self, batch: StepBatch) -> StepResult:
        if self.is_broken or any(item.request_id == self.poison for item in batch.scheduled):
            raise RuntimeError("asked to fail")
        return super().run(batch)


def tokens_before(prefix: Prefix) -> list[int]:
    """All tokens of a prefix."""
    before = tokens_before(prefix.parent) if isinstance(prefix.parent, Prefix) else []
    return [*before, *prefix.token_ids]


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go, expire and fail at random on a pool that is too small for them, and settings change."""

    requests = Bundle("requests")
    runner_class: type[FailingOnDemand] = FailingOnDemand
    can_die = True

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 6),
        spare_tokens=st.integers(0, 12),
        chunk=st.integers(1, 9),
        max_scored_tokens=st.sampled_from([1, 3, 100]),
        strategy=st.sampled_from(STRATEGIES),
        policy=st.sampled_from(POLICIES),
        make_drafter=st.sampled_from([lambda: None, lambda: KnowingDrafter(3), LookupDrafter]),
        has_store=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(0, 0), (0, 0), (1, 3), (2, 6)]),
        num_state_slots=st.sampled_from([0, 0, 2, 3, 5, 12]),
        num_blocks_between=st.integers(1, 3),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        spare_tokens: int,
        chunk: int,
        max_scored_tokens: int,
        strategy: Any,
        policy: Any,
        make_drafter: Callable[[], Drafter | None],
        has_store: bool,
        windows: tuple[int, int],
        num_state_slots: int,
        num_blocks_between: int,
    ) -> None:
        self.max_scored_tokens = max_scored_tokens
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("app.engine.batch.MAX_SCORED_TOKENS", max_scored_tokens)
        self.settings = {
            "max_running": max_running,
            "max_step_tokens": max_running + spare_tokens,
            "prefill_chunk_tokens": chunk,
            "strategy": strategy,
            "policy": policy,
        }
        self.allowed = (max_running, max_running + spare_tokens)
        self.clock = FakeClock()
        self.runner = self.runner_class(self.clock, block_size=block_size)
        if self.runner.launches:
            num_state_slots = 0
        elif num_state_slots:
            windows = (0, 0)
        num_window_groups, self.runner.window_tokens = windows
        has_store &= not num_window_groups
        self.store = SlotStore(self.runner, has_states=num_state_slots > 0) if has_store else None
        self.new_engine = partial(
            build_fake_engine, num_blocks=num_blocks, block_size=block_size, clock=self.clock, store=self.store,
            num_window_groups=num_window_groups, window_tokens=self.runner.window_tokens,
            num_state_slots=num_state_slots, state_interval_tokens=num_blocks_between * block_size,
        )  # fmt: skip
        self.engine = self.new_engine(
            runner=self.runner, recorder=self.new_recorder(), drafter=make_drafter(), **self.settings
        )
        self.num_slots = self.engine.model_info.max_model_len
        self.outcome = Outcome()
        self.sent: dict[str, Request] = {}
        self.ended_otherwise: set[str] = set()

    def new_recorder(self) -> StepObserver | None:
        """The engine's recorder; this one ignores all events."""
        return None

    @rule(
        target=requests,
        data=st.data(),
        salt=st.sampled_from(["", "other"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["a", "b", "c"]),
        deadline_s=st.sampled_from([None, None, None, 0.05, 0.3]),
        stop_token_ids=st.sampled_from([(), (7, 20, 33)]),
        adjustments=st.sampled_from(
            [
                {},
                {},
                {"presence_penalty": 0.5},
                {"frequency_penalty": 0.5, "repetition_penalty": 1.5},
                {"logit_bias": ((3, 1.0),)},
            ]
        ),
        num_generated_elsewhere=st.sampled_from([0, 0, 0, 1, 5]),
        num_scored_elsewhere=st.sampled_from([0, 0, 3]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        is_background=st.sampled_from([False, False, True]),
        pooling=st.sampled_from([None, None, None, *POOLINGS_OF_DECODERS]),
        is_predicted=st.booleans(),
    )
    def add(
        self,
        data: st.DataObject,
        salt: str,
        num_generated_elsewhere: int,
        num_scored_elsewhere: int,
        is_background: bool,
        adjustments: dict[str, Any],
        is_predicted: bool,
        **fields: Any,
    ) -> str:
        # Few different tokens, so that prefixes are shared.
        length = data.draw(st.integers(1, self.num_slots - 1))
        tokens = data.draw(st.sampled_from([[5], [5], [5, 6]]))
        prompt = tuple(data.draw(st.lists(st.sampled_from(tokens), min_size=length, max_size=length)))
        max_tokens = data.draw(st.integers(0, min(12, self.num_slots - length))) if fields["pooling"] is None else 0
        request = make_request(prompt, max_tokens=max_tokens, cache_salt=salt, **adjustments, **fields)
        before = expected_tokens(prompt, max_tokens, stop_token_ids=request.sampling.stop_token_ids)[:-1]
        generated = tuple(before[:num_generated_elsewhere])
        request = replace(
            request,
            generated_token_ids=generated,
            # The prompt is scored before anything is generated.
            num_scored_tokens=length - 1 if generated else min(num_scored_elsewhere, length - 1),
            is_background=is_background,
            prediction_token_ids=(*before[:4], 4, *before[5:]) if is_predicted else (),
        )
        try:
            self.engine.add(request)
        except Quarantined:
            return request.request_id
        self.sent[request.request_id] = request
        return request.request_id

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        delta = self.engine.abort(request_id)
        if delta is not None:
            assert delta.finish_reason is FinishReason.ABORT
            self.ended_otherwise.add(request_id)

    @precondition(lambda self: self.engine.has_work)
    @rule(num_steps=st.integers(1, 8), num_filled=st.integers(0, 3))
    def step(self, num_steps: int, num_filled: int) -> None:
        for _ in range(num_steps):
            if self.store is not None:
                self.store.move(num_filled)
            if self.engine.has_work:
                self.clock.advance(self.engine.idle_s or 0.0)
                self.outcome.book(self.engine.step())

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def break_the_device_for_a_step(self) -> None:
        self.runner.is_broken = True
        self.fail()
        self.runner.is_broken = False

    @precondition(lambda self: self.engine.has_work)
    @rule(request_id=requests)
    def poison_a_step(self, request_id: str) -> None:
        self.runner.poison = request_id
        self.fail()
        self.runner.poison = None

    @precondition(lambda self: self.store is not None)
    @rule(num_filled=st.integers(0, 2))
    def break_off_a_fetch(self, num_filled: int) -> None:
        assert self.store is not None, "it has one"
        self.store.move(num_filled, fails=True)

    @precondition(lambda self: self.store is not None)
    @rule()
    def forget_prefixes(self) -> None:
        """Those in the KV memory; they are in the store still."""
        self.engine.clear_prefix_cache()

    @precondition(lambda self: self.can_die and self.store is not None and not self.engine.is_asleep)
    @rule()
    def die(self) -> None:
        """What the process holds is lost, and another one goes on with what the store has."""
        assert self.store is not None, "it has one"
        block_size = self.engine._scheduler.pool.block_size
        self.runner = self.runner_class(self.clock, block_size=block_size)
        self.store.move_to(self.runner)
        self.engine = self.new_engine(runner=self.runner, **self.settings)
        for request_id in sorted(self.sent.keys() - self.outcome.reasons.keys() - self.ended_otherwise):
            self.engine.add(self.so_far(self.sent[request_id]))

    def so_far(self, request: Request) -> Request:
        """As the next replica gets it."""
        generated = (*request.generated_token_ids, *self.outcome.token_ids.get(request.request_id, ()))
        num_scored = request.num_scored_tokens + len(self.outcome.prompt_logprobs.get(request.request_id, ()))
        return replace(request, generated_token_ids=generated, num_scored_tokens=num_scored)

    @precondition(lambda self: self.store is not None and self.store.snapshots)
    @rule(data=st.data())
    def lose_files(self, data: st.DataObject) -> None:
        """The store deletes one snapshot and one block."""
        assert self.store is not None, "it has one"
        del self.store.snapshots[data.draw(st.sampled_from(sorted(self.store.snapshots)))]
        del self.store.blocks[data.draw(st.sampled_from(sorted(self.store.blocks)))]

    def fail(self) -> None:
        failed: list[str] = []
        try:
            self.outcome.book(self.engine.step())
        except StepError as error:
            failed = error.request_ids
        assert self.runner.poison is None or failed in ([], [self.runner.poison])
        self.ended_otherwise.update(failed)

    @rule(seconds=st.sampled_from([0.01, 0.04, 0.5]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(strategy=st.sampled_from(STRATEGIES), policy=st.sampled_from(POLICIES), max_running=st.integers(1, 6))
    def reconfigure(self, strategy: Any, policy: Any, max_running: int) -> None:
        self.settings |= {"strategy": strategy, "policy": policy, "max_running": max_running}
        self.settings["max_step_tokens"] = max(max_running, self.settings["max_step_tokens"])
        # A step that is under way may be as large as before.
        self.allowed = (max(max_running, self.allowed[0]), max(self.settings["max_step_tokens"], self.allowed[1]))
        self.engine.reconfigure(SchedulerConfig(**self.settings))
        self.runner.batches.clear()

    @rule(max_running=st.integers(1, 6))
    def limit(self, max_running: int) -> None:
        """As the tuner does. Nothing is preempted for a limit."""
        num_running, num_preempted = self.engine.stats().num_running, self.engine.stats().total_preemptions
        configured = StepLimits.of(SchedulerConfig(**self.settings))
        self.engine.limit(configured._replace(max_running=min(configured.max_running, max_running)))
        stats = self.engine.stats()
        assert (stats.num_running, stats.total_preemptions) == (num_running, num_preempted)

    @rule(is_forever=st.booleans())
    def sleep(self, is_forever: bool) -> None:
        """Until the next call, or only for the time that a deadline needs to pass."""
        if self.engine.is_asleep:
            self.engine.wake()
            return
        self.engine.sleep()
        assert not self.engine._scheduler.running
        if not is_forever:
            self.outcome.book(self.engine.step())
            self.engine.wake()

    @invariant()
    def every_block_has_its_owners_and_no_others(self) -> None:
        scheduler = self.engine._scheduler
        pool = scheduler.pool
        for sequence in scheduler._running:
            assert [block.block_id for block in sequence.blocks] == sequence.block_ids
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            first = max(0, sequence.num_computed_tokens - self.runner.window_tokens + 1) // pool.block_size
            assert (sequence.windows is not None) == (pool.num_groups > 1)
            windows = sequence.windows
            for blocks, ids in zip(windows.blocks, windows.ids, strict=True) if windows is not None else ():
                assert all(blocks[first:])
                assert {block.block_id for block in blocks if block} <= set(ids)
                assert len(blocks) == len(ids) == len(sequence.blocks)
        fetching = [(*each.fetch.before, *each.fetch.blocks) for each in scheduler.fetches._expected]
        holders = [*(sequence.all_blocks() for sequence in scheduler._running), *fetching]
        owned = {block.block_id: block.num_owners for blocks in holders for block in blocks}
        assert pool.num_free + len(owned) == pool.num_blocks
        counted = [block.block_id for blocks in holders for block in blocks]
        assert owned == {block_id: counted.count(block_id) for block_id in set(counted)}

    @invariant()
    def every_slot_is_free_or_of_a_sequence_or_a_snapshot(self) -> None:
        scheduler = self.engine._scheduler
        states = scheduler.pool.states
        if states is None:
            return
        held = [sequence.states for sequence in scheduler._running]
        own = [slot for each in held if each is not None for slot in each.own]
        read = {each.current for each in held if each is not None} - {*own, NO_STATE}
        snapshots = dict(states._snapshots)
        fetched = [each.fetch.slot for each in scheduler.fetches._expected]
        used = [*states._blank, *own, *fetched, *(read | snapshots.keys())]
        assert sorted(used) == list(range(states.num_slots))
        assert states.num_free == len(states._blank) + len(snapshots.keys() - states._num_readers.keys())
        for slot, snapshot in snapshots.items():
            assert snapshot.slot == slot
            assert snapshot.is_held
            assert snapshot.prefix.is_held
            assert self.runner.states[slot] == tokens_before(snapshot.prefix), "a snapshot of other tokens"
        for sequence in scheduler._running:
            assert sequence.states is not None
            known = list(sequence.token_ids(0, sequence.num_computed_tokens))
            assert self.runner.states[sequence.states.current] == known

    @invariant()
    def those_who_wait_are_counted(self) -> None:
        waiting = self.engine._scheduler._waiting
        assert waiting.num_tokens == sum(bucket.num_tokens for bucket in waiting.buckets) >= 0
        assert len(waiting) == sum(bucket.num_waiting for bucket in waiting.buckets)
        assert (len(waiting) == 0) == (waiting.num_tokens == 0) == (waiting.work == 0)
        for sequence in self.engine._scheduler._sequences.values():
            assert sequence.is_running or not (sequence.num_computed_tokens or sequence.blocks), "it holds nothing"

    @invariant()
    def no_step_exceeds_its_budget(self) -> None:
        if self.runner.batches:
            batch = self.runner.batches[-1]
            assert 0 < batch.num_tokens <= self.allowed[1]
            assert len(batch.scheduled) <= self.allowed[0]
            assert sum(len(item.targets) for item in batch.scheduled) <= self.max_scored_tokens

    @invariant()
    def whoever_has_not_ended_is_waiting_or_running(self) -> None:
        stats = self.engine.stats()
        scheduler = self.engine._scheduler
        untold = {delta.request_id for delta in scheduler._ended}
        open_requests = self.sent.keys() - self.outcome.reasons.keys() - self.ended_otherwise - untold
        assert stats.num_running + stats.num_waiting == len(open_requests)
        assert not self.ended_otherwise & self.outcome.reasons.keys()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.patch.undo()

    def run_to_the_end(self) -> None:
        if self.engine.is_asleep:
            self.engine.wake()
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.clock.advance(self.engine.idle_s or 0.0)
            self.outcome.book(self.engine.step())
            if self.store is not None:
                self.store.move(1)
        assert not self.engine.has_work, "some request never ends"
        while self.store is not None and self.store.fetches:
            self.store.move(100)
        self.engine.step()
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks
        for request_id, error in self.outcome.errors.items():
            assert isinstance(
                error, StepFailed if self.sent[request_id].deadline_s is None else DeadlineMissed | StepFailed
            )
        for request_id, request in self.sent.items():
            if request_id in self.ended_otherwise or request_id in self.outcome.errors:
                continue
            expected = expected_tokens(
                request.prompt_token_ids, request.sampling.max_tokens, stop_token_ids=request.sampling.stop_token_ids
            )
            assert self.outcome.token_ids[request_id] == expected[len(request.generated_token_ids) :]
            self.check_logprobs(request, expected)
            if request.pooling is not None:
                embedding = expected_embedding(request.prompt_token_ids, request.pooling)
                assert self.outcome.embeddings[request_id] == embedding

    def check_logprobs(self, request: Request, expected: list[int]) -> None:
        """One for every token that is new, none twice, whatever happened in between."""
        sampling, tokens = request.sampling, [*request.prompt_token_ids, *expected]
        num_prompt, num_known = len(request.prompt_token_ids), len(request.generated_token_ids)
        for given, num_top, places in (
            (self.outcome.logprobs, sampling.logprobs, range(num_prompt + num_known, len(tokens))),
            (self.outcome.prompt_logprobs, sampling.prompt_logprobs, range(request.num_scored_tokens + 1, num_prompt)),
        ):
            wanted = [] if num_top is None else [logprobs_after(tokens[:at], tokens[at], num_top) for at in places]
            assert given[request.request_id] == wanted


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
