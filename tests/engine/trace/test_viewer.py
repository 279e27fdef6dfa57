"""What people see of an engine: which request has which slot, when, and why it left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.engine.engine import Engine, StepError
from app.engine.observer import StepObserver
from app.engine.snapshot import EngineSnapshot, SlotUse
from app.engine.trace import viewer
from app.errors import EngineStopped
from tests.engine.test_invariants import FailingOnDemand
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import FakeClock, TimedRunner, async_engine, build_fake_engine, make_request, run_to_end


def watched(**settings: Any) -> Engine:
    """An engine that is looked at from its start; a step takes 10 ms."""
    clock = FakeClock()
    settings = {"runner": FailingOnDemand(clock), "clock": clock} | settings
    engine = build_fake_engine(**settings)
    engine.snapshot()
    return engine


def uses(view: EngineSnapshot) -> dict[str, SlotUse]:
    return {use.request_id: use for use in view.slots}


def test_a_request_takes_the_lowest_free_slot_and_leaves_it() -> None:
    engine = watched(max_running=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 3)):
        engine.add(make_request((5, 6), request_id=name, max_tokens=max_tokens))
    engine.step()
    seen = uses(engine.snapshot())
    assert {name: use.slot for name, use in seen.items()} == {"a": 0, "b": 1}
    assert (seen["a"].left_ms, seen["a"].why_left) == (0, "length")
    assert (seen["b"].left_ms, seen["b"].joined_ms, seen["b"].first_token_ms) == (None, 10, 0)
    engine.step()
    seen = uses(engine.snapshot())
    assert seen.keys() == {"b", "c"}, "what has left is shown once"
    assert seen["c"].slot == 0
    assert (seen["c"].arrived_ms, seen["c"].joined_ms) == (20, 10)


def test_what_has_only_grown_is_told_in_three_numbers() -> None:
    engine = watched(max_running=2)
    for name in ("a", "b", "c"):
        engine.add(make_request((5, 6), request_id=name, max_tokens=3))
    engine.step()
    first = engine.snapshot(is_full=False)
    assert (set(uses(first)), first.reported) == ({"a", "b"}, ()), "what is new is told in full"
    engine.step()
    second = engine.snapshot(is_full=False)
    assert (second.slots, second.reported) == ((), (0, 2, 1, 1, 2, 1))
    assert set(uses(engine.snapshot())) == {"a", "b"}
    engine.step()
    engine.step()
    last = engine.snapshot(is_full=False)
    assert {name: use.why_left for name, use in uses(last).items()} == {"a": "length", "b": "length", "c": ""}
    assert last.reported == ()


def test_a_first_token_is_told_in_full() -> None:
    engine = watched(max_running=1, max_step_tokens=4, prefill_chunk_tokens=4)
    engine.add(make_request(tuple(range(5, 11)), request_id="long", max_tokens=3))
    engine.step()
    assert uses(engine.snapshot(is_full=False))["long"].first_token_ms is None
    engine.step()
    assert uses(engine.snapshot(is_full=False))["long"].first_token_ms == 0


def test_a_prompt_that_is_computed_in_parts_has_no_first_token_until_its_end() -> None:
    engine = watched(max_running=1, max_step_tokens=4, prefill_chunk_tokens=4)
    engine.add(make_request(tuple(range(5, 14)), request_id="long"))
    firsts = []
    for _ in range(3):
        engine.step()
        [use] = engine.snapshot().slots
        firsts.append((use.num_computed_tokens, use.first_token_ms))
    assert firsts == [(4, None), (8, None), (9, 0)]


def test_a_preempted_request_has_one_stay_for_each_time_that_it_ran() -> None:
    engine = watched(num_blocks=4, max_running=2)
    for name in ("a", "b"):
        engine.add(make_request((5,) * 7, request_id=name, max_tokens=6))
    occupancies: list[tuple[str, str]] = []
    while engine.has_work:
        engine.step()
        occupancies += [(use.request_id, use.why_left) for use in engine.snapshot().slots if use.left_ms is not None]
    assert occupancies == [("b", "preempted"), ("a", "length"), ("b", "length")]


def test_aborted_and_failed_requests_leave_their_slots() -> None:
    engine = watched()
    for name in ("a", "b"):
        engine.add(make_request(request_id=name, max_tokens=9))
    engine.step()
    engine.abort("a")
    assert uses(engine.snapshot())["a"].why_left == "abort"
    engine.runner.is_broken = True  # type: ignore[attr-defined]
    with pytest.raises(StepError):
        engine.step()
    assert uses(engine.snapshot())["b"].why_left == "error"
    assert engine.snapshot().slots == ()


def test_steps_are_summed_between_two_views() -> None:
    engine = watched()
    for name in ("a", "b"):
        engine.add(make_request((5, 6, 7), request_id=name, max_tokens=9))
    engine.step()
    engine.step()
    steps = engine.snapshot().steps
    assert (steps.num_steps, steps.num_tokens, steps.num_drawn_tokens, steps.num_sequences) == (2, 8, 4, 4)
    assert (steps.busy_ms, steps.longest_ms, steps.most_tokens) == (20.0, 10.0, 6)
    assert steps.ended_ms[0] - steps.ended_ms[1] == 10
    nothing = engine.snapshot().steps
    assert (nothing.num_steps, nothing.ended_ms) == (0, ())


def test_of_many_steps_the_last_ends_are_told() -> None:
    engine = watched()
    engine.add(make_request((5, 6, 7), max_tokens=200))
    for _ in range(150):
        engine.step()
    steps = engine.snapshot().steps
    assert (steps.num_steps, len(steps.ended_ms)) == (150, 64)
    assert steps.ended_ms[-1] < 10


def test_an_engine_that_launches_ahead_shows_the_same_times() -> None:
    clock = FakeClock()
    engine = build_fake_engine(runner=LateRunner(), clock=clock)
    engine.snapshot()
    engine.add(make_request(request_id="a", max_tokens=3))
    run_to_end(engine)
    [use] = engine.snapshot().slots
    assert (use.request_id, use.num_generated_tokens, use.why_left) == ("a", 3, "length")


def test_waiting_requests_are_in_the_order_of_the_policy_with_what_they_will_wait() -> None:
    engine = watched(max_running=1, policy={"name": "priority"})
    engine.add(make_request(request_id="runs", max_tokens=50, priority=-100))
    engine.step()
    engine.add(make_request(request_id="later", priority=5))
    engine.add(make_request(request_id="sooner", priority=-5))
    engine.step()
    view = engine.snapshot()
    assert [each.request_id for each in view.waiting] == ["sooner", "later"]
    assert (view.num_waiting, view.wait_reason) == (2, "slots")
    first, second = view.waiting
    assert first.expected_ms < second.expected_ms


def test_the_blocks_are_owned_cached_or_free() -> None:
    engine = watched(num_blocks=10, block_size=4)
    engine.add(make_request((5,) * 9, request_id="a", max_tokens=2))
    engine.step()
    view = engine.snapshot()
    assert (view.num_blocks, view.num_cached_blocks, view.num_free_blocks) == (10, 0, 7)
    assert uses(view)["a"].num_blocks == 3
    run_to_end(engine)
    view = engine.snapshot()
    assert (view.num_cached_blocks, view.num_free_blocks) == (2, 8)


def test_a_view_has_nothing_of_prompts_and_outputs_but_their_lengths() -> None:
    views = []
    for prompt in ((5, 6), (40, 41)):
        engine = watched()
        engine.add(make_request(prompt, request_id="a", tenant="someone"))
        engine.step()
        views.append(engine.snapshot())
    assert views[0] == views[1]


def test_what_runs_already_is_seen_by_the_first_view() -> None:
    engine = build_fake_engine()
    engine.add(make_request(request_id="a", max_tokens=9))
    engine.step()
    [use] = engine.snapshot().slots
    assert (use.request_id, use.slot, use.first_token_ms) == ("a", 0, 0)


def test_nothing_is_noted_before_the_first_view_and_after_the_last() -> None:
    engine = build_fake_engine(recorder=StepObserver())
    before = list(engine._observers)
    engine.snapshot()
    assert engine._observers != before
    engine.end_snapshots()
    assert engine._observers == before


def test_a_view_is_bounded_whatever_waits_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "MAX_SLOTS", 3)
    monkeypatch.setattr(viewer, "MAX_WAITING", 2)
    engine = watched(max_running=5)
    for number in range(12):
        engine.add(make_request(request_id=f"r{number}", max_tokens=9))
    engine.step()
    view = engine.snapshot()
    assert (len(view.slots), len(view.waiting)) == (3, 2)
    assert (view.num_running, view.num_waiting) == (5, 7)


async def test_an_engine_in_its_thread_gives_views_until_it_stops() -> None:
    with async_engine() as engine:
        assert (await engine.snapshot()).num_running == 0
        engine.end_snapshots()
    with pytest.raises(EngineStopped):
        await engine.snapshot()
    engine.end_snapshots()


def test_the_limits_in_force_are_seen_with_what_the_tuner_says_of_them() -> None:
    clock = FakeClock()
    engine = watched(runner=TimedRunner(clock, step_s=1.5), clock=clock, targets={"itl_p99_ms": 100})
    engine.add(make_request(max_tokens=8))
    run_to_end(engine)
    view = engine.snapshot()
    assert view.tuning is not None
    assert view.tuning.reason == "unreachable"
    assert view.tuning.itl_p99_ms == pytest.approx(1500, rel=0.03)
    assert view.tuning.num_changes > 0
    assert (view.max_step_tokens, view.prefill_chunk_tokens, view.max_running) == engine._scheduler.limits
    assert msgspec.json.decode(msgspec.json.encode(view), type=EngineSnapshot) == view
    assert watched().snapshot().tuning is None
