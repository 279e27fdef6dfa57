"""Waiting for a state that another task, thread or process brings about. It may take longer on a busy machine."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


async def until(
    look: Callable[[], Found | Awaitable[Found]],
    is_reached: Callable[[Found], Any] = bool,
    timeout_s: float = 20.0,
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
    timeout_s: float = 30.0,
    every_s: float = 0.02,
) -> Found:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not is_reached(found := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s; at last: {found}"
        time.sleep(every_s)
    return found


def stop_child(pid: int) -> None:
    """Stop a child process, and wait until all its threads stand still; a signal alone returns before that."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
