"""What is outstanding on each replica, as one ingress knows it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from app.fleet.dispatch.load import ReplicaLoad

REPORT_LIFE_S = 5.0  # what others have on a replica is forgotten when it has not been reported for so long
# Without work, its speed is forgotten after this: one that was slow for a while would else never be tried again.
SPEED_LIFE_S = 30.0
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself at one moment: the work of all ingresses."""

    num_requests: int
    num_prefill_tokens: int  # of prompts, not computed yet
    num_background: int = 0  # requests that nobody waits for
    num_staying_background: int = 0  # of these, such as make way for nobody
    max_running: int | None = None  # requests that it computes at once; None: it does not know
    tokens_per_s: float = 0.0  # see ReplicaLoad; 0: not known


class Ledger:
    """What this ingress has outstanding on each replica, and what replicas report beyond it. One thread, no locks.

    What is ours is counted at once and exactly, so requests placed in the same moment see each other. Of what a
    replica reports, only what exceeds our own share is added: it belongs to other ingresses. Time is told, in seconds
    of any one clock.
    """

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}  # by request id
        self._accounts: dict[str, _Account] = {}  # by replica id
        self._usual_decode_tokens = 0.0  # left to generate of one request; a moving average

    def place(
        self,
        request_id: str,
        replica_id: str,
        *,
        num_prompt_tokens: int,
        num_expected_tokens: int,
        is_background: bool = False,
    ) -> None:
        """A request goes to a replica; it leaves the one it was on.

        `num_prompt_tokens`: to be computed there, so without those that it should have cached, and with those that
        another replica had generated already. `num_expected_tokens`: to be generated from here on.
        """
        self.end(request_id)
        placed = _Placed(
            replica_id=replica_id,
            num_prefill_tokens=num_prompt_tokens,
            num_expected_tokens=num_expected_tokens,
            is_background=is_background,
        )
        self._placed[request_id] = placed
        self._account(replica_id).add(placed, 1)
        # Seen at any moment, half of a request is left on average.
        self._usual_decode_tokens += 0.05 * (num_expected_tokens / 2 - self._usual_decode_tokens)

    def progress(self, request_id: str, num_new_tokens: int) -> None:
        """Tokens of a request have come; with the first, its prompt is known to be computed."""
        placed = self._placed.get(request_id)
        if placed is None:
            return  # it has ended; these were on their way
        # Only the differences: this is called for every token.
        ours = self._account(placed.replica_id).ours
        if placed.num_prefill_tokens:
            ours.num_prefill_tokens -= placed.num_prefill_tokens
            placed.num_prefill_tokens = 0
        num_decode_tokens = placed.num_decode_tokens
        placed.num_generated += num_new_tokens
        ours.num_decode_tokens += placed.num_decode_tokens - num_decode_tokens

    def end(self, request_id: str) -> None:
        """A request has ended, in whatever way, or was placed nowhere."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._account(placed.replica_id).add(placed, -1)

    def correct(self, replica_id: str, report: ReplicaReport, *, now: float) -> None:
        """Take in what a replica says of itself."""
        self._account(replica_id).correct(report, now=now, usual_decode_tokens=self._usual_decode_tokens)

    def loads(
        self,
        replica_ids: Iterable[str],
        *,
        now: float,
        max_requests: int | None = None,
        is_background: bool = False,
        num_cached_tokens: Mapping[str, int] = _NONE,
        groups: Mapping[str, str] = _NONE,
        session_replica_id: str | None = None,
    ) -> list[ReplicaLoad]:
        """The load of each of these replicas, in their order, with what is known of this request there.

        `max_requests`: what one replica takes before it refuses. Without `is_background` only background work counts
        towards it that makes way for nobody; with it everything does, and not more than is computed at once.
        `num_cached_tokens` and `groups` by replica id.
        """
        found = []
        for replica_id in replica_ids:
            account = self._accounts.get(replica_id) or _Account()
            work = account.work(now)
            found.append(
                ReplicaLoad(
                    replica_id=replica_id,
                    num_requests=work.num_requests,
                    num_prefill_tokens=work.num_prefill_tokens,
                    num_decode_tokens=work.num_decode_tokens,
                    num_ahead=account.num_ahead(work.num_requests),
                    tokens_per_s=account.tokens_per_s(now),
                    num_cached_tokens=num_cached_tokens.get(replica_id, 0),
                    holds_session=replica_id == session_replica_id,
                    group=groups.get(replica_id, ""),
                    is_full=max_requests is not None
                    and account.num_in_the_way(work, is_background=is_background)
                    >= account.most(max_requests, is_background=is_background),
                )
            )
        return found

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the replicas that are gone, with all they had."""
        self._placed = {each: placed for each, placed in self._placed.items() if placed.replica_id in replica_ids}
        self._accounts = {each: account for each, account in self._accounts.items() if each in replica_ids}

    def _account(self, replica_id: str) -> _Account:
        account = self._accounts.get(replica_id)
        if account is None:
            account = self._accounts[replica_id] = _Account()
        return account


