"""Measures how late an event loop wakes, and finds the work that blocked it, which delays all of the loop's streams.

A timer wakes the loop periodically and measures the delay. A thread inspects the loop while the timer is late, so that
the warning can name the task and the function that were running. Nothing in this module runs per token.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

from app.engine.histogram import SECONDS, Distribution, Histogram

logger = logging.getLogger(__name__)

# The timer always detects delays of 0.15 s, and shorter delays by chance. A period of 0.02 s would cost 10% of the CPU
# time per token with 64 streams, because each wake-up starts or interrupts a process.
HEARTBEAT_S = 0.1
STALL_S = 0.05  # at this delay, streams of 20 tokens per second pause visibly
_LOOK_S = HEARTBEAT_S
_SECONDS_BETWEEN_WARNINGS = 10.0
_OUR_PACKAGES = ("app.", "deployments.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSnapshot:
    """The measurements of one event loop since its monitor started. Tasks and queues are current values."""

    delay_s: Distribution  # how late the loop woke, with one value per heartbeat
    num_stalls: int  # number of delays above STALL_S
    stalled_s: float  # sum of the delays above STALL_S
    num_tasks: int  # unfinished tasks
    queued: Mapping[str, int]  # calls waiting for a thread, by the threads' name


class LoopMonitor:
    """Measures one event loop's delays, and logs warnings about stalls."""

    def __init__(self) -> None:
        self._delay_s = Histogram(SECONDS)
        self._num_stalls = self._num_warned = 0
        self._stalled_s = 0.0
        self._warned_at = -_SECONDS_BETWEEN_WARNINGS
        self._due_at = 0.0
        self._cpu_s = 0.0  # CPU time of the loop's thread when the timer was last set
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        # When the last late timer was due, and the work that the thread found during the delay.
        self._seen: tuple[float, str] = (0.0, "")
        self._queues: dict[str, Callable[[], int]] = {}

    def start(self, *, names_causes: bool = True) -> None:
        """Monitor the running loop, and set a default executor whose queue is measured.

        `names_causes` starts the thread that finds causes, which takes the GIL from the loop ten times per second.
        """
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        executor = ThreadPoolExecutor(thread_name_prefix="default")
        self._loop.set_default_executor(executor)
        self.add_queue("default", executor._work_queue.qsize)
        self._plan()
        if names_causes:
            threading.Thread(target=self._look, name="loop-monitor", daemon=True).start()

    def stop(self) -> None:
        """Stop measuring. Must be called on the loop."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def add_queue(self, name: str, num_waiting: Callable[[], int]) -> None:
        """Include `num_waiting()`, the number of calls waiting for the threads of this name, in each snapshot."""
        self._queues[name] = num_waiting

    def snapshot(self) -> LoopSnapshot:
        """Return the measurements so far, and the current tasks and queues."""
        return LoopSnapshot(
            delay_s=self._delay_s.snapshot(),
            num_stalls=self._num_stalls,
            stalled_s=self._stalled_s,
            num_tasks=len(asyncio.all_tasks(self._loop)),
            queued={name: num_waiting() for name, num_waiting in self._queues.items()},
        )

    def _plan(self) -> None:
        self._cpu_s = time.thread_time()
        # `loop.time` may be cached while the loop runs callbacks that are due.
        self._due_at = time.monotonic() + HEARTBEAT_S
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        delay_s = max(0.0, time.monotonic() - self._due_at)
        self._delay_s.observe(delay_s)
        if delay_s > STALL_S:
            self._stalled(delay_s, time.thread_time() - self._cpu_s)
        self._plan()

    def _stalled(self, delay_s: float, cpu_s: float) -> None:
        self._num_stalls += 1
        self._stalled_s += delay_s
        now = time.monotonic()
        if now - self._warned_at < _SECONDS_BETWEEN_WARNINGS:
            return
        num_unsaid = self._num_stalls - self._num_warned - 1
        self._warned_at, self._num_warned = now, self._num_stalls
        due_at, held_by = self._seen
        logger.warning(
            "the event loop was blocked for %.0f ms (%.0f ms of CPU) by %s; %d other stalls since the last warning",
            1000 * delay_s, 1000 * cpu_s, held_by if due_at == self._due_at else "unknown work", num_unsaid,
        )  # fmt: skip

    def _look(self) -> None:
        """Record the loop's running work whenever its timer is late. Runs in the thread."""
        while not self._stopped.wait(_LOOK_S):
            due_at = self._due_at
            if self._seen[0] != due_at and time.monotonic() - due_at > STALL_S / 2:
                frame = sys._current_frames().get(self._loop_thread)
                self._seen = (due_at, f"{_running_task(self._loop)} in {_place(frame)}")


def task_name() -> str:
    """Return the running task's name. Give it to the task's helper tasks too, so that the monitor's warnings use it."""
    task = asyncio.current_task()
    return "" if task is None else task.get_name()


def _running_task(loop: asyncio.AbstractEventLoop) -> str:
    task = asyncio.current_task(loop)
    # `ascii` escapes line ends, which a client's path may contain.
    return "no task" if task is None else ascii(task.get_name())


def _place(frame: FrameType | None) -> str:
    """Return the name and line of this project's innermost function on a stack. Omits values, which may be prompts."""
    innermost = frame
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OUR_PACKAGES):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "no function"
    return f"{found.f_globals.get('__name__')}.{found.f_code.co_qualname}, line {found.f_lineno}"
