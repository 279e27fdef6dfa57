"""What one process knows of a model's replicas: which there are, how they are, and what was sent to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.request import Request
from app.engine.throughput import RetryTimes
from app.errors import Overloaded
from app.fleet.dispatch import (
    Decision,
    DispatchPolicy,
    GroupChooser,
    Ledger,
    OutputLengths,
    PrefixIndex,
    ReplicaLoad,
    ReplicaReport,
    RequestSize,
    Sessions,
    of_group,
)
from app.fleet.frame import Report


class ReplicaState(NamedTuple):
    """One replica as this process sees it, for people."""

    replica: str
    group: str
    is_suspect: bool  # it broke off or is silent
    is_full: bool
    requests: int  # ours, and those of others as far as it has reported them of late
    background: int | None  # of all of them
    max_requests: int | None  # None, as above and below: it has not been heard of
    max_running: int | None
    prefill_tokens: int  # of these requests, still to compute
    decode_tokens: int  # that they are expected to generate
    kv_tokens: int | None  # that fit into its KV memory
    tokens_per_s: float  # in steps of one size, the same on all replicas; 0: not known
    ended_per_s: float | None  # requests, of late
    step_age_s: float | None  # of the step that ran when it spoke last


@dataclass(slots=True)
class _Expected:
    """A request that is to be placed, or was."""

    request: Request
    avoid: frozenset[str]  # replicas that have just refused or lost it: only where there is no other
    size: RequestSize
    group: str
    charged_to: str = ""  # the replica on which the ledger has it
    decision: Decision | None = None
    trusted: frozenset[str] = frozenset()  # the replicas that nothing was wrong with when the decision was made


class Board:
    """The replicas that may be sent requests, and in which order. One for each model in a process, one event loop.

    Whoever routes asks for an order and says what became of it; whoever listens to the replicas notes what they report.
    """

    def __init__(
        self, policy: DispatchPolicy, groups: GroupChooser, *, block_size: int, clock: Callable[[], float]
    ) -> None:
        """`block_size`: tokens of a KV block, by which prompts share prefixes."""
        self._policy = policy
        self._groups = groups
        self._block_size = block_size
        self._clock = clock
        self._reports: dict[str, Report | None] = {}  # of every replica there is
        self._suspects: set[str] = set()
        self._expected: dict[str, _Expected] = {}  # by request id
        self._ledger = Ledger()
        self._lengths = OutputLengths()
        self._sessions = Sessions()
        self._prefixes: PrefixIndex | None = None  # from the first report on, which says how much KV memory there is
        self._retry_times = RetryTimes()
        self.on_replicas: Callable[[Collection[str]], None] = lambda replica_ids: None
        self.on_placed: Callable[[str, str], None] = lambda request_id, replica_id: None

    @property
    def replica_ids(self) -> Collection[str]:
        """The replicas that take requests now. One that leaves is none of them, though it ends what it has."""
        return self._reports.keys()

    # ------------------------------------------------------------------ one request

    def expect(self, request: Request, *, avoid: frozenset[str] = frozenset()) -> None:
        """A request is about to be placed. Raises Overloaded when every replica is known to be full."""
        sampling = request.sampling
        num_generated = len(request.generated_token_ids)
        size = RequestSize(
            num_prompt_tokens=len(request.prompt_token_ids) + num_generated,
            num_expected_tokens=max(1, self._lengths.expected_tokens(sampling.max_tokens) - num_generated),
        )
        group = self._groups.choose(request.session or request.request_id, asked=request.group, param="group")
        self._check_room(is_background=request.is_background)
        self._expected[request.request_id] = _Expected(request, avoid, size, group)

    def order(self, request_id: str, replica_ids: Sequence[str]) -> list[str]:
        """These replicas, most preferred first; the first is charged with the request until another is `placed`."""
        expected = self._expected.get(request_id)
        if expected is None or not replica_ids:
            return list(replica_ids)
        request = expected.request
        cached = (
            {} if self._prefixes is None else self._prefixes.match(request.prompt_token_ids, salt=request.cache_salt)
        )
        session_replica_id = self._sessions.replica_of(request.session) if request.session else None
        loads = self._loads(replica_ids, cached, session_replica_id, is_background=request.is_background)
        of_its_group = of_group(loads, expected.group)
        shunned = self._suspects | expected.avoid
        trusted = [load for load in of_its_group if load.replica_id not in shunned]
        expected.trusted = frozenset(load.replica_id for load in trusted)
        decision = self._policy.decide(trusted or of_its_group, expected.size)
        expected.decision = decision
        order = decision.order
        self._charge(expected, order[0], cached.get(order[0], 0))
        # Everybody else comes last: whoever is in trouble may still be better than nobody.
        return order + [replica_id for replica_id in replica_ids if replica_id not in order]

    def placed(self, request_id: str, replica_id: str) -> None:
        """A request was sent to a replica, which may still refuse it."""
        expected = self._expected.get(request_id)
        if expected is None:
            return
        if replica_id != expected.charged_to:  # the first in order had no room
            self._charge(expected, replica_id, 0)
        request = expected.request
        if request.session:
            self._sessions.place(request.session, replica_id)
        if self._prefixes is not None:
            self._prefixes.add(replica_id, request.prompt_token_ids, salt=request.cache_salt)
        self.on_placed(request_id, replica_id)

    def decision(self, request_id: str) -> Decision | None:
        """Why a request went where it did; None before it was placed."""
        expected = self._expected.get(request_id)
        return None if expected is None else expected.decision

    def has_become_suspect(self, request_id: str, replica_id: str) -> bool:
        """Whether a replica was fine when a request's order was made, and is not any more."""
        expected = self._expected.get(request_id)
        return expected is not None and replica_id in expected.trusted and replica_id in self._suspects

    def progress(self, request_id: str, num_tokens: int) -> None:
        """New tokens of a request have come."""
        self._ledger.progress(request_id, num_tokens)

    def end(self, request_id: str, *, num_generated: int | None = None) -> None:
        """A request has ended, in whatever way; `num_generated`: after so many tokens, by a stop or its limit."""
        expected = self._expected.pop(request_id, None)
        self._ledger.end(request_id)
        if num_generated is not None and expected is not None:
            self._lengths.learn(expected.request.sampling.max_tokens, num_generated)

    def _charge(self, expected: _Expected, replica_id: str, num_cached_tokens: int) -> None:
        # Booked before it is sent: requests placed in the same moment must see each other.
        expected.charged_to = replica_id
        self._ledger.place(
            expected.request.request_id,
            replica_id,
            num_prompt_tokens=max(1, expected.size.num_prompt_tokens - num_cached_tokens),
            num_expected_tokens=expected.size.num_expected_tokens,
            is_background=expected.request.is_background,
        )

    def _loads(
        self,
        replica_ids: Sequence[str],
        num_cached_tokens: dict[str, int],
        session_replica_id: str | None = None,
        *,
        is_background: bool = False,
    ) -> list[ReplicaLoad]:
        reports = {each: report for each in replica_ids if (report := self._reports.get(each)) is not None}
        return self._ledger.loads(
            replica_ids,
            now=self._clock(),
            max_requests=max((report.max_requests for report in reports.values()), default=None),
            is_background=is_background,
            num_cached_tokens=num_cached_tokens,
            groups={replica_id: report.group for replica_id, report in reports.items()},
            session_replica_id=session_replica_id,
        )

    def _check_room(self, *, is_background: bool) -> None:
        sound = [each for each in self._reports if each not in self._suspects]
        loads = self._loads(sound, {}, is_background=is_background)
        if loads and all(load.is_full for load in loads):
            raise self.full(sum(load.num_requests for load in loads))

    def full(self, num_requests: int) -> Overloaded:
        """What a caller hears when nobody can take its request: how many are served, and when to come back."""
        reports = [report for report in self._reports.values() if report is not None]
        return Overloaded(
            f"all {len(self._reports)} replicas are full ({num_requests:,} requests); try again shortly",
            retry_after_s=self._retry_times.next_after(
                self._clock(), ended_per_s=sum(report.ended_per_s for report in reports)
            ),
        )

    # ------------------------------------------------------------------ the replicas

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """These replicas take requests from now on, and no others."""
        self._reports = {replica_id: self._reports.get(replica_id) for replica_id in replica_ids}
        self._suspects.intersection_update(replica_ids)
        self._ledger.keep_only(replica_ids)
        self._sessions.keep_only(replica_ids)
        if self._prefixes is not None:
            self._prefixes.keep_only(replica_ids)
        self.on_replicas(self.replica_ids)

    def note(self, replica_id: str, report: Report) -> None:
        """What a replica says of itself; one that speaks is trusted again."""
        self._suspects.discard(replica_id)
        if replica_id not in self._reports:
            return  # it is leaving
        self._reports[replica_id] = report
        if self._prefixes is None:
            self._prefixes = PrefixIndex(block_size=self._block_size, max_tokens=report.num_kv_tokens)
        self._ledger.correct(
            replica_id,
            ReplicaReport(
                num_requests=report.num_requests,
                num_prefill_tokens=report.num_waiting_tokens,
                num_background=report.num_background,
                num_staying_background=report.num_staying_background,
                max_running=report.max_running,
                tokens_per_s=report.speed,
            ),
            now=self._clock(),
        )

    def suspect(self, replica_id: str) -> None:
        """A replica has broken off or fallen silent: it is asked last until it is heard of again."""
        self._suspects.add(replica_id)

    @property
    def reports(self) -> dict[str, Report]:
        """The last report of each replica that has made one."""
        return {replica_id: report for replica_id, report in self._reports.items() if report is not None}

    def states(self) -> list[ReplicaState]:
        """All replicas that take requests now."""
        return [self._state(load) for load in self._loads(list(self._reports), {})]

    def _state(self, load: ReplicaLoad) -> ReplicaState:
        report = self._reports[load.replica_id]
        return ReplicaState(
            replica=load.replica_id,
            group=load.group,
            is_suspect=load.replica_id in self._suspects,
            is_full=load.is_full,
            requests=load.num_requests,
            background=None if report is None else report.num_background,
            max_requests=None if report is None else report.max_requests,
            max_running=None if report is None else report.max_running,
            prefill_tokens=load.num_prefill_tokens,
            decode_tokens=load.num_decode_tokens,
            kv_tokens=None if report is None else report.num_kv_tokens,
            tokens_per_s=load.tokens_per_s,
            ended_per_s=None if report is None else report.ended_per_s,
            step_age_s=None if report is None else report.step_age_s,
        )

    @property
    def suspects(self) -> frozenset[str]:
        """Replicas that are not to be relied on now."""
        return frozenset(self._suspects)
