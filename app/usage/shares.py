"""How the processes that send requests share the limits and budgets of a key: each has a part, by what it is asked for.

A process goes on with its part while it has no answer, so no request waits for an answer, and the owner may die. What
is given to one process was taken from another before: all parts together are never more than the limit. Of a budget the
ledger's total, what running requests have reserved, and all that processes may still reserve are never more than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

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


@dataclass(slots=True)
class _Member:
    reported_at: float
    # Its weight when the part that no process asks for is divided. 0: it gets none of that part, and comes after the
    # others.
    slack: float
    use: LimitUse
    demand: float = 0.0  # in a minute; of PLACES at once
    refused: float = 0.0
    refused_at: float = 0.0


@dataclass(slots=True)
class _Limit:
    members: dict[str, _Member] = field(default_factory=dict)  # by process
    spare: float | None = None  # what no process has of the bucket; None: not known yet
    counted_at: float = 0.0


class Shares:
    """The parts of all limits. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None  # with the first report
        self._is_settled = False
        self._heard_at: dict[str, float] = {}  # by process, of those that live
        self._num_expected = 0
        self._limits: dict[LimitId, _Limit] = {}
        self._reserved: dict[str, Mapping[str, BudgetTotals]] = {}  # by process and key

    def answer(self, report: UsageReport, answer: UsageAnswer) -> UsageAnswer:
        """The ledger's answer to a report, with its parts of limits and what others have reserved."""
        self._reserved[report.process] = report.reserved
        shares, totals = self._exchange(report, answer.totals), dict(answer.totals)
        for process, reserved in self._reserved.items():
            for key in reserved.keys() & totals.keys() if process != report.process else ():
                totals[key] = totals[key].plus(reserved[key])
        return replace(answer, totals=totals, shares=shares, num_processes=len(self._heard_at))

    def _exchange(self, report: UsageReport, used: Mapping[str, BudgetTotals]) -> dict[LimitId, Share]:
        """The parts of a process; none while others may have parts that are not known here.

        `used`: what the ledger has of each key with budgets.
        """
        process, uses = report.process, report.limits
        now = self._clock()
        if self._began_at is None:
            self._began_at = now
        self._heard_at[process] = now
        self._num_expected = max(self._num_expected, report.num_processes)
        for silent in [each for each, at in self._heard_at.items() if now - at > LEASE_S]:
            del self._heard_at[silent], self._reserved[silent]
            self._leave(silent, self._limits)
        # Of keys that were removed or changed; all, where another process reports what this one has left.
        self._leave(process, self._limits.keys() - uses.keys())
        for limit_id, use in uses.items():
            limit = self._limits.setdefault(limit_id, _Limit(counted_at=now))
            slack = 1.0 if report.takes_slack else _SLACK_OF_BUDGET if limit_id.what in BUDGETS else 0.0
            _note(limit, process, use, limit_id, now, slack=slack)
        age_s, has_heard_all = now - self._began_at, len(self._heard_at) >= self._num_expected
        self._is_settled |= age_s >= SETTLING_S and (has_heard_all or age_s >= LEASE_S)
        return {limit_id: self._share(limit_id, process, now, used) for limit_id in uses} if self._is_settled else {}

    def _leave(self, process: str, limit_ids: Collection[LimitId]) -> None:
        for limit_id in list(limit_ids):
            members = self._limits[limit_id].members
            members.pop(process, None)
            if not members:
                del self._limits[limit_id]

    def _share(self, limit_id: LimitId, process: str, now: float, used: Mapping[str, BudgetTotals]) -> Share:
        limit = self._limits[limit_id]
        if limit_id.what == PLACES:
            return _share_of_places(limit.members, process, int(limit_id.limit))
        if limit_id.what in BUDGETS:
            return _share_of_budget(limit.members, process, limit_id.limit - self._spent(limit_id, used))
        return _share_of_bucket(limit, process, limit_id.limit, now)

    def _spent(self, limit_id: LimitId, used: Mapping[str, BudgetTotals]) -> float:
        """Of a budget what is used, and what running requests have reserved."""
        key, name = limit_id.key, BUDGETS[limit_id.what]
        parts = (each.get(key, BudgetTotals()) for each in (used, *self._reserved.values()))
        return sum(float(getattr(part, name)) for part in parts)


