"""Shares the memory of one device among several engines, each in its own process.

A file lists the engines that hold memory and those that wait for memory, in the order of their requests. Engines that
fit into the memory together use it concurrently. Otherwise, they take turns, first come, first served. This module does
not use torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from app.config import GIB
from app.errors import InvalidSetup

# Waiting engines are notified of changes. They also check at this interval, because a killed process notifies no one.
RECHECK_S = 1.0
# Minimum length of a turn, in multiples of the time to switch. Switching then takes at most about a tenth of the time.
TURN_PER_SWITCH = 10.0
SHORTEST_TURN_S = 0.5


@dataclass(slots=True)
class LeaseHolder:
    """An engine that holds memory on the device or waits for memory."""

    key: str  # identifies the engine's process and socket
    name: str  # the engine's name in messages
    num_bytes: int
    switch_s: float  # seconds that the engine's last sleep and wake took together
    is_waiting: bool
    since: float  # when its wait or turn began, by `time.monotonic`, which is the same in all processes on a host


class DeviceLease:
    """One engine's lease of a device's memory. Linux only, because it uses abstract Unix sockets."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        num_bytes: int,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """path: the device's file, shared by all engines. This engine needs `num_bytes` of the `total_bytes`.

        Raises:
            InvalidSetup: `num_bytes` exceeds `total_bytes`, or the file cannot be written.
        """
        if num_bytes > total_bytes:
            raise InvalidSetup(
                f"{name} needs {num_bytes / GIB:.2f} GiB for weights, KV memory and its largest step, but the engines "
                f"on this device may use {total_bytes / GIB:.2f} GiB together; raise replicas.device_memory_gib, lower "
                f"cache.memory_gib, or serve a smaller model"
            )
        self._path, self._total_bytes, self._clock = path, total_bytes, clock
        self._own = LeaseHolder(uuid4().hex, name, num_bytes, switch_s=0.0, is_waiting=True, since=0.0)
        self.num_bytes = num_bytes
        self._is_in = False  # whether the file lists this engine
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidSetup(f"cannot write {path}, which the engines on a device share: {error}") from error
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(self._own.key))

    # ------------------------------------------------------------------ this engine's turn

    def ask(self) -> bool:
        """Acquire the memory if it is this engine's turn, otherwise queue for it. Does not block.

        Returns whether the engine holds the memory. If not, call again after a change, or after `RECHECK_S`.
        """
        own = self._own
        with self._changing() as occupants:
            if not self._is_in:
                self._is_in, own.is_waiting, own.since = True, True, self._clock()
                occupants.append(own)
            first = next((each for each in occupants if each.is_waiting), own)
            if own.is_waiting and first.key == own.key and _missing(occupants, own, self._total_bytes) <= 0:
                own.is_waiting, own.since = False, self._clock()
        return not own.is_waiting

    def wait(self) -> None:
        """Block until the engine holds the memory. Must not be called after `listen`."""
        while not self.ask():
            self._socket.settimeout(RECHECK_S)
            with suppress(TimeoutError):
                self._socket.recv(1)
        self._socket.settimeout(None)

    def begin(self, *, switch_s: float) -> None:
        """Start this engine's turn, after it woke up. `switch_s`: see `LeaseHolder`."""
        with self._changing():
            self._own.switch_s, self._own.since = switch_s, self._clock()

    def leave(self) -> None:
        """Release the memory, or stop waiting for it."""
        if self._is_in:
            with self._changing() as occupants:
                occupants.remove(self._own)
                self._is_in = False

    def ends_at(self) -> float | None:
        """Return when this engine's turn ends, or None if no other engine needs this engine's memory."""
        own = self._own
        with self._changing() as occupants:
            first = next((each for each in occupants if each.is_waiting), None)
            if first is None or own.is_waiting:
                return None
            missing = _missing(occupants, first, self._total_bytes)
            for each in sorted((each for each in occupants if not each.is_waiting), key=lambda each: each.since):
                if missing <= 0:
                    return None  # engines whose turns began earlier will release enough memory
                if each.key == own.key:
                    break
                missing -= each.num_bytes
            if missing <= 0:
                return None
            return own.since + max(SHORTEST_TURN_S, TURN_PER_SWITCH * max(own.switch_s, first.switch_s))

    # ------------------------------------------------------------------ other engines

    def listen(self, on_change: Callable[[], None]) -> None:
        """Start a thread that calls `on_change` whenever another engine acquires, releases or requests memory.

        The thread runs until `close`.
        """
        threading.Thread(target=self._hear, args=(on_change,), name="device-turns", daemon=True).start()

    def _hear(self, on_change: Callable[[], None]) -> None:
        with suppress(OSError):
            while self._socket.recv(1) and self._lock >= 0:
                on_change()

    def close(self) -> None:
        """Release the memory permanently and end the thread of `listen`. Safe to call twice."""
        if self._lock < 0:
            return
        self.leave()
        os.close(self._lock)
        self._lock = -1
        _tell(self._own.key)  # ends the thread of `listen`
        self._socket.close()

    @contextmanager
    def _changing(self) -> Iterator[list[LeaseHolder]]:
        """Lock the file and yield the live engines. Afterwards, write any changes and notify the other engines."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            written = self._path.read_bytes() if self._path.exists() else b""
            occupants = self._known(written)
            yield occupants
            changed = msgspec.json.encode(occupants)
            if changed != written:
                temporary = self._path.with_suffix(".tmp")
                temporary.write_bytes(changed)
                os.replace(temporary, self._path)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        if changed != written:
            for each in occupants:
                if each.key != self._own.key:
                    _tell(each.key)

    def _known(self, written: bytes) -> list[LeaseHolder]:
        """Return the engines in the file, without dead processes. This engine's entry is replaced by `_own`."""
        found, own = list[LeaseHolder](), self._own
        with suppress(ValueError):  # a file that another version wrote is ignored
            found = msgspec.json.decode(written, type=list[LeaseHolder])
        if self._is_in and all(each.key != own.key for each in found):
            found.append(own)  # the file was removed
        return [own if each.key == own.key else each for each in found if each.key == own.key or _lives(each.key)]


def _missing(occupants: list[LeaseHolder], wanting: LeaseHolder, total_bytes: int) -> int:
    """Return how many bytes are missing for `wanting`, which is zero or less if the memory suffices."""
    return sum(each.num_bytes for each in occupants if not each.is_waiting) + wanting.num_bytes - total_bytes


def _address(key: str) -> str:
    """Return an address in the abstract namespace, from which the kernel removes the sockets of dead processes."""
    return f"\0carousel-turns-{key}"


def _tell(key: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, suppress(OSError):
        out.setblocking(False)
        out.sendto(b"!", _address(key))  # raises if the buffer is full, but then other notifications are pending


def _lives(key: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_address(key))
        except OSError:
            return False
    return True
