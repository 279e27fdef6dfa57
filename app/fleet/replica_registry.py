"""What one process knows of a model's replicas: which there are, how they are, and what was sent to them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from app.engine.block_pool import digests_of
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

MIN_FETCHED_TOKENS = 256  # from another replica: fewer are computed in a few steps
SMALL_FLEET = 24  # up to so many replicas, each request looks at all
# In a larger fleet a request looks at so many replicas first; at so many if none of the first takes the request; and in
# any case at so many that have cached its prefix, and that have loaded its adapter.
SOME, MANY, NUM_NEAR = 12, 96, 8
FULL_LIFE_S = 1.0  # after this a refusal looks at all replicas of a large fleet again: reports may have become too old


@dataclass(slots=True)
class _Full:
    """All replicas were full for a foreground or a background request."""

    until: float
    num_requests: int  # of all replicas
    ended_per_s: float
    with_room: set[str]  # the replicas that have had room since


class ReplicaRegistry:
    """The replicas that may be sent requests, and which one gets a request. One for each model and event loop.

    A fleet places its requests; readers of frames note what replicas report; Serve's router says which replicas exist.
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
        """`block_size`: tokens of a KV block, by which prompts share prefixes. `has_roles`: its groups are roles."""
        self._policy = policy
        self._groups = groups
        self.has_roles = has_roles
        self._clock = clock
        # The replicas that take requests now, sorted. One that leaves is not among them, though it ends what it has.
        self.replica_ids: Sequence[str] = ()
        self._members: frozenset[str] = frozenset()  # the same
        self._ledger = Ledger()
        self.progress = self._ledger.progress  # new tokens of a request have come
        self.num_prefill_tokens = self._ledger.num_prefill_tokens
        self._lengths = OutputLengths(by_median=False)  # work is added up
        self._sessions = Sessions()
        self._calls = Sessions(max_sessions=10_000)  # of many requests that begin alike
        self._block_size = block_size
        self._prefixes = PrefixIndex(block_size=block_size)
        self.addresses = self._prefixes.addresses
        self._has_kv_memory = False  # as far as is known
        # The replicas that have loaded an adapter or were sent a request with one, by the digest of the adapter.
        self._with_adapter: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._retry_times = RetryTimes()
        self._weights = 0  # the digest that a replica has reported last
        self._num_of_weights: Counter[int] = Counter()  # how many replicas have each digest
        self._differing: frozenset[str] = frozenset()  # replicas that were told of
        self._unknown_fields: dict[str, frozenset[str]] = {}  # of requests, by replica that does not know them all
        self.last_decision: Decision | None = None
        self._decisions: dict[str, Decision] = {}  # the last one for each replica
        self._full: dict[bool, _Full] = {}  # by whether a request is a background one
        self.on_replicas: Callable[[Collection[str]], None] = lambda replica_ids: None

    # ------------------------------------------------------------------ one request

    def place(self, request: Request, replica_ids: Sequence[str], *, avoid: Collection[str] = frozenset()) -> Decision:
        """Which of these replicas gets a request; it is charged with the request until `end`. The ids are sorted.

        Suspects and those to `avoid`, which have just refused or lost it, are taken only where there is no other.

        Raises:
            InvalidRequest: there is no such group.
            Overloaded: every replica is known to be full, or has no slot for a request that does not wait for one.
            Unavailable: no replica computes with adapters, and the request has one.
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
        for looked_at in self._looked_at(request, replica_ids, cached, has_groups=has_groups, avoid=avoid):
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
            raise Unavailable("no replica computes with adapters now; try again")
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

    def _looked_at(
        self,
        request: Request,
        replica_ids: Sequence[str],
        cached: Iterable[str],
        *,
        has_groups: bool,
        avoid: Collection[str],
    ) -> Iterator[Sequence[str]]:
        """The replicas to choose from: in a small fleet all; in a large fleet some, then more, then all.

        The caller asks for more if none of these takes the request. cached: replicas with the prefix, the best first.
        Where all were full a moment ago, those with room since. Raises Overloaded when there is none.
        """
        if len(replica_ids) <= SMALL_FLEET:
            yield replica_ids
            return
        full = self._full.get(request.is_background)
        if full is not None and len(replica_ids) == len(self.replica_ids) and self._clock() < full.until:
            if full.with_room:
                yield sorted(full.with_room)
            if not (has_groups or avoid or request.no_queue or request.adapter is not None):
                full.with_room.clear()  # others have taken it
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
        """Which replicas compute a request first: a long prompt that is not cached goes to those for prompts."""
        if request.generated_token_ids or request.sampling.prompt_logprobs is not None:
            return DECODE
        num_cached = max((each.num_cached_tokens for each in candidates if each.group == DECODE), default=0)
        return PREFILL if len(request.prompt_token_ids) - num_cached >= MIN_FETCHED_TOKENS else DECODE

    def is_split(self, decision: Decision, replica_ids: Collection[str]) -> bool:
        """Whether a request that was placed like this goes on at another of these replicas after its prompt."""
        is_prompt = decision.candidates[0].group == PREFILL
        reports = (self._ledger.replica(each).report for each in replica_ids)
        return is_prompt and any(report is not None and report.group == DECODE for report in reports)

    def prefix_at(self, decision: Decision) -> PrefixSource | None:
        """Where the chosen replica may fetch the beginning of the prompt: another has much more of it."""
        chosen = decision.candidates[0]
        most = max(decision.candidates, key=lambda each: each.num_cached_tokens)
        address = self.addresses.get(most.replica_id)
        if address is None or most.num_cached_tokens - chosen.num_cached_tokens < MIN_FETCHED_TOKENS:
            return None
        return PrefixSource(Address._make(address), most.num_cached_tokens // self._block_size)

    def have_room(self, request: Request, num_generated: int, replica_ids: Collection[str]) -> set[str]:
        """The replicas that would compute such a request at once, to its end and with a quarter of its memory left."""
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
        """The best of a group. Raises Overloaded.

        are_all: there are no other replicas. Else the result is empty if none of these takes the request.
        """
        if not are_all:
            there = [each for each in candidates if not each.is_suspect and (not group or each.group == group)]
            taking = [
                each for each in there
                if not (each.is_full or each.replica_id in avoid) and (each.has_slot or not request.no_queue)
            ]  # fmt: skip
            # From a full replica the chosen one may fetch the beginning of the prompt. No policy chooses a full one.
            return [*taking, *(each for each in there if each.is_full and each.num_cached_tokens)] if taking else []
        sound = [each for each in candidates if not each.is_suspect]
        full = [each for each in sound if each.is_full]
        if sound and len(full) == len(sound):
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
            problem = f"none of {len(candidates)} replicas has a free slot, and this is not to wait"
            raise self._overloaded(problem, request, ended_per_s=self._ended_per_s)
        return with_slot

    def _charge(self, request: Request, size: RequestSize, chosen: Candidate) -> None:
        """Before it is sent: requests placed in the same moment must see each other."""
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
        """The replica that has computed what the requests of a call begin with; all of them where it takes no more.

        Its load does not count: another replica would have to compute the beginning again.
        """
        replica_id = self._calls.replica_of(call)
        return [each for each in candidates if each.replica_id == replica_id and not each.is_full] or candidates

    def _adapts(self, replica_id: str) -> bool:
        """False for a replica of a version that knows no adapters: it would answer as if the request had none."""
        report = self._ledger.replica(replica_id).report
        return report is None or report.adapters is not None

    def end(self, request_id: str, *, max_tokens: int = 0, num_generated: int | None = None) -> None:
        """A request has ended, in whatever way; `num_generated`: after so many tokens of its limit, or by a stop."""
        replica_id = self._ledger.end(request_id)
        if self._full and replica_id in self._members:
            self._note_room(replica_id)
        self._prefixes.end(request_id)
        if num_generated is not None:
            self._lengths.learn((max_tokens.bit_length(), None), num_generated)  # of like limits, and of all

    def _note_room(self, replica_id: str) -> None:
        """A replica may have room again, where all were full."""
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
        """The error for a caller when no replica can take its request: why, and when to come back."""
        return Overloaded(
            f"{problem}; try again shortly",
            retry_after_s=self._retry_times.next_after(
                self._clock(),
                ended_per_s=ended_per_s,
                tenant=request.tenant,
                takes_place=request.may_wait,
            ),
        )

    # ------------------------------------------------------------------ the replicas

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """These replicas take requests from now on, and no others."""
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
        """Take in a replica's report; a replica that reports is trusted again. prefixes: what is new of them."""
        if replica_id not in self._members:
            self._ledger.replica(replica_id).is_suspect = False
            return  # it is leaving
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
        """A replica has said which fields of requests it knows. None: it is of a version that does not say so."""
        unknown = REQUEST_FIELDS.difference(known or FIRST_REQUEST_FIELDS, DISPATCH_FIELDS)
        self._unknown_fields.pop(replica_id, None)
        if unknown:
            self._unknown_fields[replica_id] = unknown

    def unknown_field(self, replica_id: str, request: Request) -> str | None:
        """A field of the request that a replica of another version would ignore; None: it knows them all."""
        unknown = self._unknown_fields.get(replica_id)
        if unknown is None:  # as nearly always: the fields of a request are not looked at
            return None
        return next((name for name in used_fields(request) if name in unknown), None)

    def takes_requests(self, replica_id: str) -> bool:
        """Whether a replica is one of `replica_ids`."""
        return replica_id in self._members

    @property
    def some_lack_fields(self) -> bool:
        """Whether a replica does not know all fields of requests."""
        return bool(self._unknown_fields)

    def some_differ_from(self, weights: int) -> bool:
        """Whether a replica may have other weights than these."""
        return sum(self._num_of_weights.values()) > self._num_of_weights[0] + self._num_of_weights[weights]

    def has_weights(self, replica_id: str, weights: int) -> bool:
        """Whether a replica can go on with tokens of these weights, as far as both are known (0: not)."""
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
                "replica %s has other weights (%08x) than the one before (%08x): answers differ between them; outside "
                "of an update set engine.model.revision to a commit, or copy the same files to every machine",
                replica_id, weights, self._weights,
            )  # fmt: skip
        self._weights = weights or self._weights

    def suspect(self, replica_id: str) -> None:
        """A replica's stream broke or is silent: it is tried last until it reports again."""
        self._ledger.replica(replica_id).is_suspect = True

    def is_suspect(self, replica_id: str) -> bool:
        """Whether a replica is not to be relied on now."""
        return self._ledger.replica(replica_id).is_suspect

    @property
    def reports(self) -> dict[str, ReplicaReport]:
        """The last report of each replica that takes requests and has made one."""
        reports = {replica_id: self._ledger.replica(replica_id).report for replica_id in self.replica_ids}
        return {replica_id: report for replica_id, report in reports.items() if report is not None}

    def describe(self) -> list[dict[str, Any]]:
        """All replicas that take requests now, for people."""
        candidates = self._ledger.candidates(self.replica_ids, now=self._clock())
        return [self._described(each, self._ledger.replica(each.replica_id).report) for each in candidates]

    def _described(self, candidate: Candidate, report: ReplicaReport | None) -> dict[str, Any]:
        """One replica. None: it has not reported yet."""
        decision = self._decisions.get(candidate.replica_id)
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
