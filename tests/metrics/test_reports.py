"""What replicas report, and what is remembered of processes that are gone."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import pytest
from msgspec import structs

from app.engine.histogram import SECONDS, Distribution, Histogram
from app.metrics import (
    EngineCounts,
    EngineReport,
    InvalidReport,
    ProcessCounts,
    ReplicaMetrics,
    decoded,
    encoded,
    replica_metrics,
    sum_counts,
)
from app.metrics import reports as reports_module
from app.metrics.reports import GONE_S, MAX_REPORT_BYTES
from tests.kit.engine import FakeClock, build_fake_engine, make_request

Known = ProcessCounts[EngineCounts]


def counts(number: int) -> EngineCounts:
    """Of an engine after so many steps of 0.1 s in the queue, a number that no float has."""
    waits = Histogram(SECONDS)
    for _ in range(number):
        waits.observe(0.1)
    return EngineCounts(num_steps=number, num_prompt_tokens=3 * number, queue_s=waits.snapshot())


def instance(clock: FakeClock | None = None, **known: int) -> Known:
    made = ProcessCounts(lambda each: each.num_counted, sum_counts, clock=clock or FakeClock())
    made.learn({name: counts(number) for name, number in known.items()})
    return made


def ever(known: Known) -> int:
    """Steps of all processes there have been."""
    return sum_counts(known.without()).num_steps


def tell(asks: Known, answers: Known) -> int:
    """What `answers` knows goes to `asks`, as between two processes; returns the bytes of it."""
    question = pickle.dumps(asks.known())
    later = pickle.dumps(answers.beyond(pickle.loads(question)))
    asks.learn_later(pickle.loads(later))
    return len(question) + len(later)


# ---------------------------------------------------------------------- counts of processes


def test_the_last_counts_of_a_process_hold_in_whatever_order_they_come() -> None:
    for first, second in ((1, 5), (5, 1)):
        known = instance(a=first)
        known.learn({"a": counts(second)})
        assert known.without() == [counts(5)]


def test_two_that_tell_each_other_know_the_same() -> None:
    mine, other = instance(a=3, b=1), instance(b=4, c=2)
    assert other.beyond(mine.known()).counts.keys() == {"b", "c"}, "no more than the other one lacks"
    tell(mine, other)
    tell(other, mine)
    assert mine.known() == other.known()
    assert ever(mine) == ever(other) == 3 + 4 + 2
    assert mine.beyond(other.known()).counts == {}


def test_those_that_are_there_are_not_among_the_others() -> None:
    known = instance(a=1, b=2)
    assert known.without({"b", "new"}) == [counts(1)]
    assert known.of(["b", "new"]) == [counts(2)]


def test_what_processes_have_counted_that_are_long_gone_is_one_sum() -> None:
    clock = FakeClock()
    known = instance(clock, a=1, b=2, c=4)
    known.set_running({"c"})
    clock.advance(GONE_S - 1)
    known.set_running({"c"})
    assert len(known.without()) == 3, "others may still have later counts of them"
    clock.advance(1)
    known.set_running({"c"})
    assert len(known.without()) == 2
    assert ever(known) == 7
    known.learn({"a": counts(9)})
    assert ever(known) == 7, "a process that is in the sum is not counted again"


def test_one_that_is_missed_and_comes_back_is_not_gone() -> None:
    clock = FakeClock()
    known = instance(clock, a=1)
    for present in (set(), {"a"}, set()):
        known.set_running(present)
        clock.advance(GONE_S - 1)
    known.set_running(set())
    assert known.of(["a"]) == [counts(1)]


def test_thousands_of_processes_that_come_and_go_leave_a_bounded_rest() -> None:
    clock = FakeClock()
    first, second = instance(clock), instance(clock)
    sizes = []
    for generation in range(300):
        present = {f"{generation}-{number}": counts(2) for number in range(20)}
        asked, other = (first, second) if generation % 2 else (second, first)
        asked.learn(present)
        sizes.append(tell(asked, other))
        asked.set_running(present)
        clock.advance(60.0)
    assert max(len(first.without()), len(second.without())) <= 20 * (GONE_S / 60 + 3)
    assert max(sizes[100:]) < 1.5 * sizes[99], "what they tell each other does not grow"
    tell(first, second)
    assert ever(first) == 300 * 20 * 2


def test_many_that_go_at_once_are_kept_one_by_one_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "MAX_GONE", 5)
    known = instance(**{f"r{number}": 1 for number in range(50)})
    known.set_running(())
    assert len(known.without()) == 5 + 1
    assert ever(known) == 50


def test_an_instance_that_was_never_asked_takes_over_the_sum() -> None:
    clock = FakeClock()
    old, idle = instance(clock, a=1, b=2), instance(clock, a=1)
    old.set_running({"b"})
    clock.advance(GONE_S)
    tell(old, idle)
    old.set_running({"b"})
    assert ever(old) == 3
    old.beyond(idle.known())
    tell(idle, old)
    assert ever(idle) == 3, "`a` is in the sum and must not be counted again"
    new = instance(clock)
    tell(new, old)
    assert ever(new) == 3
    tell(old, instance(clock, b=5, z=7))
    assert ever(old) == 1 + 5 + 7


def test_one_that_is_only_asked_forgets_what_is_in_the_sum_of_the_one_that_asks() -> None:
    clock = FakeClock()
    asks, is_asked = instance(clock, a=1), instance(clock, a=1)
    asks.set_running(())
    clock.advance(GONE_S)
    asks.set_running(())
    tell(asks, is_asked)
    assert is_asked.known().num_counted == {}
    assert ever(is_asked) == 1


def test_two_that_have_added_up_different_processes_lose_none() -> None:
    clock = FakeClock()
    one, two = instance(clock, a=1, b=2, c=4), instance(clock, a=1, b=2, c=4)
    one.set_running({"c"})
    two.set_running({"a"})
    clock.advance(GONE_S)
    one.set_running({"c"})  # a and b are in its sum
    two.set_running({"a"})  # b and c
    for _ in range(2):
        tell(one, two)
        tell(two, one)
    assert ever(one) == ever(two) == 7


def test_no_sum_falls_whichever_instance_is_asked_and_whoever_does_not_answer() -> None:
    """Random scrapes of three instances, while processes come, count, do not answer, and go."""
    for seed in range(20):
        rng, clock = random.Random(seed), FakeClock()
        instances = [instance(clock) for _ in range(3)]
        alive: dict[str, int] = {}
        total = before = 0
        before_s = 0.0
        for turn in range(120):
            if rng.random() < 0.3:
                alive[f"{turn}"] = 0
            for name in alive:
                grown = rng.randrange(4)
                alive[name] += grown
            silent = {name for name in alive if rng.random() < 0.2}
            asked = rng.choice(instances)
            asked.learn({name: counts(number) for name, number in alive.items() if name not in silent})
            for other in instances:
                tell(asked, other)
            asked.set_running(alive.keys())
            found = sum_counts(asked.without())
            assert found.num_steps >= before, f"seed {seed}, turn {turn}"
            assert found.queue_s.total >= before_s, "the sum of seconds is exact, in whatever order they are added"
            before, before_s = found.num_steps, found.queue_s.total
            if silent == set():
                total = before
            if len(alive) > 6 and not silent:
                del alive[rng.choice(list(alive))]
            clock.advance(rng.choice([1.0, 15.0, 400.0]))
        assert before >= total > 0


# ---------------------------------------------------------------------- what a replica sends


def sent(**engine: Any) -> ReplicaMetrics:
    fake = build_fake_engine(**engine)
    fake.add(make_request(max_tokens=5))
    fake.step()
    report = EngineReport(replica_id="r1", stats=fake.stats(), measurements=fake.measurements())
    return replica_metrics("demo", report, {"speed": 1.5})


def test_what_a_replica_sends_arrives() -> None:
    metrics = sent()
    assert decoded(encoded(metrics)) == metrics
    assert metrics.counts.num_steps == metrics.counts.step_tokens.num_values == 1
    assert metrics.gauges.num_running == 1
    assert len(encoded(metrics)) < MAX_REPORT_BYTES / 10


def test_fields_that_a_newer_version_adds_are_passed_over() -> None:
    class Newer(ReplicaMetrics, frozen=True, array_like=True):
        more: str = "new"

    metrics = sent()
    newer = Newer(**{name: getattr(metrics, name) for name in metrics.__struct_fields__})
    assert decoded(msgspec.msgpack.encode(newer)) == metrics


def with_counts(**counts: Any) -> bytes:
    metrics = sent()
    return encoded(structs.replace(metrics, counts=structs.replace(metrics.counts, **counts)))


def with_lines(**lines: bytes) -> bytes:
    metrics = sent()
    return encoded(structs.replace(metrics, lines=metrics.lines | lines))


USUAL = sent().counts.queue_s


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"nonsense", "Expected `array`"),
        (encoded(sent())[:-100], "truncated"),
        (with_lines(carousel_slots=b"carousel_slots{} 1.0\n" * 20_000), "at most 262,144"),
        (with_lines(carousel_slots=b"\xff\x00"), "carousel_slots"),
        (with_lines(carousel_slots=b""), "carousel_slots"),
        (with_lines(carousel_slots=b"carousel_slots 1.0"), "not samples of this family"),
        (with_lines(carousel_slots=b"carousel_slots 1.0\nnonsense\n"), "not samples of this family"),
        (with_lines(carousel_slots=b"# TYPE carousel_slots counter\n"), "not samples of this family"),
        (encoded(structs.replace(sent(), use={"speed": nan})), "not a finite number"),
        (with_counts(num_steps=-1), "negative"),
        (with_counts(queue_s=Distribution((1.0, 2.0), (1, 2, 3), 4.0)), "2 bounds"),
        (with_counts(queue_s=replace(USUAL, counts=USUAL.counts[1:])), "bounds"),
        (with_counts(queue_s=replace(USUAL, counts=(-1, *USUAL.counts[1:]))), "negative"),
        (with_counts(queue_s=replace(USUAL, total=inf)), "negative"),
        (with_counts(queue_s=replace(USUAL, total=nan)), "negative"),
        (with_counts(queue_s=replace(USUAL, total=-1.0)), "negative"),
    ],
)
def test_what_would_spoil_the_text_or_the_sums_of_others_is_not_read(data: bytes, said: str) -> None:
    with pytest.raises(InvalidReport, match=said):
        decoded(data)
