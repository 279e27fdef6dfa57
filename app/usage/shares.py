"""How the processes that send requests share the limits and budgets of a key: each has a part, by what it is asked for.

A process goes on with its part while it has no answer, so no request waits for an answer, and the owner may die. What
is given to one process was taken from another before: all parts together are never more than the limit. Of a budget the
ledger's total, what running requests have reserved, and all that processes may still reserve are never more than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import NamedTuple

from app.usage.records import (
    BUDGETS,
    PLACES,
    ROUNDING,
    BudgetTotals,
    LimitId,
    LimitUse,
    Share,
    UsageAnswer,
    UsageReport,
)

LEASE_S = 90.0  # of silence: then the owner gives the part of a process to others, and it falls back to its first one
SETTLING_S = 3.0  # so long a new owner only listens
_INDIFFERENT = 0.1  # so much more than its part a process keeps of PLACES
# The weight of the process of batches. It needs some of a budget in advance, because a stored answer may arrive before
# it has asked for any.
_SLACK_OF_BUDGET = 0.1
_REFUSED_S = 5.0  # so long what was refused is expected again
_DEMAND_S = 2.0  # the time constant of what is asked for
_WAITING_S = 1.0  # a request does not wait longer for a place
_MOVING_S = 10.0  # after which nothing is left of what was asked for
_AHEAD_S = 5.0  # a process that has what is asked of it for so long does without what others have
_NOTHING = BudgetTotals()


@dataclass(slots=True)
class _Process:
    heard_at: float
    passed_s: float = 0.0  # from the report before
    reserved: dict[str, BudgetTotals] = field(default_factory=dict)  # by key


@dataclass(slots=True)
class _Member:
    process: _Process
    reported_at: float
    # Its weight when the part that no process asks for is divided. 0: it gets none of that part, and comes after the
    # others.
    slack: float
    use: LimitUse
    demand: float = 0.0  # in a minute, when it was reported; of PLACES at once
    refused: float = 0.0
    refused_at: float = 0.0

    @property
    def silent_s(self) -> float:
        """So long the process has reported, but nothing of this limit: nothing was asked of it."""
        return self.process.heard_at - self.reported_at

    def held(self, most: float) -> float:
        """What its bucket has: one that nothing is asked of fills up."""
        held, silent_s, full = self.use.held, self.silent_s, self.use.share * most
        return held if not silent_s or held >= full else min(full, held + silent_s * full / 60)

    def asks(self, *, at_least: float = 0.0) -> float:
        """What is asked of it now, in a minute; of PLACES at once, and `at_least` those that are taken."""
        demand, silent_s = self.demand, self.silent_s
        if demand and silent_s:
            demand *= math.exp(-silent_s / _DEMAND_S)
        return demand if demand > at_least else at_least


@dataclass(slots=True)
class _Limit:
    members: dict[str, _Member] = field(default_factory=dict)  # by process
    spare: float | None = None  # what no process has of the bucket; None: not known yet
    counted_at: float = 0.0
    # A process had less than its part within the last _MOVING_S: all are asked for what they have.
    moves_until: float = 0.0


class Shares:
    """The parts of all limits. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None  # with the first report
        self._is_settled = False
        self._processes: dict[str, _Process] = {}  # those that live
        self._num_expected = 0
        self._limits: dict[LimitId, _Limit] = {}
        self._moving: dict[LimitId, _Limit] = {}

    def answer(self, report: UsageReport, answer: UsageAnswer) -> UsageAnswer:
        """The ledger's answer to a report, with its parts of limits and what others have reserved."""
        now, is_new = self._clock(), report.process not in self._processes
        process = self._hear(report, now)
        shares = self._exchange(report, process, answer.totals, now)
        others = [each.reserved for each in self._processes.values() if each is not process]
        totals = {
            key: reduce(BudgetTotals.plus, (each[key] for each in others if key in each), of)
            for key, of in answer.totals.items()
        }
        return replace(
            answer,
            totals=totals,
            shares=shares,
            num_processes=len(self._processes),
            wants_all=not self._is_settled or (is_new and not report.has_all_limits),
            asks_for=self._moving_keys(report.process, now),
        )

    def _hear(self, report: UsageReport, now: float) -> _Process:
        """A process lives. One that has been silent for too long does not."""
        process = self._processes.setdefault(report.process, _Process(now))
        process.passed_s, process.heard_at = now - process.heard_at, now
        if report.has_all_limits:
            process.reserved.clear()
        process.reserved.update(report.reserved)
        for silent in [name for name, each in self._processes.items() if now - each.heard_at > LEASE_S]:
            del self._processes[silent]
            self._leave(silent, self._limits)
        return process

    def _exchange(
        self, report: UsageReport, process: _Process, used: Mapping[str, BudgetTotals], now: float
    ) -> dict[LimitId, Share]:
        """The parts of a process; none while others may have parts that are not known here.

        `used`: what the ledger has of each key with budgets.
        """
        name, uses = report.process, report.limits
        if self._began_at is None:
            self._began_at = now
        self._num_expected = max(self._num_expected, report.num_processes)
        if report.has_all_limits:
            # Of keys that were removed or changed; all, where another process reports what this one has left.
            self._leave(name, self._limits.keys() - uses.keys())
        for limit_id, use in uses.items():
            limit = self._limits.setdefault(limit_id, _Limit(counted_at=now))
            slack = 1.0 if report.takes_slack else _SLACK_OF_BUDGET if limit_id.what in BUDGETS else 0.0
            if (member := limit.members.get(name)) is None:
                member = limit.members[name] = _Member(process, now, slack, use)
            _note(member, use, limit_id, now)
        age_s, has_heard_all = now - self._began_at, len(self._processes) >= self._num_expected
        self._is_settled |= age_s >= SETTLING_S and (has_heard_all or age_s >= LEASE_S)
        return {limit_id: self._share(limit_id, name, now, used) for limit_id in uses} if self._is_settled else {}

    def _leave(self, process: str, limit_ids: Collection[LimitId]) -> None:
        for limit_id in list(limit_ids):
            limit = self._limits[limit_id]
            if limit.members.pop(process, None) is not None:
                self._move(limit_id, limit)
            if not limit.members:
                del self._limits[limit_id]

    def _move(self, limit_id: LimitId, limit: _Limit) -> None:
        """The parts of a limit are to change. Without changes of its own no process would tell what it has."""
        limit.moves_until = self._clock() + _MOVING_S
        self._moving[limit_id] = limit

    def _moving_keys(self, process: str, now: float) -> set[str]:
        """Keys with such limits, as far as a process has them."""
        for limit_id in [each for each, limit in self._moving.items() if now > limit.moves_until]:
            del self._moving[limit_id]
        return {limit_id.key for limit_id, limit in self._moving.items() if process in limit.members}

    def _share(self, limit_id: LimitId, process: str, now: float, used: Mapping[str, BudgetTotals]) -> Share:
        limit = self._limits[limit_id]
        if limit_id.what == PLACES:
            share, is_short = _share_of_places(limit.members, process, int(limit_id.limit), now)
        elif limit_id.what in BUDGETS:
            share, is_short = _share_of_budget(limit.members, process, limit_id.limit - self._spent(limit_id, used))
        else:
            share, is_short = _share_of_bucket(limit, process, limit_id.limit, now)
        if is_short:
            self._move(limit_id, limit)
        return share

    def _spent(self, limit_id: LimitId, used: Mapping[str, BudgetTotals]) -> float:
        """Of a budget what is used, and what running requests have reserved."""
        key, name = limit_id.key, BUDGETS[limit_id.what]
        parts = (used.get(key, _NOTHING), *(each.reserved.get(key, _NOTHING) for each in self._processes.values()))
        return sum(float(getattr(part, name)) for part in parts)


