"""What one ingress knows of each replica: its own outstanding work there, and what the replica reports beyond it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.fleet.dispatch.decision import Candidate

AWAKE = "awake"
REPORT_LIFE_S = 5.0  # the work of other ingresses on a replica is forgotten when no report of it came for so long
# The speed of a replica without work is forgotten after this: a replica that was slow for a while is tried again.
SPEED_LIFE_S = 30.0
# Numbers that a report may have: not negative, and no infinity or NaN. A number that is not in its range makes a frame
# invalid, for one NaN among the scores of replicas leaves them in no order.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Name = Annotated[str, Meta(max_length=256)]
_NONE: Mapping[str, Any] = MappingProxyType({})


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One replica at one moment, with the work of all ingresses. It comes with every frame, so dispatch never polls.

    It crosses processes by position: new fields go to the end and need a default, for replicas of an older version.
    """

    group: Name  # of an A/B trial; "" for none
    num_requests: Count  # running and waiting
    num_background: Count  # of these, background requests
    num_unpreemptible_background: Count  # of these, background requests that are not preempted for others
    max_requests: Count  # more are refused, not counting background requests that can be preempted
    max_running: Count  # computed at once; the others wait
    num_waiting_tokens: Count  # prompt tokens of waiting requests
    num_kv_tokens: Count  # that fit into its KV memory
    tokens_per_s: Amount  # in steps of one size, the same on all replicas; 0 while not known
    ended_per_s: Amount  # requests that end in a second of computing
    step_age_s: Amount  # how long the current step has been running
    weights: int = 0  # a digest of the model's files; 0 while not known
    sends_views: bool = False  # it understands WatchEngine
    num_own: Count | None = None  # of num_requests, those of the ingress that gets this report; None: not known
    # Digests of the adapters that it has loaded; None: it computes with none, or is of a version that knows none.
    adapters: Annotated[tuple[Name, ...], Meta(max_length=10_000)] | None = None
    state: Name = AWAKE  # of `app.engine.stats.SleepState`
    wake_s: Amount = 0.0  # how long it should take until it computes; 0: it is awake
    num_free_kv_tokens: Count = 0  # of num_kv_tokens, those that no request has, as far as is known
    is_short_of_memory: bool = False  # it has fewer free blocks than running requests
    backend: Name = ""  # the code that computes on a GPU; empty on a CPU
    # What has failed before it, each with the reason
    backends_failed: Annotated[dict[Name, str], Meta(max_length=64)] = {}
    sends_metrics: bool = False  # it understands AskMetrics
    # Prompt tokens that the requests of other ingresses than the one that gets this report are still to have computed;
    # None: not known.
    num_prompt_tokens_of_others: Count | None = None


