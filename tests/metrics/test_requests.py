"""What one ingress measures: when which histogram and counter moves."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pytest

from app.errors import DeadlineMissed, Overloaded, StepFailed
from app.metrics import CallMetrics, RequestMetrics
from app.metrics.requests import LOSSES, ModelSnapshot, merge, reason_of
from tests.doc_pages import PROJECT
from tests.kit.engine import FakeClock


class Ingress:
    """The metrics of a process whose clock a test turns."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = RequestMetrics(["demo"], clock=self.clock)

    @property
    def demo(self) -> ModelSnapshot:
        return self.metrics.snapshot()["demo"]

    def call(self, prompt_tokens: Sequence[int] = (7,)) -> CallMetrics:
        return CallMetrics(self.metrics.model("demo"), prompt_tokens, arrived_at=self.metrics.clock())

    def answer(self, num_tokens: int, *, prompt_tokens: int = 7) -> None:
        """A whole request, one token in every tenth of a second."""
        with self.call([prompt_tokens]) as call:
            for _ in range(num_tokens):
                self.clock.advance(0.1)
                call.tokens(0, 1)
            call.finished(0, "stop")


def counted(reasons: Mapping[str, int]) -> dict[str, int]:
    """Those that have happened."""
    return {reason: number for reason, number in reasons.items() if number}


def test_the_times_of_a_request_are_told_apart() -> None:
    ingress = Ingress()
    with ingress.call([20]) as call:
        ingress.clock.advance(2.0)
        call.tokens(0, 1)
        ingress.clock.advance(0.3)
        call.tokens(0, 3)  # they came together: a tenth of a second each
        ingress.clock.advance(0.5)
        call.finished(0, "length")
    demo = ingress.demo
    assert demo.first_token_s.total == pytest.approx(2.0)
    assert (demo.inter_token_s.num_values, demo.inter_token_s.total) == (3, pytest.approx(0.3))
    assert demo.token_s.total == pytest.approx(0.1, abs=1e-6)
    assert demo.decode_s.total == pytest.approx(0.8)
    assert demo.request_s.total == pytest.approx(2.8)
    assert (demo.prompt_tokens.total, demo.generated_tokens.total, demo.num_generated_tokens) == (20, 4, 4)
    assert demo.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_a_call_is_in_flight_until_each_of_its_requests_has_ended() -> None:
    ingress = Ingress()
    with ingress.call([7, 7, 7]) as call:
        assert ingress.demo.num_in_flight == 3
        call.tokens(1, 5)
        call.finished(1, "stop")
        assert ingress.demo.num_in_flight == 2
        call.tokens(0, 2)
        call.finished(0, "stop")
        call.finished(2, "stop")
    demo = ingress.demo
    assert (demo.num_in_flight, demo.finished["stop"]) == (0, 3)
    assert (demo.num_choices.total, demo.longest_choice_tokens.total) == (3, 5)


def test_a_refused_call_is_no_request_that_ended() -> None:
    ingress = Ingress()
    with pytest.raises(Overloaded), ingress.call():
        raise Overloaded("full")
    demo = ingress.demo
    assert (counted(demo.refused), counted(demo.failed), demo.num_in_flight) == ({"overloaded": 1}, {}, 0)
    assert (set(demo.finished.values()), demo.num_choices.num_values) == ({0}, 0)


def test_an_error_after_the_first_token_is_a_failure_of_all_open_requests() -> None:
    ingress = Ingress()
    with pytest.raises(StepFailed):
        fail_after_a_token(ingress.call([7, 7]), StepFailed("poison"))
    demo = ingress.demo
    assert (counted(demo.refused), counted(demo.failed), demo.num_in_flight) == ({}, {"step_failed": 1}, 0)
    assert demo.finished["error"] == 2


def fail_after_a_token(call: CallMetrics, error: BaseException) -> None:
    with call:
        call.tokens(0, 1)
        raise error