def _note(member: _Member, use: LimitUse, limit_id: LimitId, now: float) -> None:
    if limit_id.what == PLACES:
        member.demand = max(use.wanted, member.asks())
    else:
        passed_s = max(member.process.passed_s, 1e-3)
        # What is given back was not wanted after all.
        wanted = (1 - math.exp(-passed_s / _DEMAND_S)) * use.wanted * 60 / passed_s
        member.demand = member.asks() + wanted
    if use.refused or now - member.refused_at > _REFUSED_S:
        member.refused, member.refused_at = use.refused, now
    member.use, member.reported_at = use, now


def _share_of_bucket(limit: _Limit, process: str, most: float, now: float) -> tuple[Share, bool]:
    """The part, and whether it is less than what should be there, because other processes have the rest."""
    members = limit.members
    member, held = members[process], sum(each.held(most) for each in members.values())
    if limit.spare is None:  # no process has a part yet; or an owner before this gave them, and what it kept is lost
        limit.spare = 0.0 if any(each.use.share for each in members.values()) else float(most)
        limit.counted_at = now
    of_others = sum(each.use.share for name, each in members.items() if name != process)
    unshared = max(0.0, 1 - of_others - member.use.share)
    limit.spare += unshared * most * (now - limit.counted_at) / 60
    limit.spare = min(limit.spare, max(0.0, most - held))
    limit.counted_at = now
    demand = _Demand.of(members)
    share = max(0.0, min(demand.part(member, most), 1 - of_others))
    target = _should_have(member, share, held, limit.spare, most)
    given = min(target - member.use.held, limit.spare)
    limit.spare -= given
    elsewhere = max(0.0, held - member.use.held + limit.spare)
    member.use = member.use._replace(share=share, held=member.use.held + given)
    return Share(share, given, elsewhere), _is_short(member, share, demand.slack_part(member, most))