def _note(limit: _Limit, process: str, use: LimitUse, limit_id: LimitId, now: float, *, slack: float) -> None:
    member = limit.members.get(process)
    if member is None:
        member = limit.members[process] = _Member(now, slack, use)
    passed_s = max(now - member.reported_at, 1e-3)
    kept = math.exp(-passed_s / _DEMAND_S)
    if limit_id.what == PLACES:
        member.demand = max(use.wanted, kept * member.demand)
    else:
        # What is given back was not wanted after all.
        member.demand = kept * member.demand + (1 - kept) * use.wanted * 60 / passed_s
    if use.refused or now - member.refused_at > _REFUSED_S:
        member.refused, member.refused_at = use.refused, now
    member.use, member.reported_at = use, now


def _share_of_bucket(limit: _Limit, process: str, most: float, now: float) -> Share:
    members = limit.members
    member, held = members[process], sum(each.use.held for each in members.values())
    if limit.spare is None:  # no process has a part yet; or an owner before this gave them, and what it kept is lost
        limit.spare = 0.0 if any(each.use.share for each in members.values()) else float(most)
        limit.counted_at = now
    of_others = sum(each.use.share for name, each in members.items() if name != process)
    unshared = max(0.0, 1 - of_others - member.use.share)
    limit.spare += unshared * most * (now - limit.counted_at) / 60
    limit.spare = min(limit.spare, max(0.0, most - held))
    limit.counted_at = now
    share = max(0.0, min(_wanted_part(members, process, most), 1 - of_others))
    given = _given(member, share, held, limit.spare, most)
    limit.spare -= given
    elsewhere = max(0.0, held - member.use.held + limit.spare)
    member.use = member.use._replace(share=share, held=member.use.held + given)
    return Share(share, given, elsewhere)


def _share_of_budget(members: Mapping[str, _Member], process: str, left: float) -> Share:
    """`left`: of the budget, what is neither used nor reserved by running requests."""
    member, held = members[process], sum(each.use.held for each in members.values())
    share = _wanted_part(members, process, left) if left > 0 else 0.0
    given = _given(member, share, held, left - held, left)
    # What is taken from a process it may have reserved meanwhile: it goes to others once the next report shows it.
    member.use = member.use._replace(held=member.use.held + max(0.0, given))
    return Share(share, given)


def _given(member: _Member, share: float, held: float, spare: float, most: float) -> float:
    """How much a process gets (below 0: must give up) so that it holds its share of `held` + `spare`."""
    target = share * max(0.0, held + spare)
    at_once = min(member.refused, most * (1 - ROUNDING))
    if target < at_once and share < 1 - ROUNDING:
        # It cannot get enough for its smallest refused request, so it leaves all of it to another process that can use
        # it.
        target = at_once if spare + member.use.held >= at_once else 0.0
    return min(target - member.use.held, spare)


def _wanted_part(members: Mapping[str, _Member], process: str, most: float) -> float:
    """As much as is asked for, and of the rest by their slack. Those without any slack come last."""
    member, sharing = members[process], [each for each in members.values() if each.slack]
    demand, of_all = (sum(max(0.0, each.demand) for each in some) for some in (sharing, members.values()))
    if not member.slack:
        left = max(0.0, 1 - demand / most)
        return left * max(0.0, member.demand) / max(of_all - demand, left * most) if left else 0.0
    slack = max(0.0, 1 - of_all / most) * member.slack / sum(each.slack for each in sharing)
    return max(0.0, member.demand) / max(demand, most) + slack


def _share_of_places(members: Mapping[str, _Member], process: str, most: int) -> Share:
    wanted = {name: most * _wanted_part(members, name, most) for name in members}
    # One that has more requests than places has them until they end.
    others = sum(max(each.use.share, each.use.held) for name, each in members.items() if name != process)
    member, places = members[process], float(_whole(wanted, most)[process])
    if places < member.use.share <= (1 + _INDIFFERENT) * places:
        places = member.use.share  # places on their way to another are of use to none
    places = max(0.0, min(places, most - others))
    member.use = member.use._replace(share=places)
    return Share(places)


def _whole(parts: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers near these, which are `total` together: those that are rounded off most get one more."""
    whole = {name: math.floor(part) for name, part in parts.items()}
    by_rest = sorted(parts, key=lambda name: (whole[name] - parts[name], name))
    for name in islice(by_rest, max(0, total - sum(whole.values()))):
        whole[name] += 1
    return whole
