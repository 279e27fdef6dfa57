"""How the processes that send requests share the limits and budgets of a key: each has a part, by what it is asked for.

A process goes on with its part while it has no answer, so no request waits for an answer, and the owner may die. What
is given to one process was taken from another before: all parts together are never more than the limit. Of a budget the
ledger's total, what running requests have reserved, and all that processes may still reserve are never more than it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import starmap, takewhile
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

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
_Numbers = NDArray[np.float64]
_Flags = NDArray[np.bool_]
_NumberOrNumbers = TypeVar("_NumberOrNumbers", float, _Numbers)  # of one process, or of all


@dataclass(slots=True)
class _Process:
    heard_at: float
    column: int  # in all rows of `_Table`
    passed_s: float = 0.0  # from the report before


@dataclass(slots=True)
class _Limit:
    row: int  # of `_Table`
    members: set[str] = field(default_factory=set)  # processes that have told what they have of it
    spare: float | None = None  # what no process has of the bucket; None: not known yet
    counted_at: float = 0.0
    # A process had less than its part within the last _MOVING_S: all are asked for what they have.
    moves_until: float = 0.0


class _Table:
    """What each process has told of each limit: a row for each limit and a column for each process, 0 without any.

    An owner of many keys adds up the columns of all rows that a report has at once: numpy takes nanoseconds for a
    process that a loop takes microseconds for.
    """

    # Of `values`. DEMAND is in a minute, when it was reported, and of PLACES at once. SLACK: the weight of the process
    # when the part that no process asks for is divided; 0: it gets none of that part, and comes after the others.
    NAMES = SHARE, HELD, DEMAND, SLACK, REFUSED, REFUSED_AT, REPORTED_AT = range(7)

    def __init__(self) -> None:
        self.values = np.zeros((len(self.NAMES), 16, 4))
        self.heard_at = np.zeros(4)  # by column: the last report of the process
        self._free_rows, self._free_columns = list(range(16)), list(range(4))

    def new_row(self) -> int:
        """The row of another limit: all 0."""
        if not self._free_rows:
            num_rows = self.values.shape[1]
            self.values = np.concatenate([self.values, np.zeros_like(self.values)], axis=1)
            self._free_rows.extend(range(num_rows, 2 * num_rows))
        return self._free_rows.pop()

    def new_column(self) -> int:
        """The column of another process: all 0."""
        if not self._free_columns:
            num_columns = len(self.heard_at)
            self.values = np.concatenate([self.values, np.zeros_like(self.values)], axis=2)
            self.heard_at = np.concatenate([self.heard_at, np.zeros(num_columns)])
            self._free_columns.extend(range(num_columns, 2 * num_columns))
        return self._free_columns.pop()

    def end_row(self, row: int) -> None:
        """There is no such limit any more."""
        self.values[:, row] = 0.0
        self._free_rows.append(row)

    def end_column(self, column: int) -> None:
        """There is no such process any more."""
        self.values[:, :, column] = 0.0
        self._free_columns.append(column)

    def note(self, rows: Sequence[int], column: int, uses: Sequence[LimitUse], are_places: _Flags, *, slack: _Numbers,
             passed_s: float, now: float) -> None:  # fmt: skip
        """A process reports of these limits."""
        share, held, wanted, refused = np.array(uses, dtype=np.float64).T
        before = self.values[:, rows, column]
        left = before[self.DEMAND] * np.exp((before[self.REPORTED_AT] - now) / _DEMAND_S)
        # What is given back was not wanted after all.
        passed_s = max(passed_s, 1e-3)
        asked = left + (1 - math.exp(-passed_s / _DEMAND_S)) * wanted * 60 / passed_s
        demand = np.where(are_places, np.maximum(wanted, left), asked)
        is_new = are_places | (refused > 0) | (now - before[self.REFUSED_AT] > _REFUSED_S)
        refused_at = np.where(is_new, now, before[self.REFUSED_AT])
        refused = np.where(is_new, refused, before[self.REFUSED])
        self.values[:, rows, column] = (share, held, demand, slack, refused, refused_at, np.full(len(rows), now))

    def sums(self, rows: Sequence[int], column: int, most: _Numbers, are_places: _Flags, *, now: float) -> list[_Sums]:
        """Of each of these limits, what one process has and what all have together. `most`: the limits."""
        values = self.values[:, rows]
        share, held, slack = values[self.SHARE], values[self.HELD], values[self.SLACK]
        # So long a process has reported, but nothing of this limit: nothing was asked of it.
        silent_s = np.maximum(0.0, self.heard_at - values[self.REPORTED_AT])
        asks = values[self.DEMAND] * np.exp(-silent_s / _DEMAND_S)
        asks = np.maximum(asks, np.where(are_places[:, None], held, 0.0))
        # The bucket of a process that nothing is asked of fills up.
        full = share * most[:, None]
        has = np.maximum(held, np.minimum(full, held + silent_s * full / 60))
        taken = np.maximum(share, held)
        waiting = np.where(now - values[self.REPORTED_AT] <= _WAITING_S, values[self.REFUSED], 0.0)
        columns = (
            share[:, column], held[:, column], values[self.DEMAND, :, column], asks[:, column], slack[:, column],
            values[self.REFUSED, :, column],
            has.sum(1), _of_others(share, column), np.where(slack > 0, asks, 0.0).sum(1), asks.sum(1), slack.sum(1),
            _of_others(taken, column), _of_others(waiting, column),
        )  # fmt: skip
        return list(starmap(_Sums, np.array(columns).T.tolist()))

    def whole_places(self, row: int, column: int, sums: _Sums, most: int) -> int:
        """Of the parts of all processes in whole numbers that are `most` together, that of one process.

        The parts that are rounded off most get one more.
        """
        values = self.values[:, row]
        slack, silent_s = values[self.SLACK], np.maximum(0.0, self.heard_at - values[self.REPORTED_AT])
        asks = np.maximum(values[self.DEMAND] * np.exp(-silent_s / _DEMAND_S), values[self.HELD])
        parts = most * sums.part_of(asks, slack, most)
        whole = np.floor(parts)
        rests = np.where((slack > 0) | (asks > 0), parts - whole, -1.0)  # -1: the process has no part
        before = np.count_nonzero(rests > rests[column]) + np.count_nonzero(rests[:column] == rests[column])
        return int(whole[column]) + int(before < most - int(whole.sum()))


def _of_others(values: _Numbers, column: int) -> _Numbers:
    """The sums of rows without one column; without a difference, which would be rounded."""
    others: _Numbers = values[:, :column].sum(1) + values[:, column + 1 :].sum(1)
    return others


class _Sums(NamedTuple):
    """What one process has of a limit and is asked for, and what is known of all processes together."""

    share: float
    held: float
    demand: float
    asks: float  # what is asked of it now, in a minute; of PLACES at once, and at least those that are taken
    slack: float
    refused: float
    held_by_all: float  # now
    shared_by_others: float
    asked_of_sharing: float  # of the processes with some slack
    asked_of_all: float
    slack_of_all: float
    taken_by_others: float  # of PLACES: a process that has more requests than places has them until they end
    waiting_elsewhere: float  # of PLACES: requests that wait for one

    def part(self, most: float) -> float:
        """The part of this process."""
        return self.part_of(self.asks, self.slack, most)

    def part_of(self, asks: _NumberOrNumbers, slack: _NumberOrNumbers, most: float) -> _NumberOrNumbers:
        """As much as is asked for, and of the rest by their slack. Those without any slack come last."""
        sharing = asks / max(self.asked_of_sharing, most) + self.slack_part_of(slack, most)
        left = max(0.0, 1 - self.asked_of_sharing / most)
        last = left * asks / (max(self.asked_of_all - self.asked_of_sharing, left * most) or 1.0)
        part: _NumberOrNumbers = (slack > 0) * sharing + (slack == 0) * last
        return part

    def slack_part_of(self, slack: _NumberOrNumbers, most: float) -> _NumberOrNumbers:
        """The part of what no process asks for."""
        return max(0.0, 1 - self.asked_of_all / most) * slack / (self.slack_of_all or 1.0)

    def is_short(self, share: float, most: float, *, held: float) -> bool:
        """Whether it may soon refuse what others have. One request alone does not move the parts of all others."""
        is_small = share < self.slack_part_of(self.slack, most) / 2
        return self.refused > 0 or is_small or held < self.demand * _AHEAD_S / 60

    def should_have(self, share: float, held: float, spare: float, most: float) -> float:
        """How much of `held` + `spare`, which all have together, it should hold."""
        target = share * max(0.0, held + spare)
        at_once = min(self.refused, most * (1 - ROUNDING))
        if target < at_once and share < 1 - ROUNDING:
            # It cannot get enough for its smallest refused request, so it leaves all of it to another process that can
            # use it.
            target = at_once if spare + self.held >= at_once else 0.0
        return target


class Shares:
    """The parts of all limits. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None  # with the first report
        self._is_settled = False
        self._processes: dict[str, _Process] = {}  # those that live
        self._num_expected = 0
        self._limits: dict[LimitId, _Limit] = {}
        self._table = _Table()
        # By key and process, what running requests have reserved of budgets, where it is not nothing.
        self._reserved: defaultdict[str, dict[str, BudgetTotals]] = defaultdict(dict)
        self._moving: dict[LimitId, _Limit] = {}  # the first to end first

    def answer(self, report: UsageReport, answer: UsageAnswer) -> UsageAnswer:
        """The ledger's answer to a report, with its parts of limits and what others have reserved."""
        now, is_new = self._clock(), report.process not in self._processes
        process = self._hear(report, now)
        shares = self._exchange(report, process, answer.totals, now)
        totals = {key: self._with_reserved(key, of, report.process) for key, of in answer.totals.items()}
        return replace(
            answer,
            totals=totals,
            shares=shares,
            num_processes=len(self._processes),
            wants_all=not self._is_settled or (is_new and not report.has_all_limits),
            asks_for=self._moving_keys(report.process, now) if self._is_settled else (),
        )

    def _with_reserved(self, key: str, used: BudgetTotals, but: str | None = None) -> BudgetTotals:
        """What is used of a key's budgets, and what running requests have reserved in all processes but one."""
        reserved = self._reserved.get(key)
        if not reserved:
            return used
        return reduce(BudgetTotals.plus, (each for name, each in reserved.items() if name != but), used)

    def _hear(self, report: UsageReport, now: float) -> _Process:
        """A process lives. One that has been silent for too long does not."""
        process = self._processes.get(report.process)
        if process is None:
            process = self._processes[report.process] = _Process(now, self._table.new_column())
        process.passed_s, process.heard_at = now - process.heard_at, now
        self._table.heard_at[process.column] = now
        if report.has_all_limits:
            self._forget_reserved(report.process)
        for key, totals in report.reserved.items():
            if any(totals):
                self._reserved[key][report.process] = totals
            elif key in self._reserved:
                self._reserved[key].pop(report.process, None)
        for silent in [name for name, each in self._processes.items() if now - each.heard_at > LEASE_S]:
            self._leave(silent, self._limits)
            self._forget_reserved(silent)
            self._table.end_column(self._processes.pop(silent).column)
        return process

    def _forget_reserved(self, process: str) -> None:
        for key in [key for key, reserved in self._reserved.items() if reserved.pop(process, None) or not reserved]:
            if not self._reserved[key]:
                del self._reserved[key]

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
        limits = [self._limits.get(each) or self._new_limit(each, now) for each in uses]
        for limit in limits:
            limit.members.add(name)
        rows, are_places = [each.row for each in limits], np.array([each.what == PLACES for each in uses], dtype=bool)
        if uses:
            slack = [1.0 if report.takes_slack else _SLACK_OF_BUDGET * (each.what in BUDGETS) for each in uses]
            self._table.note(
                rows, process.column, list(uses.values()), are_places, slack=np.array(slack),
                passed_s=process.passed_s, now=now,
            )  # fmt: skip
        age_s, has_heard_all = now - self._began_at, len(self._processes) >= self._num_expected
        self._is_settled |= age_s >= SETTLING_S and (has_heard_all or age_s >= LEASE_S)
        if not (uses and self._is_settled):
            return {}
        most = np.array([each.limit for each in uses], dtype=np.float64)
        sums = self._table.sums(rows, process.column, most, are_places, now=now)
        given = [
            self._given(limit_id, limit, name, each, used, now)
            for limit_id, limit, each in zip(uses, limits, sums, strict=True)
        ]
        self._table.values[[[_Table.SHARE], [_Table.HELD]], rows, process.column] = np.array(
            [(each.has_share, each.has_held) for each in given]
        ).T
        for limit_id, limit, each in zip(uses, limits, given, strict=True):
            if each.is_short:
                self._move(limit_id, limit)
        return dict(zip(uses, (each.share for each in given), strict=True))

    def _new_limit(self, limit_id: LimitId, now: float) -> _Limit:
        limit = self._limits[limit_id] = _Limit(self._table.new_row(), counted_at=now)
        return limit

    def _leave(self, process: str, limit_ids: Collection[LimitId]) -> None:
        column = self._processes[process].column
        for limit_id in list(limit_ids):
            limit = self._limits[limit_id]
            if process in limit.members:
                limit.members.remove(process)
                self._table.values[:, limit.row, column] = 0.0
                self._move(limit_id, limit)
            if not limit.members:
                self._table.end_row(limit.row)
                del self._limits[limit_id]

    def _move(self, limit_id: LimitId, limit: _Limit) -> None:
        """The parts of a limit are to change. Without changes of its own no process would tell what it has."""
        limit.moves_until = self._clock() + _MOVING_S
        self._moving.pop(limit_id, None)
        self._moving[limit_id] = limit

    def _moving_keys(self, process: str, now: float) -> set[str]:
        """Keys with such limits, as far as a process has them."""
        for limit_id in list(takewhile(lambda each: now > self._moving[each].moves_until, self._moving)):
            del self._moving[limit_id]
        return {limit_id.key for limit_id, limit in self._moving.items() if process in limit.members}

    def _given(
        self,
        limit_id: LimitId,
        limit: _Limit,
        process: str,
        sums: _Sums,
        used: Mapping[str, BudgetTotals],
        now: float,
    ) -> _Given:
        if limit_id.what == PLACES:
            return self._given_of_places(limit, process, sums, int(limit_id.limit))
        if limit_id.what in BUDGETS:
            spent = self._with_reserved(limit_id.key, used.get(limit_id.key, _NOTHING))
            return _given_of_budget(sums, limit_id.limit - float(getattr(spent, BUDGETS[limit_id.what])))
        return _given_of_bucket(limit, sums, limit_id.limit, now)

    def _given_of_places(self, limit: _Limit, process: str, sums: _Sums, most: int) -> _Given:
        """See `_given_of_bucket`. Free places go to requests that wait."""
        part = most * sums.part(most)
        if math.floor(part) <= sums.share <= math.ceil(part):
            places = sums.share
        else:
            places = float(self._table.whole_places(limit.row, self._processes[process].column, sums, most))
        if places < sums.share <= (1 + _INDIFFERENT) * places:
            places = sums.share  # places on their way to another are of use to none
        needed = sums.held + sums.refused
        asked = needed if sums.waiting_elsewhere else max(places, needed)
        if sums.waiting_elsewhere and sums.held > places:
            # Its own requests would take each place that becomes free, and those of others wait for ever: one by one,
            # the places beyond its part go to others.
            asked = max(places, sums.held - 1)
        places = max(0.0, min(asked, most - sums.taken_by_others))
        # A place that is taken from a process may be in use again: it goes to others once the next report shows it.
        share = Share(places, elsewhere=sums.waiting_elsewhere)
        return _Given(share, max(places, sums.share), sums.held, places < needed)


