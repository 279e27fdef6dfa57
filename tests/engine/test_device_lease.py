from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest

from app.child_process import child_environment
from app.engine.device_lease import SHORTEST_TURN_S, TURN_PER_SWITCH, DeviceLease
from app.errors import InvalidSetup
from tests.kit.engine import FakeClock
from tests.waiting import PATIENCE_S, eventually

ASKS = """
import sys, time
from pathlib import Path
from app.engine.device_lease import DeviceLease
turns = DeviceLease(Path(sys.argv[1]), name="killed", num_bytes=6, total_bytes=10)
print("has it" if turns.ask() else "waits", flush=True)
time.sleep(60)
"""


CHANGES = """
import fcntl, sys, time
lock = open(sys.argv[1] + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
open(sys.argv[1] + ".tmp", "w").write('[{"key": "half of an ')
print("changes", flush=True)
time.sleep(60)
"""


@contextmanager
def asking_process(path: Path, script: str = ASKS) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that has asked for six of ten bytes, and what it got; killed at the end."""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()


class Device:
    """A device with room for ten bytes, and the engines on it."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self._path = folder / "device.json"
        self._stack = ExitStack()

    def engine(self, num_bytes: int, *, name: str = "engine") -> DeviceLease:
        turns = DeviceLease(self._path, name=name, num_bytes=num_bytes, total_bytes=10, clock=self.clock)
        self._stack.callback(turns.close)
        return turns

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture(autouse=True)
def _closed(device: Device) -> None:
    yield
    device.close()


def test_engines_that_fit_together_have_their_memory_together(device: Device) -> None:
    first, second = device.engine(4), device.engine(6)
    assert first.ask()
    assert second.ask()
    assert first.ends_at() is None
    assert second.ends_at() is None


def test_an_engine_that_does_not_fit_waits_until_another_leaves(device: Device) -> None:
    first, second = device.engine(5), device.engine(6)
    assert first.ask()
    assert not second.ask()
    first.leave()
    assert second.ask()
    assert not first.ask()


def test_the_memory_goes_to_the_engine_that_asked_first_though_a_later_one_would_fit(device: Device) -> None:
    holder, large, small = device.engine(5), device.engine(10), device.engine(1)
    assert holder.ask()
    assert not large.ask()
    assert not small.ask()
    holder.leave()
    assert not small.ask()
    assert large.ask()


def test_a_turn_is_a_multiple_of_the_longer_of_both_switches(device: Device) -> None:
    holder, other = device.engine(6), device.engine(6)
    assert holder.ask()
    holder.begin(switch_s=3.0)
    assert holder.ends_at() is None
    assert not other.ask()
    assert holder.ends_at() == device.clock() + 3 * TURN_PER_SWITCH
    holder.leave()
    assert other.ask()
    other.begin(switch_s=0.0)
    assert not holder.ask()
    assert other.ends_at() == device.clock() + 3 * TURN_PER_SWITCH


def test_a_turn_without_a_cost_has_a_shortest_time(device: Device) -> None:
    holder, other = device.engine(6), device.engine(6)
    assert holder.ask()
    assert not other.ask()
    assert holder.ends_at() == device.clock() + SHORTEST_TURN_S


def test_only_as_many_give_way_as_the_first_that_waits_needs_the_longest_awake_first(device: Device) -> None:
    old, young, waiting = device.engine(5), device.engine(5), device.engine(4)
    assert old.ask()
    device.clock.advance(1)
    assert young.ask()
    assert not waiting.ask()
    assert old.ends_at() is not None
    assert young.ends_at() is None


def test_what_needs_more_than_there_is_is_refused_with_the_numbers(device: Device) -> None:
    with pytest.raises(InvalidSetup, match=r"needs 0\.00 GiB .*device_memory_gib"):
        device.engine(11)


def test_others_are_told_of_a_change(device: Device) -> None:
    holder, other = device.engine(6), device.engine(6)
    told = Event()
    assert holder.ask()
    holder.listen(told.set)
    assert not other.ask()
    assert told.wait(PATIENCE_S)


def test_a_killed_process_holds_nothing(device: Device, tmp_path: Path) -> None:
    with asking_process(tmp_path / "device.json") as (process, answer):
        assert answer == "has it"
        other = device.engine(6)
        assert not other.ask()
        os.kill(process.pid, signal.SIGKILL)
    assert other.ask()


def test_a_process_that_is_killed_while_it_writes_leaves_the_order_as_it_was(device: Device, tmp_path: Path) -> None:
    holder, other = device.engine(6), device.engine(6)
    assert holder.ask()
    with asking_process(tmp_path / "device", CHANGES) as (process, answer), ThreadPoolExecutor(1) as thread:
        assert answer == "changes"
        asked = thread.submit(other.ask)
        assert not asked.done()
        os.kill(process.pid, signal.SIGKILL)
        assert asked.result() is False
    holder.leave()
    assert other.ask()


def test_one_that_starts_and_waits_goes_on_when_the_process_with_the_memory_is_killed(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.device_lease.RECHECK_S", 0.05)
    with asking_process(tmp_path / "device.json") as (process, _), ThreadPoolExecutor(1) as thread:
        other, third = device.engine(6), device.engine(2)
        started = thread.submit(other.wait)
        eventually(lambda: len(json.loads((tmp_path / "device.json").read_text())) == 2)
        assert not third.ask()  # it would fit beside the one with the memory, but comes behind the one that waits
        assert not started.done()
        os.kill(process.pid, signal.SIGKILL)
        started.result()
    assert third.ask()


def test_a_killed_process_that_waited_first_holds_up_no_other(device: Device, tmp_path: Path) -> None:
    holder, other = device.engine(6), device.engine(6)
    assert holder.ask()
    with asking_process(tmp_path / "device.json") as (process, answer):
        assert answer == "waits"
        assert not other.ask()
        holder.leave()
        assert not other.ask()  # the process is before it
        os.kill(process.pid, signal.SIGKILL)
    assert other.ask()


@pytest.mark.parametrize("written", ["", "{", "7", '[{"key": 1}]'])
def test_a_file_that_is_not_understood_is_made_again(device: Device, tmp_path: Path, written: str) -> None:
    holder, other = device.engine(6), device.engine(6)
    assert holder.ask()
    (tmp_path / "device.json").write_text(written)
    assert holder.ends_at() is None
    assert not other.ask()
