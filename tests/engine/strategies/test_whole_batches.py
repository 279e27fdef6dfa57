"""Static, dynamic, bucketed, sorted and adaptive batching, on a clock that the tests turn."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from app.config import BucketedConfig
from app.engine.request import Request
from app.engine.sequence import EngineSequence
from app.engine.strategies import Bucketed
from tests.kit.engine import TimedEngine, make_request

pytestmark = pytest.mark.usefixtures("small_lengths")


def requests(*names: str, num_tokens: int = 3, **fields: Any) -> list[Request]:
    return [make_request((5,) * num_tokens, request_id=name, **({"max_tokens": 2} | fields)) for name in names]


STATIC = {"strategy": {"name": "static", "max_wait_ms": 50}, "max_running": 3}


def test_a_static_batch_goes_when_it_is_full() -> None:
    bench = TimedEngine(**STATIC)
    bench.add(*requests("a", "b"))
    assert bench.step() == []
    bench.add(*requests("c", "d"))
    assert bench.engine.idle_s == 0
    assert bench.step() == ["a", "b", "c"]


def test_no_sequence_joins_until_the_whole_static_batch_has_ended() -> None:
    bench = TimedEngine(**STATIC)
    bench.add(*requests("a", "b", max_tokens=1), *requests("c", max_tokens=4))
    bench.step()
    bench.add(*requests("d", "e", "f"))
    assert [bench.step() for _ in range(4)] == [["c"], ["c"], ["c"], ["d", "e", "f"]]


@pytest.mark.parametrize("name", ["static", "dynamic", "bucketed", "sorted", "adaptive"])
def test_the_last_partial_batch_always_goes_when_the_oldest_has_waited_long_enough(name: str) -> None:
    """A wait limit that is stored and never used, and a batch that only starts when it is full."""
    bench = TimedEngine(strategy={"name": name, "max_wait_ms": 50}, max_running=3)
    if name == "adaptive":  # its size grows from 1 to 3 with two fast batches
        for _ in range(2):
            bench.finish(make_request(max_tokens=1))
    bench.add(*requests("a"))
    bench.clock.advance(0.03)
    bench.add(*requests("b"))
    assert bench.engine.idle_s == pytest.approx(0.02)  # since the oldest came, not since the last one
    assert bench.step() == []
    bench.clock.advance(0.0201)
    assert bench.step() == ["a", "b"]
    assert {"a", "b"} <= bench.finish().reasons.keys()


def test_a_batch_that_went_half_full_is_not_filled_up_by_latecomers() -> None:
    bench = TimedEngine(**STATIC)
    bench.add(*requests("a", max_tokens=3))
    bench.clock.advance(0.06)
    assert bench.step() == ["a"]
    bench.add(*requests("b"))
    assert [bench.step(), bench.step()] == [["a"], ["a"]]


def test_a_batch_that_the_token_budget_does_not_take_at_once_fills_its_seats_in_the_next_steps() -> None:
    bench = TimedEngine(**STATIC, max_step_tokens=16, prefill_chunk_tokens=16)
    bench.add(*requests("a", "b", "c", num_tokens=12, max_tokens=5))
    steps = [bench.step() for _ in range(3)]
    assert steps[0] == ["a", "b"]
    assert steps[-1] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_preempted_member_of_a_batch_has_its_seat_back(name: str) -> None:
    # 40 slots for 80 tokens.
    bench = TimedEngine(
        strategy={"name": name, "max_wait_ms": 0}, max_running=4, max_step_tokens=12, prefill_chunk_tokens=12,
        num_blocks=10,
    )  # fmt: skip
    members = [make_request((5, 6, n), max_tokens=17) for n in range(4)]
    bench.finish(*members).check(*members)
    assert bench.stats.total_preemptions > 0


def test_a_batch_has_as_many_sequences_as_there_are_slots() -> None:
    bench = TimedEngine(strategy={"name": "static", "max_wait_ms": 60_000}, max_running=2)
    bench.add(*requests("a", "b", "c", max_tokens=1))
    assert bench.step() == ["a", "b"]
    assert bench.engine.idle_s == pytest.approx(60, abs=0.1)  # c is alone now


DYNAMIC = {"strategy": {"name": "dynamic", "max_wait_ms": 50}, "max_running": 8, "max_step_tokens": 10}


def test_a_dynamic_batch_goes_when_it_has_enough_tokens_and_holds_no_more() -> None:
    bench = TimedEngine(**DYNAMIC)
    bench.add(*requests("a", "b", num_tokens=4))
    assert bench.step() == []
    bench.add(*requests("c", num_tokens=4, max_tokens=1))
    assert bench.step() == ["a", "b"]  # c would make 12
    assert bench.step() == ["a", "b"]
    bench.clock.advance(0.06)
    assert bench.step() == ["c"]


def test_a_prompt_above_a_dynamic_batchs_tokens_goes_alone() -> None:
    bench = TimedEngine(**DYNAMIC)
    bench.add(*requests("long", num_tokens=14, max_tokens=1), *requests("a"))
    assert bench.step(2) == ["long"]
    bench.clock.advance(0.06)
    assert bench.step() == ["a"]


BUCKETED = {"strategy": {"name": "bucketed", "max_wait_ms": 50}, "max_running": 2}


def test_only_prompts_of_one_length_class_share_a_batch() -> None:
    bench = TimedEngine(**BUCKETED)
    bench.add(*requests("short", num_tokens=4, max_tokens=1), *requests("middle", num_tokens=5, max_tokens=1))
    assert bench.step() == []
    bench.add(*requests("short too", num_tokens=1, max_tokens=1))
    assert bench.step() == ["short", "short too"]


def test_each_length_class_ends_at_twice_the_tokens_of_the_class_before() -> None:
    bucketed, lengths = Bucketed(BucketedConfig()), (1, 4, 5, 8, 9, 16, 17, 33)
    waiting = [EngineSequence(make_request((5,) * length), arrival=0) for length in lengths]
    assert [bucketed.bucket_of(each) for each in waiting] == [0, 0, 1, 1, 2, 2, 3, 4]


def test_every_bucket_has_its_own_timer() -> None:
    """A lone request in a bucket is served in time, whatever the others do."""
    bench = TimedEngine(**BUCKETED)
    bench.add(*requests("long", num_tokens=12, max_tokens=1))
    bench.clock.advance(0.04)
    bench.add(*requests("short", num_tokens=2, max_tokens=1))
    assert bench.engine.idle_s == pytest.approx(0.01)
    bench.clock.advance(0.011)
    assert bench.step() == ["long"]
    assert bench.engine.idle_s == pytest.approx(0.029)
    bench.clock.advance(0.03)
    assert bench.step() == ["short"]


def test_a_bucket_that_is_always_full_does_not_starve_the_others() -> None:
    bench = TimedEngine(**BUCKETED)
    bench.add(*requests("rare", num_tokens=12, max_tokens=1))
    served: list[str] = []
    for n in range(40):
        while bench.stats.num_waiting < 6:
            bench.add(make_request((5, 6), request_id=f"frequent-{n}-{bench.stats.num_waiting}", max_tokens=1))
        served += bench.step()
        if "rare" in served:
            break
    assert "rare" in served
    assert bench.clock.at <= 100 + 0.05 + 0.02  # its timer, and the batch that ran then


def test_the_adaptive_size_grows_while_batches_are_fast_and_shrinks_while_they_are_slow() -> None:
    bench = TimedEngine(strategy={"name": "adaptive", "target_latency_ms": 100, "max_wait_ms": 1}, max_running=5)
    sizes = []
    for _ in range(6):  # batches of 20 ms
        bench.finish(*(make_request(max_tokens=2) for _ in range(bench.stats.batch_size)))
        sizes.append(bench.stats.batch_size)
    assert sizes == [2, 3, 4, 5, 5, 5]
    sizes = []
    for _ in range(8):  # and of 400 ms
        bench.finish(*(make_request(max_tokens=40) for _ in range(bench.stats.batch_size)))
        sizes.append(bench.stats.batch_size)
    assert sizes[0] == 5  # the average is not yet above 1.2 times the target
    assert sizes[-1] == 1
    assert all(after in (before, before - 1) for before, after in pairwise(sizes))


def test_idle_time_between_batches_is_no_latency() -> None:
    bench = TimedEngine(strategy={"name": "adaptive", "target_latency_ms": 100, "max_wait_ms": 0}, max_running=4)
    for _ in range(4):
        bench.finish(make_request(max_tokens=2))
        bench.clock.advance(10)
    assert bench.stats.batch_size == 4


def test_an_idle_engine_has_nothing_due_and_an_empty_step_computes_nothing() -> None:
    bench = TimedEngine(**STATIC)
    assert bench.engine.idle_s is None
    bench.add(*requests("a"))
    assert bench.step() == []
    assert bench.stats.total_steps == 0
    bench.engine.abort("a")
    assert bench.engine.idle_s is None


SORTED = {
    "strategy": {"name": "sorted", "max_wait_ms": 50}, "max_running": 2, "max_step_tokens": 512,
    "prefill_chunk_tokens": 512,
}  # fmt: skip


def test_a_sorted_batch_has_the_oldest_and_those_of_the_nearest_lengths() -> None:
    bench = TimedEngine(**SORTED)
    for name, num_tokens in (("long", 100), ("short", 5), ("longer", 130), ("shorter", 3), ("middle", 60)):
        bench.add(*requests(name, num_tokens=num_tokens, max_tokens=1))
    assert [bench.step() for _ in range(2)] == [["long", "longer"], ["short", "shorter"]]
    assert bench.step() == []  # the last one waits for its time
    bench.clock.advance(0.06)
    assert bench.step() == ["middle"]


def test_no_stream_of_nearer_lengths_holds_a_request_up_in_sorted_batches() -> None:
    bench = TimedEngine(**SORTED)
    bench.add(*requests("a", num_tokens=3, max_tokens=1), *requests("odd", num_tokens=200, max_tokens=1))
    bench.clock.advance(0.001)
    for number in range(10):
        bench.add(*requests(f"b{number}", num_tokens=3, max_tokens=1))
    assert bench.step() == ["a", "b0"]
    assert bench.step()[0] == "odd"


def test_background_requests_have_the_seats_that_are_left_in_a_sorted_batch() -> None:
    bench = TimedEngine(**SORTED | {"max_running": 3})
    night = requests("night", "later", num_tokens=3, max_tokens=1)
    bench.add(*(replace(request, is_background=True) for request in night))
    bench.add(*requests("a", num_tokens=3, max_tokens=1), *requests("b", num_tokens=200, max_tokens=1))
    assert bench.step() == ["a", "b", "night"]