def _share_of_budget(members: Mapping[str, _Member], process: str, left: float) -> tuple[Share, bool]:
    """`left`: of the budget, what is neither used nor reserved by running requests. See `_share_of_bucket`."""
    member, held = members[process], sum(each.use.held for each in members.values())
    demand = _Demand.of(members)
    share = demand.part(member, left) if left > 0 else 0.0
    target = _should_have(member, share, held, left - held, left)
    given = min(target - member.use.held, left - held)
    # What is taken from a process it may have reserved meanwhile: it goes to others once the next report shows it.
    member.use = member.use._replace(held=member.use.held + max(0.0, given))
    return Share(share, given), left > 0 and _is_short(member, member.use.held / left, demand.slack_part(member, left))


def _should_have(member: _Member, share: float, held: float, spare: float, most: float) -> float:
    """How much of `held` + `spare` a process should hold."""
    target = share * max(0.0, held + spare)
    at_once = min(member.refused, most * (1 - ROUNDING))
    if target < at_once and share < 1 - ROUNDING:
        # It cannot get enough for its smallest refused request, so it leaves all of it to another process that can use
        # it.
        target = at_once if spare + member.use.held >= at_once else 0.0
    return target


def _is_short(member: _Member, share: float, slack_part: float) -> bool:
    """Whether a process may soon refuse what others have. One request alone does not move the parts of all others."""
    return member.refused > 0 or share < slack_part / 2 or member.use.held < member.demand * _AHEAD_S / 60


class _Demand(NamedTuple):
    """What is asked of all processes together."""

    of_sharing: float  # of those with some slack
    of_all: float
    slack: float

    @classmethod
    def of(cls, members: Mapping[str, _Member], *, of_places: bool = False) -> _Demand:
        of_sharing = of_others = slack = 0.0
        for each in members.values():
            asked = each.asks(at_least=each.use.held if of_places else 0.0)
            slack += each.slack
            if each.slack:
                of_sharing += asked
            else:
                of_others += asked
        return cls(of_sharing, of_sharing + of_others, slack)

    def part(self, member: _Member, most: float, *, at_least: float = 0.0) -> float:
        """As much as is asked for, and of the rest by their slack. Those without any slack come last."""
        asked = member.asks(at_least=at_least)
        if not member.slack:
            left = max(0.0, 1 - self.of_sharing / most)
            return left * asked / max(self.of_all - self.of_sharing, left * most) if left else 0.0
        return asked / max(self.of_sharing, most) + self.slack_part(member, most)

    def slack_part(self, member: _Member, most: float) -> float:
        """The part of what no process asks for."""
        return max(0.0, 1 - self.of_all / most) * member.slack / self.slack if member.slack else 0.0


def _share_of_places(members: Mapping[str, _Member], process: str, most: int, now: float) -> tuple[Share, bool]:
    """See `_share_of_bucket`. Free places go to requests that wait."""
    demand = _Demand.of(members, of_places=True)
    # One that has more requests than places has them until they end.
    others = sum(max(each.use.share, each.use.held) for name, each in members.items() if name != process)
    waiting = (each for name, each in members.items() if name != process and now - each.reported_at <= _WAITING_S)
    num_waiting_elsewhere = sum(each.use.refused for each in waiting)
    member = members[process]
    part = most * demand.part(member, most, at_least=member.use.held)
    if math.floor(part) <= member.use.share <= math.ceil(part):
        places = member.use.share
    else:
        parts = {name: most * demand.part(each, most, at_least=each.use.held) for name, each in members.items()}
        places = float(_whole(parts, most)[process])
    if places < member.use.share <= (1 + _INDIFFERENT) * places:
        places = member.use.share  # places on their way to another are of use to none
    needed = member.use.held + member.use.refused
    asked = max(places, needed) if not num_waiting_elsewhere else needed
    places = max(0.0, min(asked, most - others))
    # A place that is taken from a process may be in use again: it goes to others once the next report shows it.
    member.use = member.use._replace(share=max(places, member.use.share))
    return Share(places, elsewhere=num_waiting_elsewhere), places < needed


def _whole(parts: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers near these, which are `total` together: those that are rounded off most get one more."""
    whole = {name: math.floor(part) for name, part in parts.items()}
    by_rest = sorted(parts, key=lambda name: (whole[name] - parts[name], name))
    for name in islice(by_rest, max(0, total - sum(whole.values()))):
        whole[name] += 1
    return whole
