"""Waiting for a state that another task, thread or process brings about. It may take longer on a busy machine."""

from __future__ import annotations

import asyncio
import inspect
import os
import selectors
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

PATIENCE_S = 200.0  # what a test waits for comes long before on the busiest machine, or never


async def until(
    look: Callable[[], Found | Awaitable[Found]],
    is_reached: Callable[[Found], Any] = bool,
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.002,
) -> Found:
    """What `look` returns once that is reached."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if is_reached(found):
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s; at last: {found}"
        await asyncio.sleep(every_s)


def eventually(
    look: Callable[[], Found],
    is_reached: Callable[[Found], Any] = bool,
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.02,
) -> Found:
    """As `until`, for tests without an event loop.

    Looks take a fifth of the time at most: one at a whole service has several processes compute for 50 ms.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        if is_reached(found := look()):
            return found
        took_s = time.monotonic() - began_s
        assert began_s + took_s < deadline, f"not within {timeout_s} s; at last: {found}"
        time.sleep(max(every_s, min(4 * took_s, 1.0)))


class _NoWait(selectors.DefaultSelector):
    """Waits for nothing: on its own clock as much time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0.0
        return super().select(timeout)


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while every task waits for it, and then at once.

    A timer of a minute comes in no time, and never early on a busy machine. Not for tests with threads or processes.
    """

    def __init__(self) -> None:
        self._no_wait = _NoWait()
        super().__init__(self._no_wait)

    def time(self) -> float:
        return self._no_wait.now


def stop_child(pid: int) -> None:
    """Stop a child process, and wait until all its threads stand still; a signal alone returns before that."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
