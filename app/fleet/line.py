"""The stream of frames from one replica: opened, listened to, and opened again for as long as the replica is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from app.fleet.attempt import Lost
from app.fleet.frame import Frame

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# A timer that is itself this late says that this process was busy or stopped, not that the replica is silent.
_LATE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a replica counts as hung. Seconds."""

    silence_s: float  # without any frame, though heartbeats are sent all the time
    step_s: float  # that one step may take


class Line:
    """One replica, listened to by one task. Whoever owns it hears of every frame and of every loss."""

    def __init__(
        self,
        replica_id: str,
        open_stream: Callable[[], AsyncIterator[Frame]],
        *,
        patience: Patience,
        on_frame: Callable[[str, Frame], None],
        on_lost: Callable[[str, Lost], None],
    ) -> None:
        """`on_lost(replica_id, lost)` is called whenever the stream ends: frames may be missing from then on."""
        self._replica_id = replica_id
        self._open_stream = open_stream
        self._patience = patience
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._heard_at = 0.0  # by the event loop's clock
        self._is_silent = False
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle  # while a stream is read
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def close(self) -> None:
        """Listen no more; nobody is told."""
        self._listening.cancel()

    async def _listen(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            began_at = asyncio.get_running_loop().time()
            lost = await self._until_lost()
            logger.warning("replica %s: %s", self._replica_id, lost)
            self._on_lost(self._replica_id, lost)
            lasted_s = asyncio.get_running_loop().time() - began_at
            delay_s = _FIRST_DELAY_S if lasted_s > 2 * _LONGEST_DELAY_S else min(2 * delay_s, _LONGEST_DELAY_S)
            await asyncio.sleep(delay_s)

    async def _until_lost(self) -> Lost:
        """Read one stream to its end; returns why it ended."""
        loop = asyncio.get_running_loop()
        self._is_silent = False
        self._heard_at = loop.time()
        self._reading = loop.create_task(self._read())
        self._watch(self._patience.silence_s)
        try:
            await self._reading
        except asyncio.CancelledError:
            if not self._is_silent:
                self._reading.cancel()
                raise
            return Lost(f"silent for {loop.time() - self._heard_at:.1f} s", reason="silent")
        except Lost as lost:
            return lost
        except Exception as error:
            return Lost(f"its stream broke: {type(error).__name__}: {error}", reason="broken")
        finally:
            self._watching.cancel()
        return Lost("its stream ended", reason="ended")

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        number = 0
        async with aclosing(cast(AsyncGenerator[Frame, None], self._open_stream())) as frames:
            async for frame in frames:
                self._heard_at = loop.time()
                if frame.number != number:
                    raise Lost(f"frame {number} is missing, {frame.number} came", reason="gap")
                number += 1
                if frame.report.step_age_s > self._patience.step_s:
                    raise Lost(f"its step has been running for {frame.report.step_age_s:.1f} s", reason="stuck")
                self._on_frame(self._replica_id, frame)

    def _watch(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(wait_s, self._check_silence, loop.time() + wait_s)

    def _check_silence(self, due_at: float) -> None:
        """Called when the patience of the last frame but one has run out."""
        now = asyncio.get_running_loop().time()
        if now - due_at > _LATE_S:
            self._heard_at = now  # it may have spoken while this process did not listen
        silent_s = now - self._heard_at
        if silent_s >= self._patience.silence_s:
            self._is_silent = True
            assert self._reading is not None, "silence is checked while a stream is read"
            self._reading.cancel()
            return
        self._watch(self._patience.silence_s - silent_s)
