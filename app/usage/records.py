"""Records of usage and limits that processes exchange with the ledger's owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from operator import add, attrgetter
from typing import Any, NamedTuple, Protocol

ONLINE, BACKGROUND = "online", "background"
ROUNDING = 1e-6  # as a fraction of a limit; smaller differences are ignored
SLOTS = "requests at once"  # names the limit on concurrent requests, which is a whole number of slots


class UsedFor(NamedTuple):
    """The attributes of a request by which usage is grouped."""

    key: str  # name of the key; "" if no keys are needed
    model: str
    request_class: str  # ONLINE or BACKGROUND
    day: str  # the UTC day on which the request ended, such as 2026-11-27


@dataclass(frozen=True, slots=True)
class Used:
    """The summed usage of any number of requests."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were cached and need not be computed
    num_output_tokens: int = 0
    cost: float = 0.0  # at the prices when the requests ran

    def __add__(self, other: Used) -> Used:
        return Used(*map(add, values_of(self), values_of(other)))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


SUMS = tuple(each.name for each in fields(Used))
values_of = attrgetter(*SUMS)  # four times as fast as `astuple`


class CallUsage(NamedTuple):
    """The usage of one call. `used.num_requests` is 0 if no replica accepted the call."""

    model: str
    is_background: bool
    used: Used


class BudgetTotals(NamedTuple):
    """Amounts that count against a key's budgets: its usage, or the reservations of its running requests."""

    tokens_today: int = 0
    tokens_this_month: int = 0
    money_this_month: float = 0.0

    def plus(self, other: BudgetTotals) -> BudgetTotals:
        return BudgetTotals(*map(add, self, other))


MONEY = "money_per_month"
# Maps each budget's name to the field of `BudgetTotals` that it limits. Unlike rate limits, budgets do not refill
# gradually; they are renewed every day or month.
BUDGETS = dict(zip(("tokens_per_day", "tokens_per_month", MONEY), BudgetTotals._fields, strict=True))


class LimitId(NamedTuple):
    """Identifies one of a key's limits. If the limit's value is changed, it counts as a different limit."""

    key: str
    what: str  # SLOTS, a budget's name from BUDGETS, or "requests" or "tokens", the two rate limits (per minute)
    limit: float


class LimitUse(NamedTuple):
    """A process's part of a limit, and the process's demand since its last report.

    The meaning of the fields depends on the kind of limit:

    | | rate limit | budget | SLOTS |
    |---|---|---|---|
    | `share` | fraction of the limit, 0 to 1 | 0 | number of slots |
    | `held` | balance, minus the initial amount | amount left to reserve, minus the initial amount | slots in use |
    | `wanted` | sum of requested amounts | sum of requested amounts | peak of requested slots |
    | `refused` | smallest refused amount | smallest refused amount | number of waiting requests |

    A rate limit's `share` is 0 until the owner assigns one.
    """

    share: float
    held: float
    wanted: float
    refused: float = 0.0


class Share(NamedTuple):
    """The part of a limit that the owner assigns to a process, which may use it until the next answer."""

    share: float  # in the units of `LimitUse.share`
    amount: float = 0.0  # added to a rate limit's or budget's `held`; negative if the owner withdraws an amount
    elsewhere: float = 0.0  # the rate limit's amount outside this process; for SLOTS, requests waiting elsewhere


class LimitChanges(NamedTuple):
    """The limits and reservations in one process that may have changed since its last report."""

    uses: Mapping[LimitId, LimitUse]
    reserved: Mapping[str, BudgetTotals]  # for each key with budgets, the amounts that its running requests may use
    are_all: bool  # whether all keys are included, not only changed ones