class _Given(NamedTuple):
    """The part of a process, and what the table has of it from now on."""

    share: Share
    has_share: float
    has_held: float
    is_short: bool  # it is less than what should be there, because other processes have the rest


def _given_of_bucket(limit: _Limit, sums: _Sums, most: float, now: float) -> _Given:
    held = sums.held_by_all
    if limit.spare is None:  # no process has a part yet; or an owner before this gave them, and what it kept is lost
        limit.spare = 0.0 if sums.share or sums.shared_by_others else float(most)
        limit.counted_at = now
    unshared = max(0.0, 1 - sums.shared_by_others - sums.share)
    limit.spare += unshared * most * (now - limit.counted_at) / 60
    limit.spare = min(limit.spare, max(0.0, most - held))
    limit.counted_at = now
    share = max(0.0, min(sums.part(most), 1 - sums.shared_by_others))
    given = min(sums.should_have(share, held, limit.spare, most) - sums.held, limit.spare)
    limit.spare -= given
    elsewhere, has = max(0.0, held - sums.held + limit.spare), sums.held + given
    return _Given(Share(share, given, elsewhere), share, has, sums.is_short(share, most, held=has))


def _given_of_budget(sums: _Sums, left: float) -> _Given:
    """`left`: of the budget, what is neither used nor reserved by running requests. See `_given_of_bucket`."""
    held = sums.held_by_all
    share = sums.part(left) if left > 0 else 0.0
    given = min(sums.should_have(share, held, left - held, left) - sums.held, left - held)
    # What is taken from a process it may have reserved meanwhile: it goes to others once the next report shows it.
    has = sums.held + max(0.0, given)
    is_short = left > 0 and sums.is_short(has / left, left, held=has)
    return _Given(Share(share, given), sums.share, has, is_short)
