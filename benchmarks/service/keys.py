"""Measures the cost of many keys: `python -m benchmarks.service.keys`.

Runs the service's own accounts and usage reports of `--ingresses` ingresses, and the owner of the limits, in one
process and in simulated time. Each of `--keys` keys has limits on tokens a minute, requests a minute and concurrent
requests, and a budget of tokens a day. Progress goes to stderr; the last line of stdout is one JSON object:

    idle            no requests
    busy            one request a second for each key, through a random ingress; the token limit is twenty times higher
    some refused    like busy, but one key in twenty asks for three times its token limit

Each of these loads reports the kilobytes a second that one ingress sends to the owner and receives, and milliseconds of
CPU a second of one ingress, and of the owner for all ingresses, with pickling and the ledger, without the transport.

    authentication  microseconds of CPU to find the account of a request by its key, and by the name of the key; for
                    each number of keys
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from app.api.auth.keys import AccountLimits, KeyRing
from app.api.auth.limits import SharedPools
from app.config import KeyConfig
from app.errors import LimitReached
from app.usage import CallUsage, UsageCounter, Used
from app.usage.exchange import HURRY_S, PERIOD_S, UsageReporter
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.service.shares import Owner

WARM_UP_S, MEASURED_S = 20.0, 5.0  # simulated time
_RESERVED, _USED, _LASTS_S = 550, 325, 5.0
# (requests a second of each key, N): one key in N has a limit of a third of its load; 0: no key has.
LOADS = {"idle": (0.0, 0), "busy": (1.0, 0), "some refused": (1.0, 20)}
NUM_CALLS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.keys", __doc__)
    parser.add_argument("--keys", type=positive, default=500, metavar="N")
    parser.add_argument("--ingresses", type=positive, default=32, metavar="N")
    parser.add_argument("--rings", type=positive, nargs="+", default=[1, 500, 5000], metavar="N", help="keys of a ring")
    parser.add_argument("--seed", type=int, default=1)
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    figures: dict[str, Any] = {"keys": given.keys, "ingresses": given.ingresses, "seed": given.seed}
    for name, (num_per_s, every) in LOADS.items():
        figures[name] = Exchanges(given.keys, given.ingresses, num_per_s, every, given.seed).run()
        tell(f"{name}: {figures[name]}")
    figures["authentication"] = {f"{number} keys": authentication_figures(number) for number in given.rings}
    return figures


# ---------------------------------------------------------------------- the exchange


class _Ingress:
    def __init__(self, keys: Sequence[KeyConfig], clock: Callable[[], float], *, first_share: float) -> None:
        pools = SharedPools(first_share=first_share, shares_budgets=True)
        pools.usage = UsageCounter(clock)
        self.ring = KeyRing(keys, pools, clock=clock)
        self.reporter = UsageReporter(pools.usage, limits := AccountLimits(self.ring), clock=clock)
        self.begun_at = self.next_at = 0.0
        self.is_hurried = False
        limits.on_report_request(lambda: setattr(self, "is_hurried", True))


class Exchanges:
    """Simulates ingresses that report usage to the owner while requests of all keys arrive."""

    def __init__(self, num_keys: int, num_ingresses: int, num_per_s: float, every: int, seed: int) -> None:
        """`num_per_s` is the requests a second of one key. For `every`, see the N of LOADS."""
        self._rng = random.Random(seed)
        self.now = 0.0
        keys = [
            KeyConfig(
                name=f"key-{number}",
                sha256=hashlib.sha256(str(number).encode()).hexdigest(),
                tokens_per_minute=60 * _USED // 3 if every and number % every == 0 else 20 * 60 * _USED,
                requests_per_minute=240,
                max_concurrency=200,
                tokens_per_day=1_000_000_000,
            )
            for number in range(num_keys)
        ]
        self._ingresses = [_Ingress(keys, self._clock, first_share=1 / num_ingresses) for _ in range(num_ingresses)]
        self._owner = Owner(self._clock)
        self._num_per_s = num_per_s * num_keys
        self._running: list[tuple[float, int, ExitStack]] = []
        self._num_asked = self._num_refused = 0
        self.num_exchanges = 0
        self._num_bytes = [0, 0]  # bytes of reports, and of answers
        self._cpu_s = [0.0, 0.0]  # CPU time of the ingresses, and of the owner

    def _clock(self) -> float:
        return self.now

    def run(self) -> dict[str, float]:
        """Warm up, measure, and return the figures."""
        tick_s, number = HURRY_S, len(self._ingresses)
        for place, ingress in enumerate(self._ingresses):
            ingress.next_at = PERIOD_S * place / number
        for tick in range(round((WARM_UP_S + MEASURED_S) / tick_s)):
            if tick == round(WARM_UP_S / tick_s):
                self._num_bytes, self._cpu_s, self.num_exchanges = [0, 0], [0.0, 0.0], 0
                self._num_asked = self._num_refused = 0
                gc.collect()
            self.now = tick * tick_s
            self._serve(round(self._num_per_s * tick_s))
            for ingress in self._ingresses:
                if self.now >= ingress.next_at or ingress.is_hurried:
                    self._exchange(ingress)
        (reported, answered), (of_ingress, of_owner) = self._num_bytes, self._cpu_s
        of_one = MEASURED_S * number
        return {
            "reported_kb_per_s": round(reported / of_one / 1e3, 2),
            "answered_kb_per_s": round(answered / of_one / 1e3, 2),
            "ingress_ms_per_s": round(of_ingress / of_one * 1e3, 2),
            "owner_ms_per_s": round(of_owner / MEASURED_S * 1e3, 1),
            "exchanges_per_s": round(self.num_exchanges / of_one, 2),
            "refused": round(self._num_refused / max(1, self._num_asked), 3),
        }

    def _serve(self, number: int) -> None:
        while self._running and self._running[0][0] <= self.now:
            heapq.heappop(self._running)[2].close()
        for _ in range(number):
            self._num_asked += 1
            account = self._rng.choice(self._rng.choice(self._ingresses).ring.accounts)
            running = ExitStack()
            try:
                reservation = running.enter_context(account.reserve())
                reservation.reserve(_RESERVED)
            except LimitReached as refusal:
                self._num_refused += 1
                running.__exit__(type(refusal), refusal, None)
                continue
            reservation.usages.append(lambda: CallUsage("model", False, Used(1, _USED, 0, 0)))
            heapq.heappush(self._running, (self.now + _LASTS_S, self._num_asked, running))

    def _exchange(self, ingress: _Ingress) -> None:
        ingress.is_hurried, ingress.next_at = False, self.now + PERIOD_S
        self.num_exchanges += 1
        began = time.process_time()
        report = pickle.dumps(ingress.reporter.report())
        at_owner = time.process_time()
        answer = pickle.dumps(self._owner.answer(pickle.loads(report)))
        answered = time.process_time()
        ingress.reporter.take(pickle.loads(answer))
        self._cpu_s[0] += time.process_time() - answered + at_owner - began
        self._cpu_s[1] += answered - at_owner
        self._num_bytes[0] += len(report)
        self._num_bytes[1] += len(answer)


# ---------------------------------------------------------------------- authentication


def authentication_figures(num_keys: int) -> dict[str, float]:
    """Return the mean time to find an account by key and by name, over random existing keys."""
    secrets = [f"sk-{number:040d}".encode() for number in range(num_keys)]
    ring = KeyRing(
        KeyConfig(name=f"key-{number}", sha256=hashlib.sha256(secret).hexdigest())
        for number, secret in enumerate(secrets)
    )
    rng = random.Random(num_keys)
    chosen = [rng.randrange(num_keys) for _ in range(NUM_CALLS)]
    headers = [[(b"host", b"here"), (b"authorization", b"Bearer " + secrets[each])] for each in chosen]
    return {
        "by_key_us": _us_of_one([partial(ring.account_of, each) for each in headers]),
        "by_name_us": _us_of_one([partial(ring.account_named, f"key-{each}") for each in chosen]),
    }


def _us_of_one(calls: Sequence[Callable[[], Any]]) -> float:
    began = time.process_time()
    for call in calls:
        call()
    return round((time.process_time() - began) / len(calls) * 1e6, 2)


if __name__ == "__main__":
    sys.exit(main())
