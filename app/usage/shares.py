"""Divides each key's limits and budgets among the processes that send requests, according to their demand.

A process may use its part until the next answer, so requests do not wait for the owner, even if the owner has died. The
owner withdraws an amount from one process before it assigns it to another, so the parts never add up to more than the
limit. Likewise, a budget is never exceeded by the sum of the usage in the ledger, the reservations of running requests
and the amounts that processes may still reserve.
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
    ROUNDING,
    SLOTS,
    BudgetTotals,
    LimitId,
    LimitUse,
    Share,
    UsageAnswer,
    UsageReport,
)

LEASE_S = 90.0  # after this silence, the owner reassigns a process's part, and the process returns to its first share
SETTLING_S = 3.0  # how long a new owner collects reports before it assigns any parts
_INDIFFERENT = 0.1  # a process may keep surplus slots up to this fraction of its part
# The weight of the batches process in budgets. It needs some of each budget in advance, because a stored answer may
# arrive before the process has requested an amount.
_SLACK_OF_BUDGET = 0.1
_REFUSED_S = 5.0  # how long a refused request is expected to be retried
_DEMAND_S = 2.0  # time constant with which demand decays
_WAITING_S = 1.0  # how long a reported waiting request counts; no request waits longer for a slot
_MOVING_S = 10.0  # time after which demand has decayed to nothing
_AHEAD_S = 5.0  # a process whose amount covers its demand for this time needs nothing from other processes
_NOTHING = BudgetTotals()
_Numbers = NDArray[np.float64]
_Flags = NDArray[np.bool_]
_NumberOrNumbers = TypeVar("_NumberOrNumbers", float, _Numbers)  # the value of one process, or of all processes


@dataclass(slots=True)
class _Process:
    heard_at: float
    column: int  # the process's column in `_Table`
    passed_s: float = 0.0  # time between the process's last two reports


@dataclass(slots=True)
class _Limit:
    row: int  # the limit's row in `_Table`
    members: set[str] = field(default_factory=set)  # processes that have reported their parts of the limit
    spare: float | None = None  # the bucket's unassigned amount; None before it is first counted
    counted_at: float = 0.0
    # Until this time, all members are asked to report the limit, because a process held less than its part.
    changing_until: float = 0.0


class _Table:
    """The reported values, with a row for each limit and a column for each process. Missing values are 0.

    All limits of a report are summed at once, because numpy takes nanoseconds per process, and a loop microseconds.
    """

    # Indices of `values`. DEMAND is an amount per minute at the time of the report, or a number of slots. SLACK is the
    # process's weight when the amount that no process requests is divided. A process with weight 0 receives nothing of
    # that amount, and its demand is served last.
    NAMES = SHARE, HELD, DEMAND, SLACK, REFUSED, REFUSED_AT, REPORTED_AT = range(7)

    def __init__(self) -> None:
        self.values = np.zeros((len(self.NAMES), 16, 4))
        self.heard_at = np.zeros(4)  # time of each process's last report, by column
        self._free_rows, self._free_columns = list(range(16)), list(range(4))

    def new_row(self) -> int:
        """Return a free row for a limit. All of its values are 0."""
        if not self._free_rows:
            num_rows = self.values.shape[1]
            self.values = np.concatenate([self.values, np.zeros_like(self.values)], axis=1)
            self._free_rows.extend(range(num_rows, 2 * num_rows))
        return self._free_rows.pop()

    def new_column(self) -> int:
        """Return a free column for a process. All of its values are 0."""
        if not self._free_columns:
            num_columns = len(self.heard_at)
            self.values = np.concatenate([self.values, np.zeros_like(self.values)], axis=2)
            self.heard_at = np.concatenate([self.heard_at, np.zeros(num_columns)])
            self._free_columns.extend(range(num_columns, 2 * num_columns))
        return self._free_columns.pop()

    def end_row(self, row: int) -> None:
        """Free the row of a removed limit."""
        self.values[:, row] = 0.0
        self._free_rows.append(row)

    def end_column(self, column: int) -> None:
        """Free the column of a dead process."""
        self.values[:, :, column] = 0.0
        self._free_columns.append(column)

    def note(self, rows: Sequence[int], column: int, uses: Sequence[LimitUse], are_slots: _Flags, *, slack: _Numbers,
             passed_s: float, now: float) -> None:  # fmt: skip
        """Record a process's report of these limits."""
        share, held, wanted, refused = np.array(uses, dtype=np.float64).T
        before = self.values[:, rows, column]
        left = before[self.DEMAND] * np.exp((before[self.REPORTED_AT] - now) / _DEMAND_S)
        # `wanted` excludes amounts that were returned because they were not needed.
        passed_s = max(passed_s, 1e-3)
        asked = left + (1 - math.exp(-passed_s / _DEMAND_S)) * wanted * 60 / passed_s
        demand = np.where(are_slots, np.maximum(wanted, left), asked)
        is_new = are_slots | (refused > 0) | (now - before[self.REFUSED_AT] > _REFUSED_S)
        refused_at = np.where(is_new, now, before[self.REFUSED_AT])
        refused = np.where(is_new, refused, before[self.REFUSED])
        self.values[:, rows, column] = (share, held, demand, slack, refused, refused_at, np.full(len(rows), now))

    def sums(self, rows: Sequence[int], column: int, most: _Numbers, are_slots: _Flags, *, now: float) -> list[_Sums]:
        """Return each limit's values for one process, and its sums over all processes. `most` holds the limits."""
        values = self.values[:, rows]
        share, held, slack = values[self.SHARE], values[self.HELD], values[self.SLACK]
        silent_s = self._silent_s(values)
        asks = np.maximum(self._demand_now(values), np.where(are_slots[:, None], held, 0.0))
        # A process without demand does not report the limit, but its bucket refills.
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

    def whole_slots(self, row: int, column: int, sums: _Sums, most: int) -> int:
        """Return one process's slots, after rounding all parts to whole numbers that add up to `most`.

        By the largest remainder method, each part is rounded down, and the parts that lost most receive one more slot.
        """
        values = self.values[:, row]
        slack, asks = values[self.SLACK], np.maximum(self._demand_now(values), values[self.HELD])
        parts = most * sums.part_of(asks, slack, most)
        whole = np.floor(parts)
        rests = np.where((slack > 0) | (asks > 0), parts - whole, -1.0)  # -1 for a process without a part
        before = np.count_nonzero(rests > rests[column]) + np.count_nonzero(rests[:column] == rests[column])
        return int(whole[column]) + int(before < most - int(whole.sum()))

    def _silent_s(self, values: _Numbers) -> _Numbers:
        """Return the seconds for which each process's reports have omitted the limits, because there was no demand."""
        silent_s: _Numbers = np.maximum(0.0, self.heard_at - values[self.REPORTED_AT])
        return silent_s

    def _demand_now(self, values: _Numbers) -> _Numbers:
        """Return the reported demand, decayed to the time of each process's last report."""
        demand: _Numbers = values[self.DEMAND] * np.exp(-self._silent_s(values) / _DEMAND_S)
        return demand


