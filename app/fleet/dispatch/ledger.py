"""Tracks the outstanding work on each replica, from one ingress's own requests and from the replicas' reports."""

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
REPORT_LIFE_S = 5.0  # without a report for this time, a replica's work from other ingresses is forgotten
SPEED_LIFE_S = 30.0  # an idle replica's speed is forgotten after this time, so that a slow replica gets another chance
# The numbers in a report must be finite and not negative. A frame with any other number is invalid, because replicas
# could not be ordered if one of their scores were NaN.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Name = Annotated[str, Meta(max_length=256)]
_NONE: Mapping[str, Any] = MappingProxyType({})


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A replica's current state, including its work from all ingresses.

    Every frame carries a report, so dispatch never polls. Fields are encoded by position. Add new fields at the end,
    with a default for replicas of an older version.
    """

    group: Name  # group of an A/B trial; "" for no group
    num_requests: Count  # running and waiting
    num_background: Count  # background requests among num_requests
    num_unpreemptible_background: Count  # background requests that are never preempted by other requests
    max_requests: Count  # further requests are refused; preemptible background requests do not count
    max_running: Count  # requests that run concurrently; further requests wait
    num_waiting_tokens: Count  # prompt tokens of waiting requests
    num_kv_tokens: Count  # tokens that fit into the KV memory
    tokens_per_s: Amount  # measured at a step size that all replicas share; 0 while unknown
    ended_per_s: Amount  # requests that end per second of computing time
    step_age_s: Amount  # how long the current step has been running
    weights: int = 0  # a digest of the model's files; 0 while unknown
    sends_views: bool = False  # whether the replica understands WatchEngine
    num_own: Count | None = None  # requests of the ingress that receives this report; None if unknown
    # Digests of the loaded adapters. None if the replica or its version does not support adapters.
    adapters: Annotated[tuple[Name, ...], Meta(max_length=10_000)] | None = None
    state: Name = AWAKE  # a value of `app.engine.stats.SleepState`
    wake_s: Amount = 0.0  # expected seconds until the replica is awake; 0 if it is awake
    num_free_kv_tokens: Count = 0  # the part of num_kv_tokens that no request owns
    is_short_of_memory: bool = False  # whether there are fewer free blocks than running requests
    backend: Name = ""  # name of the GPU backend; empty on a CPU
    # Why each preferred backend failed before `backend` was chosen.
    backends_failed: Annotated[dict[Name, str], Meta(max_length=64)] = {}
    sends_metrics: bool = False  # whether the replica understands AskMetrics
    # Uncomputed prompt tokens from ingresses other than the receiver of this report; None if unknown.
    num_prompt_tokens_of_others: Count | None = None


class Ledger:
    """The outstanding work on each replica. Used by one thread, without locks.

    This ingress's own work is counted exactly and immediately, so that each placement takes the previous ones into
    account. A replica's report adds only the work from other ingresses. All `now` arguments come from one clock.
    """

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}  # by request id
        self._replicas: defaultdict[str, ReplicaState] = defaultdict(ReplicaState)  # by replica id
        self._num_placed = 0
        self._usual_decode_tokens = 0.0  # moving average of the tokens that one request still has to generate

    def replica(self, replica_id: str) -> ReplicaState:
        """Return the state of a replica. Creates the state for a new replica."""
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
        """Count a request on a replica, and stop counting it on its previous replica.

        `num_prompt_tokens` are the tokens to prefill on this replica. They include tokens that another replica has
        generated, but not tokens that this replica should have cached. `num_expected_tokens` are still to be generated.
        """
        if request_id in self._placed:
            self.end(request_id)
        ours = self._replicas[replica_id].ours
        left = max(1, num_expected_tokens)
        self._placed[request_id] = _Placed(
            replica_id, ours, num_prompt_tokens, left, num_expected_tokens, is_background
        )
        ours.add(1, is_background, num_prompt_tokens, left)
        # On average, half of a running request's output is still to be generated. The first requests have more weight,
        # so that a new ingress can soon estimate the work of other ingresses' requests.
        self._num_placed += 1
        weight = max(0.05, 1 / (self._num_placed + 3))
        self._usual_decode_tokens += weight * (num_expected_tokens / 2 - self._usual_decode_tokens)

    def progress(self, request_id: str, num_new_tokens: int) -> None:
        """Count new tokens of a request. Its first token shows that its prompt is computed."""
        placed = self._placed.get(request_id)
        if placed is None:
            return  # the request ended while these tokens were on their way
        # The sums are updated by differences for speed, because this method is called for every token.
        ours = placed.work
        if placed.num_prefill_tokens:
            ours.num_prefill_tokens -= placed.num_prefill_tokens
            placed.num_prefill_tokens = 0
        placed.num_unused_tokens -= num_new_tokens
        # A request that is still running generates at least one more token.
        left = placed.num_unused_tokens if placed.num_unused_tokens > 1 else 1
        ours.num_decode_tokens += left - placed.num_decode_tokens
        placed.num_decode_tokens = left

    def num_prefill_tokens(self, request_id: str) -> int:
        """Return a placed request's uncomputed prompt tokens. Raises KeyError for an unknown request."""
        return self._placed[request_id].num_prefill_tokens

    def end(self, request_id: str) -> str | None:
        """Stop counting an ended request. Returns its replica, or None if the request was not placed."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        placed.work.add(-1, placed.is_background, placed.num_prefill_tokens, placed.num_decode_tokens)
        return placed.replica_id

    def note(self, replica_id: str, report: ReplicaReport, *, now: float) -> None:
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
        """Return the candidates for one request, in the order of the ids. `num_cached_tokens` is by replica id."""
        states = {replica_id: self._replicas.get(replica_id) or ReplicaState() for replica_id in replica_ids}
        # A replica without a report is assumed to have the highest limit that any replica reports.
        max_requests = max([each.report.max_requests for each in states.values() if each.report], default=None)
        return [
            state.candidate(
                replica_id, now=now, max_requests=max_requests, is_background=is_background,
                num_cached_tokens=num_cached_tokens.get(replica_id, 0), holds_session=replica_id == session_replica_id,
            )
            for replica_id, state in states.items()
        ]  # fmt: skip

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget all other replicas and their requests."""
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
    """One placed request and its remaining work."""

    replica_id: str
    work: _Work  # the total for its replica, including this request
    num_prefill_tokens: int
    num_decode_tokens: int  # expected tokens still to generate, at least 1
    num_unused_tokens: int  # expected minus generated tokens; below 1 if the output is longer than expected
    is_background: bool


