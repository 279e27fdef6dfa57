"""How near ingresses keep the limits of a key that they share: `python -m benchmarks.service.fleet --limits`.

The accounts of ingresses and the owner of the shares are the service's own; time is simulated. The same requests come
to one account that has the whole limit: what that admits is allowed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from app.api.auth.keys import AccountLimits, KeyRing
from app.api.auth.limits import Account, SharedPools
from app.config import KeyConfig
from app.errors import LimitReached
from app.usage import CallUsage, UsageAnswer, UsageReport, Used
from app.usage.exchange import PERIOD_S, SILENCE_S
from app.usage.shares import LEASE_S, Shares

MINUTE_S = 60.0
# What the owner does not answer, in seconds of a run.
DEAD_FROM_S, DEAD_UNTIL_S = 120.0, 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: where requests go, and how many come."""

    num_ingresses: int
    skew: float = 0.0  # of the requests, those that go to the first ingress; the rest to all
    owner_dies: bool = False
    load: float = 3.0  # tokens that are asked for, over those that are allowed
    tokens_per_minute: int | None = 120_000
    requests_per_minute: int | None = None
    max_concurrency: int | None = None
    seconds: float = 300.0


@dataclass(slots=True)
class Admitted:
    """What one way of counting lets in: tokens that were used, by the minute in which their request came."""

    by_minute: dict[int, int]
    num_running: int = 0
    most_running: int = 0


class _Ingress:
    def __init__(self, name: str, config: KeyConfig, clock: Callable[[], float], *, first_share: float) -> None:
        self.name = name
        ring = KeyRing([config], SharedPools(first_share=first_share), clock=clock)
        [self.account] = ring.accounts
        self.limits = AccountLimits(ring)
        self.answered_at = clock()
        self.num_processes = 0


class _Run:
    def __init__(self, case: Case, seed: int) -> None:
        self._case = case
        self._rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        config = KeyConfig(
            name="key",
            sha256="0" * 64,
            tokens_per_minute=case.tokens_per_minute,
            requests_per_minute=case.requests_per_minute,
            max_concurrency=case.max_concurrency,
        )
        share = 1 / case.num_ingresses
        self._ingresses = [_Ingress(str(n), config, self._clock, first_share=share) for n in range(case.num_ingresses)]
        self._single = _Ingress("", config, self._clock, first_share=1.0)
        self._shares: Shares | None = Shares(self._clock)
        self.shared, self.single = Admitted({}), Admitted({})

    def _clock(self) -> float:
        return self.now

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def run(self) -> None:
        case = self._case
        for number, ingress in enumerate(self._ingresses):
            begins_s = (number + self._rng.random()) * PERIOD_S / case.num_ingresses
            self._at(begins_s, partial(self._exchange, ingress))
        if case.owner_dies:
            self._at(DEAD_FROM_S, lambda: setattr(self, "_shares", None))
            self._at(DEAD_UNTIL_S, lambda: setattr(self, "_shares", Shares(self._clock)))
        self._at(0.0, self._arrive)
        while self._events and self.now < case.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _exchange(self, ingress: _Ingress) -> None:
        limits, uses = ingress.limits, ingress.limits.uses()
        if self._shares is not None:
            report = UsageReport(process=ingress.name, number=0, limits=uses, num_processes=ingress.num_processes)
            answer = self._shares.answer(report, UsageAnswer(number=0, day=""))
            ingress.answered_at, ingress.num_processes = self.now, answer.num_processes
            limits.take(answer.shares)
        elif (silence_s := self.now - ingress.answered_at) > SILENCE_S:
            limits.lose_owner(has_share=silence_s < LEASE_S)
        self._at(self.now + PERIOD_S, partial(self._exchange, ingress))

    def _arrive(self) -> None:
        case, rng = self._case, self._rng
        num_prompt, max_tokens = rng.randint(50, 150), 400
        used = CallUsage("model", False, Used(1, num_prompt, 0, rng.randint(50, max_tokens)))
        is_hot = rng.random() < case.skew
        ingress = self._ingresses[0] if is_hot else rng.choice(self._ingresses)
        ends_at = self.now + rng.uniform(0.5, 9.5)
        for each, admitted in ((ingress, self.shared), (self._single, self.single)):
            self._ask(each.account, admitted, num_prompt + max_tokens, used, ends_at)
        self._at(self.now + rng.expovariate(self._num_per_s), self._arrive)

    @property
    def _num_per_s(self) -> float:
        case, mean_tokens, mean_s = self._case, 325, 5.0
        allowed = [
            (case.tokens_per_minute or 0) / MINUTE_S / mean_tokens,
            (case.requests_per_minute or 0) / MINUTE_S,
            (case.max_concurrency or 0) / mean_s,
        ]
        return case.load * min(each for each in allowed if each)

    def _ask(self, account: Account, admitted: Admitted, num_tokens: int, used: CallUsage, ends_at: float) -> None:
        running = ExitStack()
        try:
            reservation = running.enter_context(account.reserve())
            reservation.reserve(num_tokens)
        except LimitReached as refusal:
            running.__exit__(type(refusal), refusal, None)
            return
        reservation.usages.append(lambda: used)
        minute = int(self.now / MINUTE_S)
        admitted.by_minute[minute] = admitted.by_minute.get(minute, 0) + used.used.num_tokens
        admitted.num_running += 1
        admitted.most_running = max(admitted.most_running, admitted.num_running)

        def end() -> None:
            running.close()
            admitted.num_running -= 1

        self._at(ends_at, end)


def measure(case: Case, *, seed: int) -> dict[str, float]:
    """Tokens that were admitted over those that are allowed: in the whole run, in the best and the worst minute."""
    run = _Run(case, seed)
    run.run()
    shared, single = run.shared.by_minute, run.single.by_minute
    ratios = [shared.get(minute, 0) / allowed for minute, allowed in single.items()]
    return {
        "whole": round(sum(shared.values()) / sum(single.values()), 3),
        "lowest_minute": round(min(ratios), 3),
        "highest_minute": round(max(ratios), 3),
        "most_at_once": run.shared.most_running,
    }


def measure_all(*, seed: int) -> dict[str, Any]:
    """The table."""
    figures: dict[str, Any] = {"seed": seed}
    for num_ingresses in (1, 3, 8):
        for name, fields in CASES.items():
            case = Case(num_ingresses=num_ingresses, **fields)
            figures[f"{num_ingresses} ingresses, {name}"] = measure(case, seed=seed)
    return figures


_SKEWED: dict[str, Any] = {"skew": 0.8}
_AT_ONCE: dict[str, Any] = {"tokens_per_minute": None, "max_concurrency": 200}
CASES: dict[str, dict[str, Any]] = {
    "tokens, even": {},
    "tokens, skewed": _SKEWED,
    "tokens, even, the owner dead for a minute": {"owner_dies": True},
    "tokens, skewed, the owner dead for a minute": {"owner_dies": True, **_SKEWED},
    "tokens, skewed, half of the limit asked for": {"load": 0.5, **_SKEWED},
    "requests, skewed": {"tokens_per_minute": None, "requests_per_minute": 600, **_SKEWED},
    "200 at once, even": _AT_ONCE,
    "200 at once, skewed": {**_AT_ONCE, **_SKEWED},
    "200 at once, skewed, the owner dead for a minute": {**_AT_ONCE, **_SKEWED, "owner_dies": True},
    "40 at once, even": {**_AT_ONCE, "max_concurrency": 40},
}
