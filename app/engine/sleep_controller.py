"""Decides when an engine sleeps and wakes.

Does not use torch. The only thread is the one that `DeviceLease.listen` starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from app.engine.device_lease import RECHECK_S, DeviceLease
from app.engine.engine import Engine
from app.engine.stats import SleepState, SleepStats

logger = logging.getLogger(__name__)


class SleepController:
    """Puts an engine to sleep when it has been idle for a long time, or when other engines wait for its memory.

    Used by the engine's thread, after `DeviceLease.wait` has acquired the memory.
    """

    def __init__(self, engine: Engine, turns: DeviceLease, *, after_s: float, startup_s: float) -> None:
        """after_s: idle seconds until the engine sleeps. startup_s: how many seconds it took to build the engine."""
        self._engine = engine
        self._turns = turns
        self._after_s = after_s
        self._sleep_s = 0.0  # how long the last `Engine.sleep` took
        self._idle_since: float | None = None
        self._asked_at: float | None = None  # when the engine requested memory; set while it waits
        self._turn_ends_at: float | None = None  # set while other engines need its memory
        self._num_before_turn = 0  # `_num_done` when the turn began
        # Whether another engine has acquired, released or requested memory since the last `advance`. Also set at first,
        # and when a turn begins.
        self._has_changed = True
        self.stats = SleepStats(last_wake_s=startup_s)  # only replaced as a whole; any thread may read it
        self._begin_turn()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Start a thread that calls `on_change` whenever another engine acquires, releases or requests memory.

        The thread runs until `close`.
        """
        self._turns.listen(on_change)

    def note_change(self) -> None:
        """Record that another engine has acquired, released or requested memory. May be called from any thread."""
        self._has_changed = True

    @property
    def due_in_s(self) -> float | None:
        """Seconds until `advance` has work if nothing changes: 0 if it has work now, None if never."""
        if self._has_changed:
            return 0.0
        now = self._engine.now()
        if not self._engine.is_asleep:
            sleeps_at = self._sleeps_at(now)
            return None if sleeps_at == inf else max(0.0, sleeps_at - now)
        if self._asked_at is None:
            return 0.0 if self._engine.has_work else None
        return max(0.0, self._asked_at + RECHECK_S - now) if self._engine.has_work else 0.0

    def advance(self) -> bool:
        """Put the engine to sleep or wake it if due, which may take seconds. Returns whether it did."""
        if self._engine.has_work:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._engine.now()
        if self.due_in_s != 0.0:
            return False
        self._has_changed = False
        if self._engine.is_asleep:
            return self._wake()
        self._turn_ends_at = self._turns.ends_at()
        now = self._engine.now()
        if self._sleeps_at(now) > now:
            return False
        self._sleep()
        return True

    def close(self) -> None:
        """Release the memory permanently, so that other engines may use it. Do not use the engine afterwards."""
        self._turns.close()

    # ------------------------------------------------------------------ sleep

    def _sleeps_at(self, now: float) -> float:
        """Return when the engine should go to sleep if nothing changes, or infinity for never."""
        if self._idle_since is None:
            ends_at = inf if self._turn_ends_at is None else self._turn_ends_at
            # A turn only ends after some progress. Otherwise, engines could take turns forever without any progress.
            return ends_at if now < ends_at or self._has_done_something() else inf
        patience_s = self._after_s
        if self._turn_ends_at is not None:
            # Wait for another request for as long as a switch would take.
            patience_s = min(patience_s, self._switch_s)
        return self._idle_since + patience_s

    def _has_done_something(self) -> bool:
        """Whether the engine has made progress in this turn, or has nothing to compute at the moment."""
        return self._engine.idle_s != 0.0 or self._num_done() > self._num_before_turn

    def _num_done(self) -> int:
        stats = self._engine.stats()
        return stats.total_generated_tokens + stats.total_finished + stats.total_failed

    @property
    def _switch_s(self) -> float:
        """Seconds that the last sleep and wake took together.

        Before the first wake it is 0, because `last_wake_s` still holds the startup time, which is longer.
        """
        stats = self.stats
        return self._sleep_s + stats.last_wake_s if stats.num_wakes else 0.0

    def _sleep(self) -> None:
        engine, began_at = self._engine, self._engine.now()
        num_running, idle_since = len(engine.running), self._idle_since
        engine.sleep()
        self._sleep_s = engine.now() - began_at
        self._turns.leave()
        self._turn_ends_at = None
        sleeping_s = self.stats.sleeping_s + self._sleep_s
        stats = self.stats._replace(state=SleepState.ASLEEP, sleeping_s=sleeping_s)
        self.stats = stats._replace(num_turns_ended=stats.num_turns_ended + 1) if engine.has_work else stats
        if idle_since is None:
            logger.info("fell asleep in %.2f s, because other engines need the memory; %d requests will be recomputed",
                        self._sleep_s, num_running)  # fmt: skip
        else:
            logger.info("fell asleep in %.2f s, after %.1f s idle", self._sleep_s, engine.now() - idle_since)

    # ------------------------------------------------------------------ wake

    def _wake(self) -> bool:
        """Wake the engine if it has requests and it is its turn. If waking fails, the engine still holds the memory."""
        engine, now = self._engine, self._engine.now()
        if not engine.has_work:
            self._turns.leave()
            self._note_wait(now)
            self.stats = self.stats._replace(state=SleepState.ASLEEP)
            return False
        if not self._turns.ask():
            self._note_wait(now)
            self._asked_at = now
            self.stats = self.stats._replace(state=SleepState.QUEUED)
            return False
        self._note_wait(now)
        self.stats = self.stats._replace(state=SleepState.WAKING)
        engine.wake()
        took_s = engine.now() - now
        stats = self.stats
        self.stats = stats._replace(
            state=SleepState.AWAKE,
            num_wakes=stats.num_wakes + 1,
            waking_s=stats.waking_s + took_s,
            last_wake_s=took_s,
        )
        logger.info("woke up in %.2f s", took_s)
        self._idle_since = None
        self._begin_turn()
        return True

    def _note_wait(self, now: float) -> None:
        """Add the time since the engine requested memory to `SleepStats.queued_s`."""
        if self._asked_at is not None:
            self.stats = self.stats._replace(queued_s=self.stats.queued_s + now - self._asked_at)
        self._asked_at = None

    def _begin_turn(self) -> None:
        self._turns.begin(switch_s=self._switch_s)
        self._num_before_turn = self._num_done()
        self._has_changed = True
