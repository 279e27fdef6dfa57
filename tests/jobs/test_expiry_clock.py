"""The time by which things expire: what it believes, and when."""

from __future__ import annotations

import pytest

from app.jobs.expiry_clock import MAX_JUMP_S, TRUST_AFTER_S, ExpiryClock, SeenTime

DAY_S = 86_400.0


class Machine:
    """Its clock, and the seconds that pass on it."""

    def __init__(self) -> None:
        self.at, self.passed = 1_800_000_000.0, 50.0

    def run(self, seconds: float) -> None:
        self.at += seconds
        self.passed += seconds

    def clock(self, seen: SeenTime | None) -> ExpiryClock:
        return ExpiryClock(lambda: self.at, seen, running=lambda: self.passed)


def test_it_is_the_clock_where_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    clock = machine.clock(None)
    for seconds in (10, 40 * DAY_S, 0):
        machine.run(seconds)
        assert clock() == machine.at
    machine.at += MAX_JUMP_S
    assert machine.clock(clock.seen)() == machine.at, "the service was off for so long"
    machine.at -= 10 * DAY_S
    assert clock() == machine.at, "with an earlier time less expires"
    assert not caplog.records


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_jump_is_believed_when_the_service_has_run_on_it_for_a_day(
    is_restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    clock = machine.clock(None)
    began_at = clock()
    machine.at += 30 * DAY_S
    for hours in range(1, 25):
        if is_restarted:
            clock = machine.clock(clock.seen)
        machine.run(3600)
        assert clock() == began_at + 3600 * hours
    assert len(caplog.records) == 1
    assert "30.0 days ahead" in caplog.text
    machine.run(1)
    assert clock() == machine.at
    machine.run(40 * DAY_S)
    assert clock() == machine.at


def test_a_clock_that_is_set_right_is_believed_at_once_and_the_next_jump_is_doubted_anew() -> None:
    machine = Machine()
    clock = machine.clock(None)
    for _ in range(3):
        machine.at += 30 * DAY_S
        machine.run(TRUST_AFTER_S / 2)
        assert clock() < machine.at
        machine.at -= 30 * DAY_S
        assert clock() == machine.at
