"""Whether `Retry-After` is true: refused clients come back when they were told, and a few look when they could have.

Those few send again and again, one of them at a time, until they are let in. Each of their refusals is one more promise
for the server to keep, so they ask seldom.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.harness.answer import Answer, ask
from benchmarks.harness.http_call import Target

REFUSED = 429
PROBE_EVERY = 10  # refusals for each one that is probed
PROBE_GAP_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFigures:
    """What the promises were worth. Only those that fell due while requests still arrived are counted."""

    num_returned: int  # came back when told
    returned_admitted_share: float | None
    num_probed: int  # let in before the arrivals ended
    num_never_admitted: int  # probed in vain until the arrivals ended
    # Promised less earliest possible, in seconds: above 0 when the client could have come earlier.
    retry_error_median_s: float | None
    retry_error_median_absolute_s: float | None
    num_not_due: int  # told to come back after the last arrival: not waited for
    num_without_promise: int  # 429 without a Retry-After in seconds


@dataclass(slots=True)
class RetryCheck:
    """Follows refused requests of one run; give `after` to `open_loop.play`."""

    target: Target
    ends_s: float  # when the last request arrives, by the clock
    timeout_s: float
    probe_every: int = PROBE_EVERY
    probe_gap_s: float = PROBE_GAP_S
    clock: Callable[[], float] = time.perf_counter
    _num_refused: int = 0
    _is_probing: bool = False
    _num_not_due: int = 0
    _num_without_promise: int = 0
    _num_never_admitted: int = 0
    _admitted: list[bool] = field(default_factory=list)
    _errors_s: list[float] = field(default_factory=list)

    async def after(self, request: bytes, answer: Answer) -> None:
        """Come back with a request that was refused, or probe for it; nothing for others."""
        if answer.status != REFUSED or answer.answered_s is None:
            return
        if answer.retry_after_s is None:
            self._num_without_promise += 1
            return
        promised_s = answer.answered_s + answer.retry_after_s
        if promised_s > self.ends_s:  # nobody else arrives by then, and keeping a promise is no art
            self._num_not_due += 1
            return
        self._num_refused += 1
        if not self._is_probing and self._num_refused % self.probe_every == 1 % self.probe_every:
            await self._probe(request, promised_s)
        else:
            await self._come_back(request, promised_s)

    def figures(self) -> RetryFigures:
        errors = self._errors_s
        return RetryFigures(
            num_returned=len(self._admitted),
            returned_admitted_share=round(statistics.mean(self._admitted), 4) if self._admitted else None,
            num_probed=len(errors),
            num_never_admitted=self._num_never_admitted,
            retry_error_median_s=round(statistics.median(errors), 4) if errors else None,
            retry_error_median_absolute_s=round(statistics.median(map(abs, errors)), 4) if errors else None,
            num_not_due=self._num_not_due,
            num_without_promise=self._num_without_promise,
        )

    async def _come_back(self, request: bytes, promised_s: float) -> None:
        await asyncio.sleep(promised_s - self.clock())
        answer = await ask(self.target, request, timeout_s=self.timeout_s, clock=self.clock)
        self._admitted.append(answer.status == 200)

    async def _probe(self, request: bytes, promised_s: float) -> None:
        self._is_probing = True
        while self.clock() < self.ends_s:
            await asyncio.sleep(self.probe_gap_s)
            answer = await ask(
                self.target,
                request,
                timeout_s=self.timeout_s,
                on_status=partial(self._note_probe, promised_s),
                clock=self.clock,
            )
            if answer.status == 200:
                return
        self._num_never_admitted += 1
        self._is_probing = False

    def _note_probe(self, promised_s: float, answer: Answer) -> None:
        if answer.status == 200:
            self._errors_s.append(promised_s - answer.begun_s)
            self._is_probing = False  # the next may begin while this one is being served
