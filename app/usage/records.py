"""The records of usage and limits that processes exchange with the ledger's owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from operator import add, attrgetter
from typing import Any, NamedTuple, Protocol

ONLINE, BACKGROUND = "online", "background"
ROUNDING = 1e-6  # as a fraction of a limit; smaller differences are ignored
SLOTS = "requests at once"  # the limit of concurrent requests, whose slots are whole numbers


class UsedFor(NamedTuple):
    """The attributes by which usage is counted separately."""

    key: str  # name of the key; "" if no keys are needed
    model: str
    request_class: str  # ONLINE or BACKGROUND
    day: str  # the day on which the request ended, in UTC, such as 2026-11-27


@dataclass(frozen=True, slots=True)
class Used:
    """The usage of some requests."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were not computed
    num_output_tokens: int = 0
    cost: float = 0.0  # by the prices at the time of the requests

    def __add__(self, other: Used) -> Used:
        return Used(*map(add, values_of(self), values_of(other)))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


SUMS = tuple(each.name for each in fields(Used))
values_of = attrgetter(*SUMS)  # a quarter of the time of `astuple`


class CallUsage(NamedTuple):
    """The usage of one call. `used.num_requests` is 0 if no replica has accepted the call."""

    model: str
    is_background: bool
    used: Used


class BudgetTotals(NamedTuple):
    """The sums that are compared with budgets."""

    tokens_today: int = 0
    tokens_this_month: int = 0
    money_this_month: float = 0.0

    def plus(self, other: BudgetTotals) -> BudgetTotals:
        return BudgetTotals(*map(add, self, other))


MONEY = "money_per_month"
# Maps the name of each budget to the field of `BudgetTotals` that the budget limits. Budgets do not refill gradually as
# rate limits do; they start again with each day or month.
BUDGETS = dict(zip(("tokens_per_day", "tokens_per_month", MONEY), BudgetTotals._fields, strict=True))


class LimitId(NamedTuple):
    """Identifies a limit of a key. A changed value identifies a new limit."""

    key: str
    what: str  # SLOTS, a budget's name from BUDGETS, or "requests" or "tokens", the two rate limits (per minute)
    limit: float


class LimitUse(NamedTuple):
    """A process's part of a limit, and the demand in that process since its last report.

    The three kinds of limits use the fields differently:

    | | rate limit | budget | SLOTS |
    |---|---|---|---|
    | `share` | share of the allowance per minute | 0 | number of slots |
    | `held` | balance, without the initial amount | amount left to reserve, without the initial amount | used slots |
    | `wanted` | sum of requested amounts | sum of requested amounts | most slots that were wanted at once |
    | `refused` | smallest refused amount | smallest refused amount | number of waiting requests |

    `share` is 0 until the owner has assigned one.
    """

    share: float
    held: float
    wanted: float
    refused: float = 0.0


class Share(NamedTuple):
    """The part of a limit that a process receives from the owner, and uses until the next answer."""

    share: float  # in the units of `LimitUse.share`
    amount: float = 0.0  # added to `held` of a rate limit or a budget; negative if the owner takes an amount away
    elsewhere: float = 0.0  # rate limits: the amount outside this process; SLOTS: requests that wait in other processes


class LimitChanges(NamedTuple):
    """The changes of limits in one process since its last report."""

    uses: Mapping[LimitId, LimitUse]
    reserved: Mapping[str, BudgetTotals]  # for each key with budgets: what its running requests may still use
    are_all: bool  # whether all limits are included, not only changed limits