@pytest.mark.parametrize("leaving", [GeneratorExit, KeyboardInterrupt])
def test_a_caller_that_goes_away_aborts(leaving: type[BaseException]) -> None:
    ingress = Ingress()
    with pytest.raises(leaving):
        fail_after_a_token(ingress.call(), leaving())
    assert (ingress.demo.finished["abort"], ingress.demo.num_in_flight) == (1, 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full"), "overloaded"),
        (DeadlineMissed("late"), "deadline_missed"),
        (ZeroDivisionError(), "internal"),
    ],
)
def test_every_error_has_a_reason_of_a_few(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(("is_background", "reason"), [(True, "no_idle_slot"), (False, "overloaded")])
def test_background_calls_that_find_no_idle_slot_are_no_overload(is_background: bool, reason: str) -> None:
    metrics = RequestMetrics()
    with (
        suppress(Overloaded),
        CallMetrics(metrics.model("demo"), [1], arrived_at=metrics.clock(), is_background=is_background),
    ):
        raise Overloaded("full")
    assert counted(metrics.snapshot()["demo"].refused) == {reason: 1}


def test_several_ingresses_add_up_to_one_that_had_all_the_requests() -> None:
    apart, alone = (Ingress(), Ingress()), Ingress()
    for number, num_tokens in enumerate((1, 4, 9)):
        for ingress in (apart[number % 2], alone):
            ingress.answer(num_tokens)
            ingress.metrics.model("demo").resumed("died" if number else "hung")
            ingress.metrics.model("demo").dispatched("prefix")
            ingress.metrics.model("demo").frame_received(number)
    apart[0].metrics.model("other").refused(Overloaded("full"))
    alone.metrics.model("other").refused(Overloaded("full"))
    merged = merge(pickle.loads(pickle.dumps(ingress.metrics.snapshot())) for ingress in apart)
    assert rounded(merged["demo"]) == rounded(alone.demo)
    assert merged["other"] == alone.metrics.snapshot()["other"]
    assert counted(merged["demo"].resumed) == {"died": 2, "hung": 1}


def rounded(model: ModelSnapshot) -> list[object]:
    """All its numbers; totals of seconds are multiples of 2^-20."""
    spreads = [value for name in ModelSnapshot.__slots__ if hasattr(value := getattr(model, name), "total")]
    others = [value for name in ModelSnapshot.__slots__ if not hasattr(value := getattr(model, name), "total")]
    return [*others, *((spread.counts, round(spread.total, 5)) for spread in spreads)]


def test_times_are_told_apart_by_the_group_of_the_replica_and_the_class_of_the_request() -> None:
    ingress = Ingress()
    for group, is_background in (("", False), ("bold", False), ("bold", True)):
        metrics = ingress.metrics.model("demo")
        with CallMetrics(metrics, [7], arrived_at=ingress.metrics.clock(), is_background=is_background) as call:
            call.placed(0, group)
            call.left_queue(0, 0.5)
            ingress.clock.advance(1.0)
            call.tokens(0, 1)
            call.placed(0, "other")  # it goes on at another replica, and stays with its first
            call.left_queue(0, 9.0)
            call.tokens(0, 2)
            call.finished(0, "stop")
    kinds = ingress.demo.latencies
    assert list(kinds) == [("", "foreground"), ("bold", "foreground"), ("", "background"), ("bold", "background")]
    counts = {
        kind: [each.queue_s.num_values, each.first_token_s.num_values, each.inter_token_s.num_values]
        for kind, each in kinds.items()
    }
    assert counts.pop(("", "background")) == [0, 0, 0]
    assert set(map(tuple, counts.values())) == {(1, 1, 2)}
    assert sum(each.queue_s.total for each in kinds.values()) == pytest.approx(1.5)
    assert ingress.demo.first_token_s.num_values == 3
    both = ingress.demo + ingress.demo
    assert both.latencies["bold", "foreground"].request_s.num_values == 2


def test_what_alerts_ask_for_is_zero_before_it_happens() -> None:
    demo = Ingress().demo
    assert {"overloaded", "unavailable", "replicas_lost", "step_failed", "internal"} < demo.refused.keys()
    assert demo.failed.keys() == demo.refused.keys()
    assert not any((*demo.refused.values(), *demo.failed.values(), *demo.resumed.values()))
    sources = [path.read_text() for path in (PROJECT / "app/fleet").glob("*.py")]
    reasons = {reason for source in sources for reason in re.findall(r'ReplicaLost\(.*reason="(\w+)"', source)}
    assert reasons == set(demo.resumed) == set(LOSSES)
