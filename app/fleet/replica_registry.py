"""What one process knows of a model's replicas: which there are, how they are, and what was sent to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.request import Request
from app.engine.throughput import RetryTimes
from app.errors import Overloaded
from app.fleet.dispatch import (
    Candidate,
    Decision,
    DispatchPolicy,
    GroupChooser,
    Ledger,
    OutputLengths,
    PrefixIndex,
    ReplicaReport,
    RequestSize,
    Sessions,
    of_group,
)


@dataclass(slots=True)
class _Expected:
    """A request that is to be placed, or was."""

    request: Request
    avoid: frozenset[str]  # replicas that have just refused or lost it: only where there is no other
    size: RequestSize
    group: str
    charged_to: str = ""  # the replica on which the ledger has it
    decision: Decision | None = None
    trusted: frozenset[str] = frozenset()  # the replicas that were no suspects when the decision was made


class ReplicaRegistry:
    """The replicas that may be sent requests, and in which order. One for each model in a process, one event loop.

    A router asks for the order of each request and says where it went; readers of frames note what replicas report.
    """

    def __init__(
        self, policy: DispatchPolicy, groups: GroupChooser, *, block_size: int, clock: Callable[[], float]
    ) -> None:
        """`block_size`: tokens of a KV block, by which prompts share prefixes."""
        self._policy = policy
        self._groups = groups
        self._block_size = block_size
        self._clock = clock
        self._replica_ids: tuple[str, ...] = ()
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
        """The replicas that take requests now. One that leaves is not among them, though it ends what it has."""
        return self._replica_ids

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
        candidates = self._ledger.candidates(
            replica_ids,
            now=self._clock(),
            is_background=request.is_background,
            num_cached_tokens=cached,
            session_replica_id=self._sessions.replica_of(request.session) if request.session else None,
        )
        of_its_group = of_group(candidates, expected.group)
        trusted = [
            each
            for each in of_its_group
            if each.replica_id not in expected.avoid and not self.is_suspect(each.replica_id)
        ]
        expected.trusted = frozenset(each.replica_id for each in trusted)
        decision = self._policy.decide(trusted or of_its_group, expected.size)
        expected.decision = decision
        order = decision.order
        self._charge(expected, order[0], cached.get(order[0], 0))
        # All others come last: a suspect or another group's replica is better than none.
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
        """Whether a replica was no suspect when a request's order was made, and is one now."""
        expected = self._expected.get(request_id)
        return expected is not None and replica_id in expected.trusted and self.is_suspect(replica_id)

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

    def _check_room(self, *, is_background: bool) -> None:
        sound = [each for each in self._replica_ids if not self.is_suspect(each)]
        candidates = self._ledger.candidates(sound, now=self._clock(), is_background=is_background)
        if candidates and all(each.is_full for each in candidates):
            raise self.full(sum(each.num_requests for each in candidates))

    def full(self, num_requests: int) -> Overloaded:
        """The error for a caller when no replica can take its request: how many are served, and when to come back."""
        return Overloaded(
            f"all {len(self._replica_ids)} replicas are full ({num_requests:,} requests); try again shortly",
            retry_after_s=self._retry_times.next_after(
                self._clock(), ended_per_s=sum(report.ended_per_s for report in self.reports.values())
            ),
        )

    # ------------------------------------------------------------------ the replicas

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """These replicas take requests from now on, and no others."""
        self._replica_ids = tuple(replica_ids)
        self._ledger.keep_only(replica_ids)
        self._sessions.keep_only(replica_ids)
        if self._prefixes is not None:
            self._prefixes.keep_only(replica_ids)
        self.on_replicas(self.replica_ids)

    def note(self, replica_id: str, report: ReplicaReport) -> None:
        """Take in a replica's report; a replica that reports is trusted again."""
        if replica_id not in self._replica_ids:
            self._ledger.replica(replica_id).is_suspect = False
            return  # it is leaving
        if self._prefixes is None:
            self._prefixes = PrefixIndex(block_size=self._block_size, max_tokens=report.num_kv_tokens)
        self._ledger.note(replica_id, report, now=self._clock())

    def suspect(self, replica_id: str) -> None:
        """A replica's stream broke or is silent: it is tried last until it reports again."""
        self._ledger.replica(replica_id).is_suspect = True

    def is_suspect(self, replica_id: str) -> bool:
        """Whether a replica is not to be relied on now."""
        return self._ledger.replica(replica_id).is_suspect

    @property
    def suspects(self) -> frozenset[str]:
        """The replicas that are not to be relied on now."""
        return frozenset(each for each in self._replica_ids if self.is_suspect(each))

    @property
    def reports(self) -> dict[str, ReplicaReport]:
        """The last report of each replica that takes requests and has made one."""
        reports = {replica_id: self._ledger.replica(replica_id).report for replica_id in self._replica_ids}
        return {replica_id: report for replica_id, report in reports.items() if report is not None}

    def describe(self) -> list[dict[str, Any]]:
        """All replicas that take requests now, for people."""
        candidates = self._ledger.candidates(self._replica_ids, now=self._clock())
        return [self._described(each, self._ledger.replica(each.replica_id).report) for each in candidates]

    def _described(self, candidate: Candidate, report: ReplicaReport | None) -> dict[str, Any]:
        """One replica. None: it has not reported yet."""
        return {
            "replica": candidate.replica_id,
            "group": candidate.group,
            "is_suspect": self.is_suspect(candidate.replica_id),
            "is_full": candidate.is_full,
            "requests": candidate.num_requests,  # of this ingress, and of the others by the last report
            "background": report and report.num_background,
            "max_requests": report and report.max_requests,
            "max_running": report and report.max_running,
            "prefill_tokens": candidate.num_prefill_tokens,
            "decode_tokens": candidate.num_decode_tokens,
            "kv_tokens": report and report.num_kv_tokens,
            "tokens_per_s": candidate.tokens_per_s,
            "ended_per_s": report and report.ended_per_s,
            "step_age_s": report and report.step_age_s,
        }
