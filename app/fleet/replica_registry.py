"""One process's view of a model's replicas: their ids, their states, and the work sent to them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from app.engine.prefix import digests_of
from app.engine.request import Address, PrefixSource, Request
from app.errors import Overloaded, Unavailable
from app.fair import RetryTimes
from app.fleet.dispatch import (
    DECODE,
    PREFILL,
    Candidate,
    Decision,
    DispatchPolicy,
    GroupChooser,
    Ledger,
    PrefixChanges,
    PrefixIndex,
    ReplicaReport,
    RequestSize,
    Sessions,
    near_adapter,
    of_group,
)
from app.fleet.frames import DISPATCH_FIELDS, FIRST_REQUEST_FIELDS, REQUEST_FIELDS, used_fields
from app.output_lengths import OutputLengths

logger = logging.getLogger(__name__)

MIN_FETCHED_TOKENS = 256  # shorter prefixes are not fetched from another replica, because recomputing them is cheap
SMALL_FLEET = 24  # up to this size of the fleet, dispatch considers all replicas for each request
# In a larger fleet, dispatch considers SOME replicas first, and MANY if none of these can accept the request. Both sets
# also include up to NUM_NEAR replicas that cache the request's prefix and NUM_NEAR that have loaded its adapter.
SOME, MANY, NUM_NEAR = 12, 96, 8
FULL_LIFE_S = 1.0  # how long a large fleet counts as full before it is searched again


@dataclass(slots=True)
class _Full:
    """Remembers that all replicas were full, so that the next requests need not search a large fleet again."""

    until: float  # when this record expires
    num_requests: int  # requests on all replicas
    ended_per_s: float
    with_room: set[str]  # replicas that have had room since


class ReplicaRegistry:
    """Tracks the replicas that accept requests, and chooses one for each request. One per model and event loop.

    The fleet places its requests here, frame readers pass on the replicas' reports, and Serve's router sets the ids.
    """

    def __init__(
        self,
        policy: DispatchPolicy,
        groups: GroupChooser,
        *,
        block_size: int,
        clock: Callable[[], float],
        has_roles: bool = False,
    ) -> None:
        """`block_size` is in tokens. `has_roles` means that the groups are roles (prefill and decode)."""
        self._policy = policy
        self._groups = groups
        self.has_roles = has_roles
        self._clock = clock
        # The replicas that accept requests, sorted. A draining replica is not listed, although it still serves some.
        self.replica_ids: Sequence[str] = ()
        self._members: frozenset[str] = frozenset()  # `replica_ids` as a set
        self._ledger = Ledger()
        self.progress = self._ledger.progress
        self.num_prefill_tokens = self._ledger.num_prefill_tokens
        self._lengths = OutputLengths(by_median=False)  # means, because they are summed over requests
        self._sessions = Sessions()
        self._calls = Sessions(max_sessions=10_000)  # API calls with many requests that share a prefix
        self._block_size = block_size
        self._prefixes = PrefixIndex(block_size=block_size)
        self.addresses = self._prefixes.addresses
        self._has_kv_memory = False  # according to the last report
        # Maps each adapter's digest to the replicas that have loaded the adapter or were sent a request with it.
        self._with_adapter: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._retry_times = RetryTimes()
        self._weights = 0  # digest of the weights in the last report
        self._num_of_weights: Counter[int] = Counter()  # number of replicas by digest
        self._differing: frozenset[str] = frozenset()  # replicas whose different weights have been logged
        self._unknown_fields: dict[str, frozenset[str]] = {}  # unsupported request fields, by replica
        self.last_decision: Decision | None = None
        self._decisions: dict[str, Decision] = {}  # the last decision for each replica
        self._full: dict[bool, _Full] = {}  # by `is_background` of the requests
        self.on_replicas: Callable[[Collection[str]], None] = lambda replica_ids: None

    # ------------------------------------------------------------------ one request

    def place(self, request: Request, replica_ids: Sequence[str], *, avoid: Collection[str] = frozenset()) -> Decision:
        """Choose one of the sorted `replica_ids` for a request, and count the request as its work until `end`.

        Suspect replicas, and those in `avoid` that have just refused or lost the request, are chosen only as a last
        resort.

        Raises:
            InvalidRequest: the request names an unknown group.
            Overloaded: all replicas are full, or none has a free slot and the request may not wait for one.
            Unavailable: the request needs an adapter, and no replica supports adapters.
        """
        session = request.session
        group = self._groups.choose(
            session or request.call or request.request_id, asked=request.group, preset=request.preset
        )
        chain = digests_of(request.prompt_token_ids, salt=request.prefix_salt, block_size=self._block_size)
        cached = self._prefixes.match(chain)
        session_replica_id = self._sessions.replica_of(session) if session else None
        considered: Sequence[Candidate] = ()
        has_groups = bool(group) or self.has_roles
        for looked_at in self._candidate_sets(request, replica_ids, cached, has_groups=has_groups, avoid=avoid):
            candidates = self._ledger.candidates(
                looked_at if request.adapter is None else filter(self._adapts, looked_at),
                now=self._clock(),
                is_background=request.is_background,
                num_cached_tokens=cached,
                session_replica_id=session_replica_id,
            )
            if self.has_roles:
                group = self._role_of(request, candidates)
            considered = self._considered(
                candidates, group, avoid, request=request, are_all=len(looked_at) == len(replica_ids)
            )
            if considered:
                break
        if not considered:
            raise Unavailable("no replica that supports LoRA adapters is available; try again")
        num_generated, max_tokens = len(request.generated_token_ids), request.sampling.max_tokens
        expected = self._lengths.expected((max_tokens.bit_length(), None), at_most=max_tokens)
        size = RequestSize(
            num_prompt_tokens=len(request.prompt_token_ids) + num_generated,
            num_expected_tokens=max(1, (expected or max_tokens) - num_generated) if group != PREFILL else 1,
        )
        if request.adapter is not None:
            considered = near_adapter(considered, size, self._with_adapter.get(request.adapter.digest, {}))
        if request.call:
            considered = self._of_call(request.call, considered)
        decision = self.last_decision = self._policy.decide(considered, size)
        chosen = decision.candidates[0]
        self._charge(request, size, chosen)
        self._decisions[chosen.replica_id] = decision
        if self._has_kv_memory:
            self._prefixes.add(request.request_id, chosen.replica_id, chain)
        return decision

    def _candidate_sets(
        self,
        request: Request,
        replica_ids: Sequence[str],
        cached: Iterable[str],
        *,
        has_groups: bool,
        avoid: Collection[str],
    ) -> Iterator[Sequence[str]]:
        """Yield the replicas to choose from: all in a small fleet; in a large fleet some, then more, then all.

        The caller requests the next set if no replica in this set can accept the request. `cached` lists the replicas
        with the prefix, longest match first. If all replicas were full a moment ago, the first set contains only those
        that have had room since. If they cannot accept the request either, Overloaded is raised, except for requests
        that only some replicas can serve: for these, all replicas are searched.
        """
        if len(replica_ids) <= SMALL_FLEET:
            yield replica_ids
            return
        full = self._full.get(request.is_background)
        if full is not None and len(replica_ids) == len(self.replica_ids) and self._clock() < full.until:
            if full.with_room:
                yield sorted(full.with_room)
            if not (has_groups or avoid or request.no_queue or request.adapter is not None):
                full.with_room.clear()  # other requests have taken the room
                raise self._overloaded(self._all_full(full.num_requests), request, ended_per_s=full.ended_per_s)
            yield replica_ids
            return
        near = {*islice(cached, NUM_NEAR), self._sessions.replica_of(request.session)}
        near.add(self._calls.replica_of(request.call))
        if request.adapter is not None:
            near.update(islice(self._with_adapter.get(request.adapter.digest, ()), NUM_NEAR))
        there = {each for each in near if each is not None and _is_among(replica_ids, each)}
        for number in (MANY,) if has_groups else (SOME, MANY):
            yield list(there.union(self._policy.some(replica_ids, number)))
        yield replica_ids

    def _role_of(self, request: Request, candidates: Sequence[Candidate]) -> str:
        """Return the role that a request starts with: PREFILL for a long uncached prompt, otherwise DECODE."""
        if request.generated_token_ids or request.sampling.prompt_logprobs is not None:
            return DECODE
        num_cached = max((each.num_cached_tokens for each in candidates if each.group == DECODE), default=0)
        return PREFILL if len(request.prompt_token_ids) - num_cached >= MIN_FETCHED_TOKENS else DECODE

    def is_split(self, decision: Decision, replica_ids: Collection[str]) -> bool:
        """Whether a request with this decision will move to a decode replica after its prefill."""
        is_prompt = decision.candidates[0].group == PREFILL
        reports = (self._ledger.replica(each).report for each in replica_ids)
        return is_prompt and any(report is not None and report.group == DECODE for report in reports)

    def prefix_at(self, decision: Decision) -> PrefixSource | None:
        """Return the replica from which the chosen replica may fetch a prefix, or None if too little is cached."""
        chosen = decision.candidates[0]
        most = max(decision.candidates, key=lambda each: each.num_cached_tokens)
        address = self.addresses.get(most.replica_id)
        if address is None or most.num_cached_tokens - chosen.num_cached_tokens < MIN_FETCHED_TOKENS:
            return None
        return PrefixSource(Address._make(address), most.num_cached_tokens // self._block_size)

    def have_room(self, request: Request, num_generated: int, replica_ids: Collection[str]) -> set[str]:
        """Return the replicas with a free slot and at least 1.25 times the KV memory that the request will need."""
        max_tokens = request.sampling.max_tokens
        expected = self._lengths.expected((max_tokens.bit_length(), None), at_least=num_generated, at_most=max_tokens)
        num_tokens = len(request.prompt_token_ids) + max(num_generated + self._block_size, expected or max_tokens)
        reports = {each: self._ledger.replica(each).report for each in replica_ids}
        return {
            each
            for each, report in reports.items()
            if report is not None
            and report.num_requests < report.max_running
            and report.num_free_kv_tokens >= 1.25 * num_tokens
        }

    def _considered(
        self, candidates: Sequence[Candidate], group: str, avoid: Collection[str], *, request: Request, are_all: bool
    ) -> Sequence[Candidate]:
        """Return the candidates for the policy, if possible trusted members of the group with room.

        `are_all` means that the candidates are all replicas. Otherwise the result is empty if none can accept the
        request. Raises Overloaded if all replicas are full, or if none has a free slot and the request may not wait.
        """
        if not are_all:
            there = [each for each in candidates if not each.is_suspect and (not group or each.group == group)]
            taking = [
                each for each in there
                if not (each.is_full or each.replica_id in avoid) and (each.has_slot or not request.no_queue)
            ]  # fmt: skip
            # Full replicas with the prefix are included because the chosen replica may fetch it from them. No policy
            # prefers a full replica.
            return [*taking, *(each for each in there if each.is_full and each.num_cached_tokens)] if taking else []
        trusted = [each for each in candidates if not each.is_suspect]
        full = [each for each in trusted if each.is_full]
        if trusted and len(full) == len(trusted):
            num_requests = sum(each.num_requests for each in full)
            ended_per_s = self._ended_per_s
            if request.adapter is None and len(candidates) == len(self.replica_ids):
                until = self._clock() + FULL_LIFE_S
                self._full[request.is_background] = _Full(until, num_requests, ended_per_s, set())
            raise self._overloaded(self._all_full(num_requests), request, ended_per_s=ended_per_s)
        of_its_group = of_group(candidates, group)
        trusted = [each for each in of_its_group if not (each.is_suspect or each.replica_id in avoid)]
        if not request.no_queue:
            return trusted or of_its_group
        with_slot = [each for each in trusted if each.has_slot]
        if not with_slot:
            problem = f"none of the {len(candidates)} replicas has a free slot, and this request may not be queued"
            raise self._overloaded(problem, request, ended_per_s=self._ended_per_s)
        return with_slot

    def _charge(self, request: Request, size: RequestSize, chosen: Candidate) -> None:
        """Count the request as its replica's work before it is sent, so that the next placement considers it."""
        self._ledger.place(
            request.request_id,
            chosen.replica_id,
            num_prompt_tokens=max(1, size.num_prompt_tokens - chosen.num_cached_tokens),
            num_expected_tokens=size.num_expected_tokens,
            is_background=request.is_background,
        )
        if request.session:
            self._sessions.place(request.session, chosen.replica_id)
        if request.call:
            self._calls.place(request.call, chosen.replica_id)
        if request.adapter is not None:
            self._with_adapter[request.adapter.digest][chosen.replica_id] = None

    def _of_call(self, call: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the replica that has computed a call's shared prefix, or all candidates if that replica is full.

        The load is ignored, because any other replica would have to recompute the prefix.
        """
        replica_id = self._calls.replica_of(call)
        return [each for each in candidates if each.replica_id == replica_id and not each.is_full] or candidates

    def _adapts(self, replica_id: str) -> bool:
        """Whether a replica supports adapters. Replicas of a version that does not would ignore a request's adapter."""
        report = self._ledger.replica(replica_id).report
        return report is None or report.adapters is not None

    def end(self, request_id: str, *, max_tokens: int = 0, num_generated: int | None = None) -> None:
        """Stop counting a request. `num_generated` is the length of its output if the output was completed."""
        replica_id = self._ledger.end(request_id)
        if self._full and replica_id in self._members:
            self._note_room(replica_id)
        self._prefixes.end(request_id)
        if num_generated is not None:
            self._lengths.learn((max_tokens.bit_length(), None), num_generated)  # for similar limits and overall

    def _note_room(self, replica_id: str) -> None:
        """Record that a replica may have room again, after all replicas were full."""
        for is_background, full in list(self._full.items()):
            [candidate] = self._ledger.candidates([replica_id], now=self._clock(), is_background=is_background)
            if not (candidate.is_full or candidate.is_suspect):
                full.with_room.add(replica_id)
            if len(full.with_room) >= SOME or self._clock() >= full.until:
                del self._full[is_background]

    def _all_full(self, num_requests: int) -> str:
        return f"all {len(self.replica_ids)} replicas are full ({num_requests:,} requests)"

    @property
    def _ended_per_s(self) -> float:
        return sum(report.ended_per_s for report in self.reports.values())

    def _overloaded(self, problem: str, request: Request, *, ended_per_s: float) -> Overloaded:
        """Return the error for a request that no replica can accept. It carries the time to wait before a retry."""
        return Overloaded(
            f"{problem}; try again shortly",
            retry_after_s=self._retry_times.next_after(
                self._clock(),
                ended_per_s=ended_per_s,
                tenant=request.tenant,
                delays_others=request.may_wait,
            ),
        )

    # ------------------------------------------------------------------ the replicas

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """Set the replicas that accept requests from now on. Removes the records of all other replicas."""
        self.replica_ids, self._members = tuple(sorted(replica_ids)), frozenset(replica_ids)
        self._ledger.keep_only(self._members)
        self._full.clear()
        for digest, known in list(self._with_adapter.items()):
            for gone in known.keys() - self._members:
                del known[gone]
            if not known:
                del self._with_adapter[digest]
        self._decisions = {each: self._decisions[each] for each in self._members & self._decisions.keys()}
        self._prefixes.keep_only(self._members)
        self._unknown_fields = {key: each for key, each in self._unknown_fields.items() if key in self._members}
        self._num_of_weights = Counter(report.weights for report in self.reports.values())
        self.on_replicas(self.replica_ids)

    def note(self, replica_id: str, report: ReplicaReport, prefixes: PrefixChanges | None = None) -> None:
        """Record a report and the changes to the replica's cached prefixes. The replica is no longer suspect."""
        if replica_id not in self._members:  # the replica is draining
            self._ledger.replica(replica_id).is_suspect = False
            return
        if prefixes is not None:
            self._prefixes.note(replica_id, prefixes)
        self._has_kv_memory = report.num_kv_tokens > 0
        before = self._ledger.replica(replica_id).report
        if report.adapters != (before and before.adapters):
            self._note_adapters(replica_id, set((before and before.adapters) or ()), set(report.adapters or ()))
        if before is None or before.weights != report.weights:
            self._num_of_weights[report.weights] += 1
            if before is not None:
                self._num_of_weights[before.weights] -= 1
        self._ledger.note(replica_id, report, now=self._clock())
        if self._full:
            self._note_room(replica_id)
        if report.weights != self._weights:
            self._note_weights(replica_id, report.weights)

    def _note_adapters(self, replica_id: str, before: set[str], now: set[str]) -> None:
        for digest in now - before:
            self._with_adapter[digest][replica_id] = None
        for digest in before - now:
            self._with_adapter[digest].pop(replica_id, None)
            if not self._with_adapter[digest]:
                del self._with_adapter[digest]

    def note_fields(self, replica_id: str, known: Collection[str]) -> None:
        """Record the request fields that a replica supports. `known` is empty if its version does not report them."""
        unknown = REQUEST_FIELDS.difference(known or FIRST_REQUEST_FIELDS, DISPATCH_FIELDS)
        self._unknown_fields.pop(replica_id, None)
        if unknown:
            self._unknown_fields[replica_id] = unknown

    def unknown_field(self, replica_id: str, request: Request) -> str | None:
        """Return a field of the request that a replica does not support, or None if it supports all of them."""
        unknown = self._unknown_fields.get(replica_id)
        if unknown is None:  # the usual case: the request's fields need not be checked
            return None
        return next((name for name in used_fields(request) if name in unknown), None)

    def accepts_requests(self, replica_id: str) -> bool:
        """Whether a replica accepts new requests."""
        return replica_id in self._members

    @property
    def some_lack_fields(self) -> bool:
        """Whether any replica does not support all request fields."""
        return bool(self._unknown_fields)

    def some_differ_from(self, weights: int) -> bool:
        """Whether any replica has reported different weights. `weights` is a digest."""
        return sum(self._num_of_weights.values()) > self._num_of_weights[0] + self._num_of_weights[weights]

    def has_weights(self, replica_id: str, weights: int) -> bool:
        """Whether a replica can resume a request that ran with these weights. True if the replica's are unknown (0)."""
        report = self._ledger.replica(replica_id).report
        return report is None or report.weights in (0, weights)

    def sends_views(self, replica_id: str) -> bool:
        """Whether a replica understands WatchEngine."""
        report = self._ledger.replica(replica_id).report
        return report is not None and report.sends_views

    def sends_metrics(self, replica_id: str) -> bool:
        """Whether a replica understands AskMetrics."""
        report = self._ledger.replica(replica_id).report
        return report is not None and report.sends_metrics

    def _note_weights(self, replica_id: str, weights: int) -> None:
        if self._weights and weights and replica_id not in self._differing:
            self._differing = self._differing.intersection(self.replica_ids) | {replica_id}
            logger.warning(
                "replica %s has loaded weights %08x, but the previous one loaded %08x, so their answers differ; unless "
                "an update is running, set engine.model.revision to a commit, or copy the same files to every machine",
                replica_id, weights, self._weights,
            )  # fmt: skip
        self._weights = weights or self._weights

    def suspect(self, replica_id: str) -> None:
        """Mark a replica after its stream broke or fell silent. It is chosen last until it reports again."""
        self._ledger.replica(replica_id).is_suspect = True

    def is_suspect(self, replica_id: str) -> bool:
        """Whether a replica's stream broke or fell silent, and the replica has not reported since then."""
        return self._ledger.replica(replica_id).is_suspect

    @property
    def reports(self) -> dict[str, ReplicaReport]:
        """The last report of each replica that accepts requests. Replicas that have not reported are omitted."""
        reports = {replica_id: self._ledger.replica(replica_id).report for replica_id in self.replica_ids}
        return {replica_id: report for replica_id, report in reports.items() if report is not None}

    def describe(self) -> list[dict[str, Any]]:
        """Return a readable description of each replica that accepts requests."""
        candidates = self._ledger.candidates(self.replica_ids, now=self._clock())
        return [self._described(each, self._ledger.replica(each.replica_id).report) for each in candidates]

    def _described(self, candidate: Candidate, report: ReplicaReport | None) -> dict[str, Any]:
        decision = self._decisions.get(candidate.replica_id)
        return {
            "replica": candidate.replica_id,
            "group": candidate.group,
            "is_suspect": self.is_suspect(candidate.replica_id),
            "is_full": candidate.is_full,
            "requests": candidate.num_requests,  # from this ingress, plus other ingresses' from the last report
            "background": report and report.num_background,
            "max_requests": report and report.max_requests,
            "max_running": report and report.max_running,
            "prefill_tokens": candidate.num_prefill_tokens,
            "decode_tokens": candidate.num_decode_tokens,
            "kv_tokens": report and report.num_kv_tokens,
            "tokens_per_s": candidate.tokens_per_s,
            "ended_per_s": report and report.ended_per_s,
            "step_age_s": report and report.step_age_s,
            "sleep": report and str(report.state),
            "wake_s": report and report.wake_s,
            "weights": report and f"{report.weights:08x}",
            "backend": report and report.backend,
            "backends_failed": report and report.backends_failed,
            "last_dispatch": decision and f"{decision.rule}: {decision.scoring.explain(decision.candidates[0])}",
        }


def _is_among(replica_ids: Sequence[str], replica_id: str) -> bool:
    at = bisect_left(replica_ids, replica_id)
    return at < len(replica_ids) and replica_ids[at] == replica_id
