"""When an engine sleeps and wakes. No torch here, no threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from app.engine.device_lease import RECHECK_S, DeviceLease
from app.engine.engine import Engine
from app.engine.stats import SleepState, SleepStats

logger = logging.getLogger(__name__)


class SleepController:
    """Puts one engine to sleep when it has had nothing to do for long, or other engines wait for its memory.

    The engine's thread calls. It must have taken the memory (`DeviceLease.wait`).
    """

    def __init__(self, engine: Engine, turns: DeviceLease, *, after_s: float, started_in_s: float) -> None:
        """after_s: without a request. started_in_s: how long it took to build the engine."""
        self._engine = engine
        self._turns = turns
        self._after_s = after_s
        self._sleep_s = 0.0  # how long the last one took to begin
        self._idle_since: float | None = None
        self._asked_at: float | None = None  # while it waits for memory
        self._turn_ends_at: float | None = None  # while other engines need its memory
        self._num_before_turn = 0  # requests and tokens that were done when the turn began
        self._has_changed = True  # something about the turns, since they were looked at
        self.stats = SleepStats(last_wake_s=started_in_s)  # replaced as a whole; any thread may read it
        self._begin_turn()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have a thread call `on_change` whenever another engine of the device has changed something, until `close`."""
        self._turns.listen(on_change)

    def note_change(self) -> None:
        """Another engine of the device has changed something. Any thread may call."""
        self._has_changed = True

    @property
    def due_in_s(self) -> float | None:
        """Seconds until `advance` has something to do if nothing changes; 0: now; None: never."""
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
        """Let the engine sleep or wake if it is time, which may take seconds. Returns whether it did."""
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
        """The engine is of no more use; others may have its memory."""
        self._turns.close()

    # ------------------------------------------------------------------ sleep

    def _sleeps_at(self, now: float) -> float:
        """When the engine is to sleep, if nothing changes."""
        if self._idle_since is None:
            ends_at = inf if self._turn_ends_at is None else self._turn_ends_at
            # A turn in which nothing was done would be repeated for ever.
            return ends_at if now < ends_at or self._has_done_something() else inf
        patience_s = self._after_s
        if self._turn_ends_at is not None:
            # As long as a switch would cost: a request may follow the one before.
            patience_s = min(patience_s, self._switch_s)
        return self._idle_since + patience_s

    def _has_done_something(self) -> bool:
        """Since the turn began; or there is nothing to compute, as the strategy waits."""
        return self._engine.idle_s != 0.0 or self._num_done() > self._num_before_turn

    def _num_done(self) -> int:
        stats = self._engine.stats()
        return stats.total_generated_tokens + stats.total_finished + stats.total_failed

    @property
    def _switch_s(self) -> float:
        """As measured last; the start, which checks the model too, is not measured as a wake."""
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
            logger.info("asleep in %.2f s, as other engines wait for the memory; %d requests compute again later",
                        self._sleep_s, num_running)  # fmt: skip
        else:
            logger.info("asleep in %.2f s, after %.1f s without a request", self._sleep_s, engine.now() - idle_since)

    # ------------------------------------------------------------------ wake

    def _wake(self) -> bool:
        """Wake the engine if it has requests and there is memory; what it raises leaves the memory taken."""
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
        logger.info("awake in %.2f s", took_s)
        self._idle_since = None
        self._begin_turn()
        return True

    def _note_wait(self, now: float) -> None:
        """Count what it has waited for memory so far."""
        if self._asked_at is not None:
            self.stats = self.stats._replace(queued_s=self.stats.queued_s + now - self._asked_at)
        self._asked_at = None

    def _begin_turn(self) -> None:
        self._turns.begin(switch_s=self._switch_s)
        self._num_before_turn = self._num_done()
        self._has_changed = True