def _of_others(values: _Numbers, column: int) -> _Numbers:
    """Return the row sums without one column. Subtracting the column from full sums would add rounding errors."""
    others: _Numbers = values[:, :column].sum(1) + values[:, column + 1 :].sum(1)
    return others


class _Sums(NamedTuple):
    """One process's values for a limit, and the sums over all processes."""

    share: float
    held: float
    demand: float
    asks: float  # demand per minute, decayed to now; for SLOTS, a number of slots, at least those in use
    slack: float
    refused: float
    held_by_all: float  # includes the refill of buckets since they were last reported
    shared_by_others: float
    asked_of_sharing: float  # demand of the processes with slack
    asked_of_all: float
    slack_of_all: float
    taken_by_others: float  # for SLOTS, the sum over the other processes of max(part, slots in use)
    waiting_elsewhere: float  # for SLOTS, the number of requests that are waiting in other processes

    def part(self, most: float) -> float:
        """Return this process's part, from 0 to 1."""
        return self.part_of(self.asks, self.slack, most)

    def part_of(self, asks: _NumberOrNumbers, slack: _NumberOrNumbers, most: float) -> _NumberOrNumbers:
        """Return the part by demand, plus a part of the remainder by slack. Processes without slack are served last."""
        sharing = asks / max(self.asked_of_sharing, most) + self.slack_part_of(slack, most)
        left = max(0.0, 1 - self.asked_of_sharing / most)
        last = left * asks / (max(self.asked_of_all - self.asked_of_sharing, left * most) or 1.0)
        part: _NumberOrNumbers = (slack > 0) * sharing + (slack == 0) * last
        return part

    def slack_part_of(self, slack: _NumberOrNumbers, most: float) -> _NumberOrNumbers:
        """Return a process's part, by slack, of the amount that no process requests."""
        return max(0.0, 1 - self.asked_of_all / most) * slack / (self.slack_of_all or 1.0)

    def is_short(self, share: float, most: float, *, held: float) -> bool:
        """Whether the process has refused requests, or may soon have to, while other processes hold the amount."""
        is_small = share < self.slack_part_of(self.slack, most) / 2
        return self.refused > 0 or is_small or held < self.demand * _AHEAD_S / 60

    def should_have(self, share: float, held: float, spare: float, most: float) -> float:
        """Return how much of the whole amount (`held` + `spare`) this process should hold."""
        target = share * max(0.0, held + spare)
        at_once = min(self.refused, most * (1 - ROUNDING))
        if target < at_once and share < 1 - ROUNDING:
            # The target is too small for the smallest refused request. The process should hold that request's amount,
            # or nothing if the spare amount is too small for the request.
            target = at_once if spare + self.held >= at_once else 0.0
        return target


