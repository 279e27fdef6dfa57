"""Prefixes that come from a store while others compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.engine.fetches import FIRST_PATIENCE_S
from app.engine.request import FinishReason, Pooling, Request
from tests.kit.engine import (
    CountingRunner,
    FakeClock,
    Outcome,
    SlotStore,
    TimedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
)

PROMPT = tuple(range(5, 25))
BLOCK_SIZE = 4
NUM_STORED = 16  # tokens: the last block of the prompt has the last token, which is always computed


class Side:
    """An engine that has computed the prompt, and has it in its store alone."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.runner = TimedRunner(self.clock, block_size=BLOCK_SIZE)
        self.store = SlotStore(self.runner, has_states=settings.get("num_state_slots", 0) > 0)
        self.engine = build_fake_engine(
            runner=self.runner, block_size=BLOCK_SIZE, clock=self.clock, store=self.store,
            **{"num_blocks": 16, "max_running": 2} | settings,
        )  # fmt: skip
        self.outcome = Outcome()
        self.add()
        self.run()
        self.engine.clear_prefix_cache()

    def add(self, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Request:
        request = make_request(prompt, **more)
        self.engine.add(request)
        return request

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.outcome.book(self.engine.step())

    def run(self, num_filled: int = 0) -> None:
        """num_filled: blocks of a fetch in each step."""
        while self.engine.has_work:
            if num_filled:
                self.store.move(num_filled)
            self.clock.advance(self.engine.idle_s or 0.0)
            self.step()

    def cached(self, request: Request) -> int:
        """Tokens of its prompt that were not computed."""
        computed = sum(
            len(item.token_ids)
            for batch in self.runner.batches
            for item in batch.scheduled
            if item.request_id == request.request_id and item.start < len(request.prompt_token_ids)
        )
        return len(request.prompt_token_ids) - computed

    @property
    def num_free(self) -> int:
        return self.engine.stats().num_free_blocks


def test_what_the_store_has_is_not_computed() -> None:
    side = Side()
    request = side.add()
    side.step()
    assert not side.engine.running, "it waits for its prefix"
    assert side.engine.stats().num_waiting == 1
    side.store.move(100)
    side.run()
    side.outcome.check(request)
    assert side.cached(request) == NUM_STORED
    assert side.engine.measurements().store.num_fetched_tokens == NUM_STORED  # type: ignore[union-attr]


def test_a_prefix_with_its_snapshot_is_not_computed() -> None:
    side = Side(num_state_slots=4)
    request = side.add()
    side.step()
    assert side.engine.stats().num_free_state_slots == 3, "one is reserved for the snapshot"
    side.store.move(100)
    side.run()
    side.outcome.check(request)
    assert side.cached(request) == NUM_STORED
    assert side.engine.stats().num_free_state_slots == 4


@pytest.mark.parametrize("num_kept", [0, 8, 16])
def test_of_blocks_that_come_those_up_to_a_snapshot_are_not_computed(num_kept: int) -> None:
    side = Side(num_state_slots=6)
    for name, token_ids in list(side.store.snapshots.items()):
        if len(token_ids) > num_kept:
            del side.store.snapshots[name]
    request = replace(make_request(PROMPT, max_tokens=8), generated_token_ids=tuple(expected_tokens(PROMPT, 3)))
    side.engine.add(request)
    side.step()
    side.store.move(100)
    side.run()
    assert side.outcome.token_ids[request.request_id] == expected_tokens(PROMPT, 8)[3:]
    assert side.engine.measurements().store.num_fetched_tokens == num_kept  # type: ignore[union-attr]
    assert side.engine.stats().num_free_state_slots == 6


def test_where_no_slot_is_free_for_a_snapshot_nothing_is_fetched() -> None:
    side = Side(num_state_slots=4)
    other = side.add((40,), max_tokens=8)
    side.step()
    request = side.add()
    side.run()
    assert not side.store.fetches
    side.outcome.check(request, other)


def test_the_last_snapshot_of_an_answer_is_kept_and_none_before_it() -> None:
    side = Side(num_state_slots=8)
    before = set(side.store.snapshots)
    request = side.add((30, 31, 32), max_tokens=14)
    side.run()
    side.outcome.check(request)
    assert [len(side.store.snapshots[name]) for name in side.store.snapshots.keys() - before] == [16]


def test_the_wait_and_what_came_are_told() -> None:
    side = Side()
    side.engine.snapshot(is_full=True)  # from now on slots are noted
    request = side.add()
    side.step()
    side.clock.advance(0.75)
    side.store.move(3, fails=True)
    times = None
    while side.engine.has_work:
        deltas = side.engine.step()
        times = next((each.times for each in deltas if each.times is not None), times)
    assert times is not None
    assert times.fetch_s == 0.75 <= times.queue_s
    [slot] = [each for each in side.engine.snapshot(is_full=True).slots if each.request_id == request.request_id]
    assert (slot.num_fetched_tokens, slot.fetch_ms) == (3 * BLOCK_SIZE, 750)


def test_others_run_meanwhile_and_it_keeps_a_slot() -> None:
    side = Side()
    request = side.add(max_tokens=8)
    others = [side.add((40 + number,), max_tokens=8) for number in range(2)]
    side.step(3)
    assert [each.request for each in side.engine.running] == others[:1]
    side.store.move(100)
    side.step()
    assert request in [each.request for each in side.engine.running]
    side.run()
    side.outcome.check(request, *others)


def test_a_foreground_request_takes_the_place_of_background_work_while_another_is_fetched() -> None:
    side = Side()
    night = replace(make_request((40,), max_tokens=8), is_background=True)
    side.engine.add(night)
    side.step()
    fetched = side.add()
    side.step()
    assert side.engine.stats().num_waiting == 1
    day = side.add((41,), max_tokens=8)
    side.step()
    assert [each.request for each in side.engine.running] == [day], "the other place is of the one that is fetched"
    side.store.move(100)
    side.run()
    side.outcome.check(day, night, fetched)


def test_only_what_comes_is_not_computed() -> None:
    side = Side()
    request = side.add()
    side.step()
    side.store.move(2, fails=True)
    side.run()
    side.outcome.check(request)
    assert side.cached(request) == 2 * BLOCK_SIZE


def test_it_computes_where_a_fetch_takes_too_long_and_its_blocks_come_back_with_the_store_s_last_word() -> None:
    side = Side()
    request, num_blocks = side.add(), side.num_free
    side.step()
    side.clock.advance(2 * FIRST_PATIENCE_S)
    side.run()
    side.outcome.check(request)
    assert side.cached(request) == 0
    assert side.num_free == num_blocks - NUM_STORED // BLOCK_SIZE, "the store may still write into them"
    assert side.engine.measurements().store.num_given_up == 1  # type: ignore[union-attr]
    side.store.move(0)
    side.step()
    assert side.num_free == num_blocks


def test_nothing_is_fetched_where_computing_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    monkeypatch.setattr(side.store, "expected_s", lambda num_blocks, request: 1e9)
    request = side.add()
    side.run()
    assert side.cached(request) == 0
    assert not side.store.fetches


@pytest.mark.parametrize("more", [{"pooling": Pooling.LAST, "max_tokens": 0}, {"prompt_logprobs": 1}])
def test_what_needs_every_token_computed_fetches_nothing(more: dict[str, Any]) -> None:
    side = Side()
    side.add(**more)
    side.step()
    assert not side.store.fetches


def test_another_salt_finds_nothing() -> None:
    side = Side()
    side.add(cache_salt="another")
    side.step()
    assert not side.store.fetches


def test_a_request_that_goes_on_from_another_replica_takes_what_that_one_has_written() -> None:
    side = Side()
    request = replace(make_request(PROMPT, max_tokens=8), generated_token_ids=tuple(expected_tokens(PROMPT, 3)))
    side.engine.add(request)
    side.step()
    side.store.move(100)
    side.run()
    assert side.outcome.token_ids[request.request_id] == expected_tokens(PROMPT, 8)[3:]
    assert side.engine.measurements().store.num_fetched_tokens >= NUM_STORED  # type: ignore[union-attr]


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind() -> None:
    side = Side()
    request, num_blocks = side.add(), side.num_free
    side.step()
    delta = side.engine.abort(request.request_id)
    assert delta is not None
    assert delta.finish_reason is FinishReason.ABORT
    side.store.move(100)
    side.step()
    assert not side.engine.has_work
    assert side.num_free == num_blocks


def test_memory_that_was_given_up_is_not_taken_for_filled() -> None:
    side = Side()
    request = side.add()
    side.step()
    side.engine.sleep()
    side.store.move(100)
    side.runner._slots.clear()
    side.engine.wake()
    side.run(num_filled=3)
    side.outcome.check(request)
    assert side.cached(request) == NUM_STORED, "they were fetched again, after the wake"


def test_a_preempted_sequence_fetches_what_was_evicted() -> None:
    side = Side(num_blocks=7)
    first, second = side.add(PROMPT[:10], max_tokens=9), side.add(tuple(range(30, 40)), max_tokens=9)
    side.run(num_filled=100)
    side.outcome.check(first, second)
    assert side.engine.stats().total_preemptions
    assert side.engine.measurements().store.num_fetched_tokens > 2 * BLOCK_SIZE  # type: ignore[union-attr]


def test_a_prefix_is_kept_when_it_comes_again_or_is_long() -> None:
    runner = CountingRunner(block_size=BLOCK_SIZE)
    store = SlotStore(runner)
    store.min_tokens = 12
    engine = build_fake_engine(runner=runner, block_size=BLOCK_SIZE, store=store, num_blocks=16)
    for prompt, num_kept in ((PROMPT[:9], 0), (PROMPT[:10], 2), (PROMPT[:11], 2), (PROMPT[4:], 6)):
        engine.add(make_request(prompt, max_tokens=1))
        while engine.has_work:
            engine.step()
        assert len(store.blocks) == num_kept


def test_without_a_store_nothing_waits_for_one() -> None:
    engine = build_fake_engine(runner=CountingRunner())
    assert engine.measurements().store is None