class ReplicaState:
    """The state of one replica from one ingress's view."""

    def __init__(self) -> None:
        self.report: ReplicaReport | None = None  # the last report
        self.is_suspect = False  # the replica's stream broke or fell silent
        self.ours = _Work()  # work from this ingress
        self._others = _Work()  # work from other ingresses, according to the last report
        self._reported_at = float("-inf")
        self._worked_at = float("-inf")  # time of the last report that counted any request

    def note(self, report: ReplicaReport, *, now: float, usual_decode_tokens: float) -> None:
        """Record a report. Each request of other ingresses is assumed to generate `usual_decode_tokens` more tokens."""
        ours = self.ours
        # The replica's own count of our requests is used, because some may have ended or may not have arrived yet.
        num_own = ours.num_requests if report.num_own is None else report.num_own
        num_requests = max(0, report.num_requests - num_own)
        num_background = min(num_requests, max(0, report.num_background - ours.num_background))
        num_prefill_tokens = report.num_prompt_tokens_of_others
        if num_prefill_tokens is None:  # a replica of an older version
            num_prefill_tokens = max(0, report.num_waiting_tokens - ours.num_prefill_tokens)
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
        """Return this replica as a candidate for one request. `max_requests` is its limit."""
        others, report = self._others, self.report
        is_known = (others.num_requests or others.num_prefill_tokens) and now - self._reported_at <= REPORT_LIFE_S
        work = self.ours + others if is_known else self.ours
        knows_speed = report is not None and now - self._worked_at <= SPEED_LIFE_S
        # Requests that run before this one. A foreground request preempts background requests if possible.
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