class Shares:
    """Assigns the parts of all limits in the owner. Use it in one thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None  # time of the first report
        self._is_settled = False  # whether all processes have reported or have had time to
        self._processes: dict[str, _Process] = {}  # the live processes
        self._num_expected = 0
        self._limits: dict[LimitId, _Limit] = {}
        self._table = _Table()
        # Budget amounts that running requests have reserved, by key and process, without zeros.
        self._reserved: defaultdict[str, dict[str, BudgetTotals]] = defaultdict(dict)
        self._moving: dict[LimitId, _Limit] = {}  # limits whose parts are changing, in the order of `changing_until`

    def answer(self, report: UsageReport, answer: UsageAnswer) -> UsageAnswer:
        """Complete the ledger's answer to a report with the process's parts and the other processes' reservations."""
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
        """Return a key's usage plus the reservations in all processes except `but`."""
        reserved = self._reserved.get(key)
        if not reserved:
            return used
        return reduce(BudgetTotals.plus, (each for name, each in reserved.items() if name != but), used)

    def _hear(self, report: UsageReport, now: float) -> _Process:
        """Record a process's report and reservations, and remove processes that have been silent for `LEASE_S`."""
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
        """Return a process's parts, or none while other processes may use parts that they have not reported yet.

        `used` holds the ledger's totals for each key with budgets.
        """
        name, uses = report.process, report.limits
        if self._began_at is None:
            self._began_at = now
        self._num_expected = max(self._num_expected, report.num_processes)
        if report.has_all_limits:
            # Release the parts of removed or changed limits. A report for a dead process releases all of its parts.
            self._leave(name, self._limits.keys() - uses.keys())
        limits = [self._limits.get(each) or self._new_limit(each, now) for each in uses]
        for limit in limits:
            limit.members.add(name)
        rows, are_slots = [each.row for each in limits], np.array([each.what == SLOTS for each in uses], dtype=bool)
        if uses:
            slack = [1.0 if report.takes_slack else _SLACK_OF_BUDGET * (each.what in BUDGETS) for each in uses]
            self._table.note(
                rows, process.column, list(uses.values()), are_slots, slack=np.array(slack),
                passed_s=process.passed_s, now=now,
            )  # fmt: skip
        age_s, has_heard_all = now - self._began_at, len(self._processes) >= self._num_expected
        self._is_settled |= age_s >= SETTLING_S and (has_heard_all or age_s >= LEASE_S)
        if not (uses and self._is_settled):
            return {}
        most = np.array([each.limit for each in uses], dtype=np.float64)
        sums = self._table.sums(rows, process.column, most, are_slots, now=now)
        given = [
            self._given(limit_id, limit, name, each, used, now)
            for limit_id, limit, each in zip(uses, limits, sums, strict=True)
        ]
        self._table.values[[[_Table.SHARE], [_Table.HELD]], rows, process.column] = np.array(
            [(each.has_share, each.stored_held) for each in given]
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
        """Mark a limit as changing, so that its members are asked to report it even if it is unchanged there."""
        limit.changing_until = self._clock() + _MOVING_S
        self._moving.pop(limit_id, None)
        self._moving[limit_id] = limit

    def _moving_keys(self, process: str, now: float) -> set[str]:
        """Return the keys of this process's limits whose parts are changing."""
        for limit_id in list(takewhile(lambda each: now > self._moving[each].changing_until, self._moving)):
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
        if limit_id.what == SLOTS:
            return self._given_of_slots(limit, process, sums, int(limit_id.limit))
        if limit_id.what in BUDGETS:
            spent = self._with_reserved(limit_id.key, used.get(limit_id.key, _NOTHING))
            return _given_of_budget(sums, limit_id.limit - float(getattr(spent, BUDGETS[limit_id.what])))
        return _given_of_bucket(limit, sums, limit_id.limit, now)

    def _given_of_slots(self, limit: _Limit, process: str, sums: _Sums, most: int) -> _Given:
        """Return the process's new number of slots. Free slots go to waiting requests."""
        part = most * sums.part(most)
        if math.floor(part) <= sums.share <= math.ceil(part):
            slots = sums.share
        else:
            slots = float(self._table.whole_slots(limit.row, self._processes[process].column, sums, most))
        if slots < sums.share <= (1 + _INDIFFERENT) * slots:
            slots = sums.share  # a small change is not worth it, because no process can use a slot while it moves
        needed = sums.held + sums.refused
        asked = needed if sums.waiting_elsewhere else max(slots, needed)
        if sums.waiting_elsewhere and sums.held > slots:
            # Move the process's surplus slots to other processes one by one. Otherwise its own requests would take
            # every slot that becomes free, and requests in other processes would wait forever.
            asked = max(slots, sums.held - 1)
        slots = max(0.0, min(asked, most - sums.taken_by_others))
        # A withdrawn slot may be in use again, so another process receives it only after this process's next report.
        share = Share(slots, elsewhere=sums.waiting_elsewhere)
        return _Given(share, max(slots, sums.share), sums.held, slots < needed)


class _Given(NamedTuple):
    """A process's new part, and the values to store in the table."""

    share: Share
    has_share: float
    stored_held: float
    is_short: bool  # whether the part is smaller than it should be because other processes hold the rest


def _given_of_bucket(limit: _Limit, sums: _Sums, most: float, now: float) -> _Given:
    held = sums.held_by_all
    if limit.spare is None:  # no process holds a part yet, or a previous owner's spare amount is unknown
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
    """Return the new part of a budget. `left` is the amount that is neither used nor reserved."""
    held = sums.held_by_all
    share = sums.part(left) if left > 0 else 0.0
    given = min(sums.should_have(share, held, left - held, left) - sums.held, left - held)
    # The process may have reserved a withdrawn amount, so other processes receive it only after its next report.
    has = sums.held + max(0.0, given)
    is_short = left > 0 and sums.is_short(has / left, left, held=has)
    return _Given(Share(share, given), sums.share, has, is_short)