def _set_known_fields(record: Any, state: Sequence[Any]) -> None:
    """Restore a record that another version of this code may have pickled.

    Fields are pickled by position, so new fields must be added at the end and have defaults. Older versions ignore new
    fields, and newer versions use the defaults of missing fields.
    """
    for number, each in enumerate(fields(record)):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(record, each.name, state[number] if number < len(state) else default)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """One process's usage since its last report. Until the owner answers, the process repeats the same usage.

    A report with `has_all_limits` but no `limits`, such as one from a dead process's journal, releases all shares.
    """

    process: str
    number: int  # increases by one with each new `used`; 0 if the process has not reported any usage yet
    used: Mapping[UsedFor, Used] = field(default_factory=dict)
    # For each key with budgets, the amounts that its running requests may use, plus usage that `used` does not include.
    reserved: Mapping[str, BudgetTotals] = field(default_factory=dict)
    limits: Mapping[LimitId, LimitUse] = field(default_factory=dict)
    num_processes: int = 0  # number of processes that share limits, according to the owner's last answer
    takes_slack: bool = True  # whether the process receives a part of the amount that no process requests
    has_all_limits: bool = True  # if False, `reserved` and `limits` include only keys with changes

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageAnswer:
    """The owner's answer to a report."""

    number: int  # number of this process's last report that is in the ledger
    day: str  # the day that counts as today in `totals`
    # For each key in the report's `reserved`, its usage plus the amounts that other processes have reserved.
    totals: Mapping[str, BudgetTotals] = field(default_factory=dict)
    shares: Mapping[LimitId, Share] = field(default_factory=dict)  # if empty, the process keeps its shares
    num_processes: int = 0  # number of processes that share limits
    wants_all: bool = False  # whether the next report must include all limits
    # Keys that the next report must include, even if they are unchanged, because their parts are changing.
    asks_for: Collection[str] = ()

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A query for the usage between two days (both included), grouped by some fields of `UsedFor`."""

    first_day: str
    last_day: str
    group_by: tuple[str, ...]
    max_rows: int = 10_000


UsageRows = list[tuple[tuple[str, ...], Used]]  # values of the `group_by` fields, and their usage


class Owner(Protocol):
    """The single process that adds up the usage of all processes."""

    async def report_usage(self, report: UsageReport) -> UsageAnswer:
        """Count a report, once even if it is sent again. Raises Unavailable if the report cannot be stored now."""

    async def usage(self, query: UsageQuery) -> UsageRows:
        """Return up to `max_rows` + 1 rows. The extra row shows that there are more. Raises Unavailable."""


class Limits(Protocol):
    """One process's parts of the limits that several processes share."""

    @property
    def takes_slack(self) -> bool:
        """Whether this process receives a part of the amount that no process requests."""

    def on_report_request(self, request_report: Callable[[], None]) -> None:
        """Set the function to call when a report should be sent before the end of the period."""

    def changes(self, keys: Iterable[str] | None) -> LimitChanges:
        """Return the limits of changed keys and `keys`, or of all keys if None. Resets the counts of demand."""

    def take(self, shares: Mapping[LimitId, Share], *, asked: Collection[str]) -> None:
        """Apply the owner's shares, and report the `asked` keys next, early if they were not all in the last report."""

    def lose_owner(self, *, has_share: bool) -> None:
        """Record that the owner has stopped answering. With `has_share`, it cannot have reassigned the shares yet."""


def grouped(used: Iterable[tuple[UsedFor, Used]], query: UsageQuery) -> UsageRows:
    """Answer a query from usage in memory."""
    sums: dict[tuple[str, ...], Used] = {}
    for used_for, each in used:
        if query.first_day <= used_for.day <= query.last_day:
            group = tuple(getattr(used_for, name) for name in query.group_by)
            sums[group] = sums.get(group, Used()) + each
    return sorted(sums.items(), key=lambda row: row[0])


def day_of(time_s: float) -> str:
    """Return the UTC day of a time in seconds since 1970, such as 2026-11-27."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


def month_of(day: str) -> str:
    """Return the month of a day, such as 2026-11."""
    return day[:7]


def next_day(day: str) -> datetime:
    """Return when the daily budgets for `day` are renewed."""
    return _midnight(date.fromisoformat(day) + timedelta(days=1))


def next_month(day: str) -> datetime:
    """Return when the monthly budgets for `day` are renewed."""
    days_into_next = 32
    return _midnight((date.fromisoformat(day).replace(day=1) + timedelta(days=days_into_next)).replace(day=1))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