def _set_known_fields(record: Any, state: Sequence[Any]) -> None:
    """Set the fields of a record that was pickled, perhaps by another version of this code.

    Fields are pickled by position, so new fields must be at the end and have defaults. An older version ignores the new
    fields, and a newer version uses their defaults if they are missing.
    """
    for number, each in enumerate(fields(record)):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(record, each.name, state[number] if number < len(state) else default)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """One process's usage since its last report. A process repeats the usage, unchanged, until the owner answers.

    With `has_all_limits` true and `limits` empty, the process gives up its shares of all limits. The owner creates such
    a report for a dead process.
    """

    process: str
    number: int  # increases by one with each new `used`; 0 if the process has used nothing yet
    used: Mapping[UsedFor, Used] = field(default_factory=dict)
    # For each key with budgets: what its running requests may still use, and finished usage that is not in `used`.
    reserved: Mapping[str, BudgetTotals] = field(default_factory=dict)
    limits: Mapping[LimitId, LimitUse] = field(default_factory=dict)
    num_processes: int = 0  # number of processes that share limits, by the last answer
    takes_slack: bool = True  # whether the process receives a part of the amount that no process asks for
    has_all_limits: bool = True  # if False, `reserved` and `limits` include only keys with changes

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageAnswer:
    """The owner's answer to a report."""

    number: int  # number of the last report of this process that the ledger contains
    day: str  # the day that `totals` treat as today
    # For each key in the report, its usage plus the amounts that other processes have reserved.
    totals: Mapping[str, BudgetTotals] = field(default_factory=dict)
    shares: Mapping[LimitId, Share] = field(default_factory=dict)  # if empty, the process retains its shares
    num_processes: int = 0  # number of processes that share limits
    wants_all: bool = False  # the next report must include all limits
    # Keys that the next report must include, even without changes, because the owner will change their parts.
    asks_for: Collection[str] = ()

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A query for usage from one day to another (both included), added up by some fields of `UsedFor`."""

    first_day: str
    last_day: str
    group_by: tuple[str, ...]
    max_rows: int = 10_000


UsageRows = list[tuple[tuple[str, ...], Used]]  # the values of `group_by`, in their order


class Owner(Protocol):
    """The one process that adds up the usage of all processes."""

    async def report_usage(self, report: UsageReport) -> UsageAnswer:
        """Count a report once, however often it is sent. Raises Unavailable if the report cannot be stored now."""

    async def usage(self, query: UsageQuery) -> UsageRows:
        """Return up to `max_rows` + 1 rows. The extra row shows that more rows exist. Raises Unavailable."""


class Limits(Protocol):
    """One process's view of the limits that several processes share."""

    @property
    def takes_slack(self) -> bool:
        """Whether this process receives a part of the amount that no process asks for."""

    def on_hurry(self, hurry: Callable[[], None]) -> None:
        """Set the function to call when a report should not wait for the end of the period."""

    def changes(self, keys: Iterable[str] | None) -> LimitChanges:
        """Return the changed keys and `keys`, or all keys if None, for a report. Resets the counts of demand."""

    def take(self, shares: Mapping[LimitId, Share], *, asked: Collection[str]) -> None:
        """Apply the owner's shares. The next report includes the `asked` keys, early unless the last one did."""

    def lose_owner(self, *, has_share: bool) -> None:
        """Called when the owner stops answering. `has_share`: the owner cannot have reassigned the shares yet."""


def grouped(used: Iterable[tuple[UsedFor, Used]], query: UsageQuery) -> UsageRows:
    """Return the answer to a query over usage in memory."""
    sums: dict[tuple[str, ...], Used] = {}
    for used_for, each in used:
        if query.first_day <= used_for.day <= query.last_day:
            group = tuple(getattr(used_for, name) for name in query.group_by)
            sums[group] = sums.get(group, Used()) + each
    return sorted(sums.items(), key=lambda row: row[0])


def day_of(time_s: float) -> str:
    """Return the day of a time since 1970, in UTC, such as 2026-11-27."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


def month_of(day: str) -> str:
    """Return the month of a day, such as 2026-11."""
    return day[:7]


def next_day(day: str) -> datetime:
    """Return the time after `day` at which daily budgets are renewed."""
    return _midnight(date.fromisoformat(day) + timedelta(days=1))


def next_month(day: str) -> datetime:
    """Return the time after `day` at which monthly budgets are renewed."""
    days_into_next = 32
    return _midnight((date.fromisoformat(day).replace(day=1) + timedelta(days=days_into_next)).replace(day=1))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
