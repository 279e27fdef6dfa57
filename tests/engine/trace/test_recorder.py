"""What is recorded of an engine's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.config import SchedulerConfig
from app.engine.batch import WaitReason
from app.engine.engine import StepError
from app.engine.trace.entries import (
    Abort,
    Arrival,
    CacheCleared,
    Entry,
    FailureKind,
    Reconfigured,
    ScheduledTokens,
    StepFailure,
    StepRecord,
    parse,
    to_line,
)
from app.engine.trace.recorder import StepRecorder
from tests.engine.test_invariants import FailingOnDemand
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import (
    FakeClock,
    build_fake_engine,
    expected_tokens,
    make_full_request,
    make_request,
    run_to_end,
)


class Kept:
    """An engine, and what is recorded of it. `accepts` False: every entry is dropped."""

    def __init__(self, **settings: Any) -> None:
        self.entries: list[Entry] = []
        self.accepts = True
        self.clock = FakeClock()
        settings = {"runner": FailingOnDemand(self.clock), "clock": self.clock} | settings
        self.engine = build_fake_engine(recorder=StepRecorder(self._put, stopwatch_ns=lambda: 0), **settings)

    def _put(self, entry: Entry) -> bool:
        self.entries.append(entry)
        return self.accepts

    @property
    def steps(self) -> list[StepRecord]:
        return [entry for entry in self.entries if isinstance(entry, StepRecord)]


def test_a_step_records_running_joined_and_ended_requests_and_times() -> None:
    kept = Kept(max_running=2, num_blocks=8)
    first = make_request((5, 6, 7, 8, 9), max_tokens=2)
    for request in (first, make_request((3, 4), max_tokens=3), make_request((2,), max_tokens=1)):
        kept.engine.add(request)
    run_to_end(kept.engine)
    step, second = kept.steps[:2]
    assert step.number == 1
    assert (step.began_at, step.ended_at) == (100.0, 100.01)
    assert step.scheduled == ScheduledTokens([0, 1], [0, 0], [5, 2], [])
    assert (step.joined, step.blocks) == ([0, 1], [[0, 1], [2]])
    assert (step.num_waiting, step.wait_reason, step.num_free_blocks) == (1, WaitReason.SLOTS, 5)
    assert step.token_ids == [expected_tokens((5, 6, 7, 8, 9), 1)[0], expected_tokens((3, 4), 1)[0]]
    assert second.scheduled is None, "the same sequences, a token later, need not be told again"
    assert second.ended == [(0, "length")]
    assert kept.entries[0] == Arrival(0, 100.0, first)


@pytest.mark.parametrize(
    ("settings", "prompts", "wait_reason"),
    [
        ({"max_running": 1}, [4, 4], WaitReason.SLOTS),
        ({"num_blocks": 3}, [8, 8], WaitReason.BLOCKS),
        ({"max_step_tokens": 8}, [8, 8], WaitReason.BUDGET),
        ({"strategy": {"name": "static", "max_wait_ms": 1000}, "max_running": 2}, [8], WaitReason.STRATEGY),
        ({}, [8], None),
    ],
)
def test_a_step_records_why_the_first_sequence_waits(
    settings: dict[str, Any], prompts: list[int], wait_reason: WaitReason | None
) -> None:
    kept = Kept(**settings)
    for length in prompts:
        kept.engine.add(make_request((5,) * length))
    kept.engine.step()
    assert kept.steps[0].wait_reason == wait_reason


def test_events_from_outside_are_recorded_in_their_order() -> None:
    kept = Kept()
    request = make_request()
    kept.engine.add(request, arrived_at=99.5)
    kept.engine.step()
    kept.engine.abort(request.request_id)
    kept.engine.abort(request.request_id)
    kept.engine.reconfigure(SchedulerConfig(max_running=3))
    kept.engine.clear_prefix_cache()
    arrival, _, *others = kept.entries
    assert arrival == Arrival(0, 99.5, request)
    assert others == [Abort(0), Reconfigured(SchedulerConfig(max_running=3)), CacheCleared()]


def test_a_preemption_is_recorded_and_so_is_joining_again() -> None:
    kept = Kept(num_blocks=5)
    for number in range(2):
        kept.engine.add(make_request((5 + number, 6, 7, 8, 9), max_tokens=10))
    run_to_end(kept.engine)
    (at,) = (index for index, step in enumerate(kept.steps) if step.preempted)
    assert kept.steps[at].preempted == [1]
    assert kept.steps[at].wait_reason is WaitReason.BLOCKS
    assert [step.joined for step in kept.steps if step.joined] == [[0, 1], [1]]


def test_failures_are_recorded_with_the_requests_that_ended_by_them() -> None:
    kept = Kept()
    requests = [make_request((5, number)) for number in range(4)]
    for request in requests:
        kept.engine.add(request)
    runner = kept.engine.runner
    assert isinstance(runner, FailingOnDemand)
    runner.poison = requests[2].request_id
    kept.engine.step()
    assert kept.steps[0].failures == [StepFailure(FailureKind.REQUESTS, [2])]
    assert kept.steps[0].ended == [(2, "error:StepFailed")]
    runner.is_broken = True
    with pytest.raises(StepError):
        kept.engine.step()
    assert kept.steps[1].failures == [StepFailure(FailureKind.DEVICE, [0, 1, 3])]
    assert kept.steps[1].ended_at is None
    assert kept.steps[1].ended == [(number, "error:DeviceFault") for number in (0, 1, 3)], "as the clients hear"


def test_tokens_of_a_step_launched_ahead_are_recorded_as_late() -> None:
    kept = Kept(runner=LateRunner())
    run_to_end(kept.engine, make_request((5, 6, 7), max_tokens=3))
    tokens = expected_tokens((5, 6, 7), 3)
    assert [list(step.token_ids) for step in kept.steps] == [[], [tokens[0]], [tokens[1]], [tokens[2]]]
    assert [step.is_late for step in kept.steps] == [False, True, True, True]


def test_after_a_dropped_entry_the_scheduled_tokens_are_written_in_full() -> None:
    kept = Kept()
    kept.engine.add(make_request(max_tokens=9))
    for _ in range(3):
        kept.engine.step()
    assert kept.steps[-1].scheduled is None
    kept.accepts = False
    kept.engine.step()
    kept.accepts = True
    kept.engine.step()
    assert kept.steps[-1].scheduled == ScheduledTokens([0], [6], None, [])
    kept.engine.step()
    assert kept.steps[-1].scheduled is None


def test_every_entry_is_a_line_that_reads_back_the_same() -> None:
    kept = Kept(max_running=1)
    odd = make_request(
        (5, 6), cache_salt="salt", priority=-3, tenant="ä", deadline_s=9.5, logit_bias=((3, -1.5),),
        stop_token_ids=(7, 8), seed=2**62,
    )  # fmt: skip
    kept.engine.add(odd)
    kept.engine.step()
    kept.engine.reconfigure(SchedulerConfig.model_validate({"strategy": "static", "policy": "sjf"}))
    kept.engine.abort(odd.request_id)
    run_to_end(kept.engine, make_request(), clock=kept.clock)
    kept.entries.append(Arrival(9, 101.0, make_full_request()))
    lines = [to_line(entry) for entry in kept.entries]
    assert [to_line(parse(line)) for line in lines] == lines
    arrival = parse(lines[0])
    assert arrival == Arrival(0, 100.0, odd)
    assert parse(lines[-1]) == Arrival(9, 101.0, replace(make_full_request(), prefix_at=None)), "it has a secret"
    with pytest.raises(ValueError, match="unknown entry"):
        parse('{"nonsense": 1}')