@dataclass(slots=True, kw_only=True)
class _Placed:
    """One request and what is left of it."""

    replica_id: str
    num_prefill_tokens: int
    num_expected_tokens: int
    is_background: bool
    num_generated: int = 0

    @property
    def num_decode_tokens(self) -> int:
        """Expected still to come. Whoever runs generates at least one more, however long it has been."""
        return max(1, self.num_expected_tokens - self.num_generated)


@dataclass(slots=True)
class _Work:
    num_requests: int = 0
    num_background: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.num_requests + other.num_requests,
            self.num_background + other.num_background,
            self.num_prefill_tokens + other.num_prefill_tokens,
            self.num_decode_tokens + other.num_decode_tokens,
        )


class _Account:
    """One replica's: our work, the others', and what it can do."""

    def __init__(self) -> None:
        self.ours = _Work()
        self.others = _Work()
        self.reported_at = float("-inf")
        self.worked_at = float("-inf")
        self.num_staying_background = 0
        self.max_running: int | None = None
        self.reported_tokens_per_s = 0.0

    def work(self, now: float) -> _Work:
        return self.ours + self.others if now - self.reported_at <= REPORT_LIFE_S else self.ours

    def tokens_per_s(self, now: float) -> float:
        return self.reported_tokens_per_s if now - self.worked_at <= SPEED_LIFE_S else 0.0

    def num_in_the_way(self, work: _Work, *, is_background: bool) -> int:
        """How many of these requests take the places that a new one may have."""
        if is_background:
            return work.num_requests
        return work.num_requests - work.num_background + min(work.num_background, self.num_staying_background)

    def most(self, max_requests: int, *, is_background: bool) -> int:
        """From how many on a new one is refused."""
        return min(max_requests, self.max_running or max_requests) if is_background else max_requests

    def num_ahead(self, num_requests: int) -> int:
        return 0 if self.max_running is None else max(0, num_requests + 1 - self.max_running)

    def add(self, placed: _Placed, sign: int) -> None:
        self.ours.num_requests += sign
        self.ours.num_background += sign * placed.is_background
        self.ours.num_prefill_tokens += sign * placed.num_prefill_tokens
        self.ours.num_decode_tokens += sign * placed.num_decode_tokens

    def correct(self, report: ReplicaReport, *, now: float, usual_decode_tokens: float) -> None:
        num_requests = max(0, report.num_requests - self.ours.num_requests)
        num_background = min(num_requests, max(0, report.num_background - self.ours.num_background))
        num_prefill_tokens = max(0, report.num_prefill_tokens - self.ours.num_prefill_tokens)
        # How long its outputs will be a replica knows no better than we.
        num_decode_tokens = round(num_requests * usual_decode_tokens)
        self.others = _Work(num_requests, num_background, num_prefill_tokens, num_decode_tokens)
        self.num_staying_background = report.num_staying_background
        self.reported_at = now
        self.max_running = report.max_running
        self.reported_tokens_per_s = report.tokens_per_s
        if report.num_requests:
            self.worked_at = now