class Ledger:
    """The outstanding work on each replica. One thread, no locks.

    The work of this ingress is counted at once and exactly, so requests placed in the same moment see each other. Of
    the work that a replica reports, only what exceeds that share is added: it belongs to other ingresses. `now` is in
    seconds of any one clock.
    """

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}  # by request id
        self._replicas: defaultdict[str, ReplicaState] = defaultdict(ReplicaState)  # by replica id
        self._num_placed = 0
        self._usual_decode_tokens = 0.0  # left to generate of one request; a moving average

    def replica(self, replica_id: str) -> ReplicaState:
        """What is known of a replica; a new entry for a new one."""
        return self._replicas[replica_id]

    def place(
        self,
        request_id: str,
        replica_id: str,
        *,
        num_prompt_tokens: int,
        num_expected_tokens: int,
        is_background: bool = False,
    ) -> None:
        """A request goes to a replica and leaves the one that had it.

        `num_prompt_tokens`: to be computed there, so without those that it should have cached, and with those that
        another replica had generated already. `num_expected_tokens`: to be generated from here on.
        """
        if request_id in self._placed:
            self.end(request_id)
        ours = self._replicas[replica_id].ours
        left = max(1, num_expected_tokens)
        self._placed[request_id] = _Placed(
            replica_id, ours, num_prompt_tokens, left, num_expected_tokens, is_background
        )
        ours.add(1, is_background, num_prompt_tokens, left)
        # Seen at any moment, half of a request is left on average.
        # The first weigh more: an ingress that has just started soon knows how much work the requests of others are.
        self._num_placed += 1
        weight = max(0.05, 1 / (self._num_placed + 3))
        self._usual_decode_tokens += weight * (num_expected_tokens / 2 - self._usual_decode_tokens)

    def progress(self, request_id: str, num_new_tokens: int) -> None:
        """Tokens of a request have come; with the first, its prompt is known to be computed."""
        placed = self._placed.get(request_id)
        if placed is None:
            return  # it has ended; these were on their way
        # Only the differences: this is called for every token.
        ours = placed.work
        if placed.num_prefill_tokens:
            ours.num_prefill_tokens -= placed.num_prefill_tokens
            placed.num_prefill_tokens = 0
        placed.num_unused_tokens -= num_new_tokens
        # A request that still runs generates at least one more token.
        left = placed.num_unused_tokens if placed.num_unused_tokens > 1 else 1
        ours.num_decode_tokens += left - placed.num_decode_tokens
        placed.num_decode_tokens = left

    def num_prefill_tokens(self, request_id: str) -> int:
        """The prompt tokens of a placed request that its replica is expected to compute still."""
        return self._placed[request_id].num_prefill_tokens

    def end(self, request_id: str) -> str | None:
        """A request has ended, in whatever way, or was placed nowhere. Returns the replica that had it."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        placed.work.add(-1, placed.is_background, placed.num_prefill_tokens, placed.num_decode_tokens)
        return placed.replica_id

    def note(self, replica_id: str, report: ReplicaReport, *, now: float) -> None:
        """Take in a replica's report."""
        self._replicas[replica_id].note(report, now=now, usual_decode_tokens=self._usual_decode_tokens)

    def candidates(
        self,
        replica_ids: Iterable[str],
        *,
        now: float,
        is_background: bool = False,
        num_cached_tokens: Mapping[str, int] = _NONE,
        session_replica_id: str | None = None,
    ) -> list[Candidate]:
        """These replicas in their order, with what is known of one request there. `num_cached_tokens` by replica id."""
        states = {replica_id: self._replicas.get(replica_id) or ReplicaState() for replica_id in replica_ids}
        # One that has not reported yet accepts as many requests as the others.
        max_requests = max([each.report.max_requests for each in states.values() if each.report], default=None)
        return [
            state.candidate(
                replica_id, now=now, max_requests=max_requests, is_background=is_background,
                num_cached_tokens=num_cached_tokens.get(replica_id, 0), holds_session=replica_id == session_replica_id,
            )
            for replica_id, state in states.items()
        ]  # fmt: skip

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the replicas that are gone, with all they had."""
        gone = self._replicas.keys() - set(replica_ids)
        if not gone:
            return
        for replica_id in gone:
            del self._replicas[replica_id]
        kept = {id(state.ours) for state in self._replicas.values()}
        self._placed = {each: placed for each, placed in self._placed.items() if id(placed.work) in kept}


@dataclass(slots=True)
class _Work:
    num_requests: int = 0
    num_background: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def add(self, sign: int, is_background: bool, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.num_requests += sign
        self.num_background += sign * is_background
        self.num_prefill_tokens += sign * num_prefill_tokens
        self.num_decode_tokens += sign * num_decode_tokens

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.num_requests + other.num_requests,
            self.num_background + other.num_background,
            self.num_prefill_tokens + other.num_prefill_tokens,
            self.num_decode_tokens + other.num_decode_tokens,
        )


@dataclass(slots=True)
class _Placed:
    """One request and what is left of it."""

    replica_id: str
    work: _Work  # of its replica, where it is counted
    num_prefill_tokens: int
    num_decode_tokens: int  # expected still to come, at least 1
    num_unused_tokens: int  # the expected tokens less the generated ones; below 1 when it is longer than expected
    is_background: bool


class ReplicaState:
    """One replica as one ingress knows it."""

    def __init__(self) -> None:
        self.report: ReplicaReport | None = None  # the last one
        self.is_suspect = False  # its stream broke or is silent
        self.ours = _Work()  # sent by this ingress
        self._others = _Work()  # of other ingresses, by the last report
        self._reported_at = float("-inf")
        self._worked_at = float("-inf")  # when a report last had requests

    def note(self, report: ReplicaReport, *, now: float, usual_decode_tokens: float) -> None:
        """Take in a report. `usual_decode_tokens`: left to generate of a request of which nothing is known."""
        ours = self.ours
        # As the replica counts them: some of ours may have ended since, or be on their way there.
        num_own = ours.num_requests if report.num_own is None else report.num_own
        num_requests = max(0, report.num_requests - num_own)
        num_background = min(num_requests, max(0, report.num_background - ours.num_background))
        num_prefill_tokens = report.num_prompt_tokens_of_others
        if num_prefill_tokens is None:  # a replica of an older version
            num_prefill_tokens = max(0, report.num_waiting_tokens - ours.num_prefill_tokens)
        # A replica does not know either how long its outputs will be.
        self._others = _Work(
            num_requests, num_background, num_prefill_tokens, round(num_requests * usual_decode_tokens)
        )
        self.report = report
        self.is_suspect = False
        self._reported_at = now
        if report.num_requests:
            self._worked_at = now

    def candidate(
        self,
        replica_id: str,
        *,
        now: float,
        max_requests: int | None,
        is_background: bool,
        num_cached_tokens: int,
        holds_session: bool,
    ) -> Candidate:
        """This replica for one request. More than `max_requests` are refused."""
        others, report = self._others, self.report
        is_known = (others.num_requests or others.num_prefill_tokens) and now - self._reported_at <= REPORT_LIFE_S
        work = self.ours + others if is_known else self.ours
        knows_speed = report is not None and now - self._worked_at <= SPEED_LIFE_S
        # Requests that are computed before this one; before a foreground one, no background work that gives way.
        num_before = work.num_requests
        if not is_background:
            num_staying = 0 if report is None else report.num_unpreemptible_background
            num_before -= max(0, work.num_background - num_staying)
        elif report is not None and max_requests is not None:  # a background request needs a free slot
            max_requests = min(max_requests, report.max_running)
        return Candidate(
            replica_id=replica_id,
            num_requests=work.num_requests,
            num_prefill_tokens=work.num_prefill_tokens,
            num_decode_tokens=work.num_decode_tokens,
            num_ahead=0 if report is None else max(0, work.num_requests + 1 - report.max_running),
            wake_s=0.0 if report is None else report.wake_s,
            tokens_per_s=report.tokens_per_s if report is not None and knows_speed else 0.0,
            num_cached_tokens=num_cached_tokens,
            holds_session=holds_session,
            group="" if report is None else report.group,
            is_full=max_requests is not None and num_before >= max_requests,
            has_slot=report is None or (report.state == AWAKE and num_before < report.max_running),
            is_suspect=self.is_suspect,
            weights=0 if report is None else report.weights,
        )
