"""Poisonous requests: found among the others, failed alone, not tried for ever."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from app.engine import isolation
from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.engine.engine import Engine, StepError
from app.engine.isolation import Quarantine
from app.errors import Quarantined, StepFailed
from tests.kit.engine import (
    CountingRunner,
    Outcome,
    PoisonedRunner,
    build_fake_engine,
    make_request,
    run_to_end,
)


class OutOfMemoryRunner(CountingRunner):
    """Can compute three sequences at a time."""

    def run(self, batch: StepBatch) -> StepResult:
        if len(batch.scheduled) > 3:
            raise MemoryError("too many")
        return super().run(batch)


def serve(engine: Engine, num_requests: int, poisonous: Collection[int]) -> Outcome:
    draw = random.Random(3)
    requests = [
        make_request(
            tuple(draw.randrange(2, 50) for _ in range(5)),
            request_id=f"bad-{n}" if n in poisonous else f"good-{n}",
            max_tokens=12,
        )
        for n in range(num_requests)
    ]
    outcome = run_to_end(engine, *requests)
    outcome.check(*(request for n, request in enumerate(requests) if n not in poisonous))
    return outcome


@pytest.mark.parametrize("poisonous", [[0], [5], [7], [2, 3], [0, 6], [1, 4, 7]])
def test_only_the_poisonous_requests_fail_and_the_others_tokens_are_unchanged(poisonous: list[int]) -> None:
    engine = build_fake_engine(runner=PoisonedRunner(), max_step_tokens=64)
    outcome = serve(engine, 8, poisonous)
    assert set(outcome.errors) == {f"bad-{n}" for n in poisonous}
    assert all(isinstance(error, StepFailed) for error in outcome.errors.values())
    assert engine.stats().total_failed == len(poisonous)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_one_among_many_is_found_in_few_runs() -> None:
    runner = PoisonedRunner()
    serve(build_fake_engine(runner=runner, max_running=64, max_step_tokens=512, num_blocks=512), 64, [37])
    assert runner.num_runs - 12 <= 2 * 6  # two halves for each power of two


def test_a_step_that_only_fails_as_a_whole_fails_no_request() -> None:
    engine = build_fake_engine(runner=OutOfMemoryRunner())
    requests = [make_request((5, 6, n), max_tokens=6) for n in range(8)]
    outcome = run_to_end(engine, *requests)
    assert not outcome.errors
    outcome.check(*requests)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 64])
def test_a_broken_device_is_recognised_without_trying_every_request(num_requests: int) -> None:
    runner = PoisonedRunner(poison="")
    engine = build_fake_engine(runner=runner, max_running=64, max_step_tokens=512, num_blocks=512)
    for n in range(num_requests):
        engine.add(make_request((5, 6 + n // 40, 5 + n % 40)))
    with pytest.raises(StepError) as failed:
        engine.step()
    assert len(failed.value.request_ids) == num_requests
    assert runner.num_runs <= 2 * 6 + 4
    assert not engine.has_work


@pytest.mark.parametrize("num_failures", [0, 1, 3])
def test_a_lost_device_is_not_tried_again_and_no_request_is_blamed(num_failures: int) -> None:
    """It may be lost in a part of a step that has failed."""

    class LosingRunner(CountingRunner):
        num_runs = 0

        def run(self, batch: StepBatch) -> StepResult:
            self.num_runs += 1
            raise DeviceLost("gone") if self.num_runs > num_failures else RuntimeError("a broken device")

    runner = LosingRunner()
    engine = build_fake_engine(runner=runner, max_running=64, max_step_tokens=512, num_blocks=512)
    requests = [make_request((5, 6, 5 + n)) for n in range(8)]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            engine.step()
    assert runner.num_runs == num_failures + 2
    assert not any(engine._quarantine.holds(request) for request in requests)


def test_a_request_that_fails_twice_is_not_tried_a_third_time() -> None:
    runner = PoisonedRunner()
    engine = build_fake_engine(runner=runner)
    for seed in (1, 2):
        harmless = make_request((5, 6, seed), max_tokens=2)
        outcome = run_to_end(engine, harmless, make_request((5, 7), request_id="bad", seed=seed))
        assert set(outcome.errors) == {"bad"}
    with pytest.raises(Quarantined, match="will not be retried"):
        engine.add(make_request((5, 7), seed=3))
    assert not run_to_end(engine, make_request((5, 7), max_tokens=5)).errors  # other parameters: another request


def test_one_that_fails_alone_is_quarantined_too() -> None:
    engine = build_fake_engine(runner=PoisonedRunner(poison=""))
    for _ in range(2):
        engine.add(make_request())
        with pytest.raises(StepError):
            engine.step()
    with pytest.raises(Quarantined):
        engine.add(make_request())


def test_the_quarantines_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MAX_REMEMBERED", 10)
    held = Quarantine()
    for n in range(50):
        held.note_failure(make_request((n,)))
        held.note_failure(make_request((n,)))
    assert len(held._culprits) == 10
    assert held.holds(make_request((49,)))
    assert not held.holds(make_request((1,)))
