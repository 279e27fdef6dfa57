"""What keys have used, as it goes from the processes that send requests to the one that keeps the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from operator import add, attrgetter
from typing import Any, NamedTuple, Protocol

ONLINE, BACKGROUND = "online", "background"
ROUNDING = 1e-6  # of a limit: so much less is as much
PLACES = "requests at once"  # a limit of these is of whole ones


class UsedFor(NamedTuple):
    """What is counted apart."""

    key: str  # its name; "" where no keys are needed
    model: str
    request_class: str  # ONLINE or BACKGROUND
    day: str  # on which the request has ended, in UTC, as 2026-11-27


@dataclass(frozen=True, slots=True)
class Used:
    """What some requests have used."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompts' tokens, those that were not computed
    num_output_tokens: int = 0
    cost: float = 0.0  # by the prices of their time

    def __add__(self, other: Used) -> Used:
        return Used(*map(add, values_of(self), values_of(other)))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


SUMS = tuple(each.name for each in fields(Used))
values_of = attrgetter(*SUMS)  # a quarter of the time of `astuple`


class CallUsage(NamedTuple):
    """What one call has used of a model; no requests: no replica has accepted it."""

    model: str
    is_background: bool
    used: Used


class BudgetTotals(NamedTuple):
    """What budgets are compared with."""

    tokens_today: int = 0
    tokens_this_month: int = 0
    money_this_month: float = 0.0

    def plus(self, other: BudgetTotals) -> BudgetTotals:
        return BudgetTotals(*map(add, self, other))


MONEY = "money_per_month"
# The budgets that a key may have, and the total that each is compared with. A budget does not fill up with time.
BUDGETS = dict(zip(("tokens_per_day", "tokens_per_month", MONEY), BudgetTotals._fields, strict=True))


class LimitId(NamedTuple):
    """A limit of a key: of PLACES, of one of BUDGETS, or of an amount a minute. Another amount is another limit."""

    key: str
    what: str
    limit: float


class LimitUse(NamedTuple):
    """What one process has of a limit, and what it was asked for since its last report."""

    share: float  # the part of what comes in a minute, 0 before it was given any; of PLACES how many; 0 of a budget
    held: float  # what its bucket has, or what it may reserve, without what it began with; of PLACES how many are taken
    wanted: float  # the sum of what was asked for; of PLACES the most at once
    refused: float = 0.0  # the smallest request that was refused; of PLACES how many requests wait for one


class Share(NamedTuple):
    """What a process has of a limit from now on."""

    share: float
    given: float = 0.0  # what its bucket has more than before, or what it may reserve more; below 0: less
    # Of a bucket: what other processes have of it, and what none has. Of PLACES: how many requests wait elsewhere.
    elsewhere: float = 0.0


class LimitChanges(NamedTuple):
    """What has changed in one process since its last report."""

    uses: Mapping[LimitId, LimitUse]
    reserved: Mapping[str, BudgetTotals]  # by key with budgets: what its running requests may use
    are_all: bool  # all limits that there are, and not only changed ones


def _set_known_fields(record: Any, state: Sequence[Any]) -> None:
    """Set the fields of a record that was pickled, perhaps by another version of this code.

    Fields go by position, so new ones come at the end with a default: an older version passes them over, and a newer
    version takes their defaults where they are missing.
    """
    for number, each in enumerate(fields(record)):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(record, each.name, state[number] if number < len(state) else default)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """What one process has counted since its last report; that is sent again, unchanged, until it is answered.

    Without any of all `limits` the process has no part of any: it has died, and another one reports what it left.
    """

    process: str
    number: int  # rises by one from report to report; 0: it has used nothing yet
    used: Mapping[UsedFor, Used] = field(default_factory=dict)
    reserved: Mapping[str, BudgetTotals] = field(
        default_factory=dict
    )  # by key with budgets: what running requests may use, and what has ended and is not in `used` yet
    limits: Mapping[LimitId, LimitUse] = field(default_factory=dict)
    num_processes: int = 0  # that share limits, as it was last told
    takes_slack: bool = True  # it has a part of what no process asks for, too
    has_all_limits: bool = True  # else `reserved` and `limits` are of keys with changes, and others are as before

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageAnswer:
    """What the owner knows after a report."""

    number: int  # of the last report of this process that counts
    day: str  # the one that `totals` call today
    totals: Mapping[str, BudgetTotals] = field(
        default_factory=dict
    )  # by key that was named, with what others have reserved
    shares: Mapping[LimitId, Share] = field(default_factory=dict)  # none: those that it has go on
    num_processes: int = 0  # that share limits
    wants_all: bool = False  # the next report is to have all limits
    # Keys that the next report is to have, with changes or without: the parts of their limits are to change.
    asks_for: Collection[str] = ()

    __setstate__ = _set_known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Which usage is asked for: from one day to another, both included, added up by some fields of `UsedFor`."""

    first_day: str
    last_day: str
    group_by: tuple[str, ...]
    max_rows: int = 10_000


UsageRows = list[tuple[tuple[str, ...], Used]]  # the values of `group_by`, in their order


class Owner(Protocol):
    """The one process that adds up what all have used."""

    async def report_usage(self, report: UsageReport) -> UsageAnswer:
        """Count a report, once however often it is sent. Raises Unavailable when nothing can be kept now."""

    async def usage(self, query: UsageQuery) -> UsageRows:
        """At most `max_rows` and one more. Raises Unavailable."""


class Limits(Protocol):
    """The limits of keys in one process, as far as processes share them."""

    @property
    def takes_slack(self) -> bool:
        """Whether this process gets a part of what no process asks for."""

    def on_hurry(self, hurry: Callable[[], None]) -> None:
        """Call this when a report should not wait for the end of the period."""

    def changes(self, keys: Iterable[str] | None) -> LimitChanges:
        """What is reported, of keys with changes and of these; None: of all. What was asked for counts from here on."""

    def take(self, shares: Mapping[LimitId, Share], *, asked: Collection[str]) -> None:
        """What the owner gives. The next report has the keys that are asked for, and soon if this one had not."""

    def lose_owner(self, *, has_share: bool) -> None:
        """The owner is silent. `has_share`: it cannot have given to others yet what it gave before."""


def grouped(used: Iterable[tuple[UsedFor, Used]], query: UsageQuery) -> UsageRows:
    """The answer to a query from what is in memory."""
    sums: dict[tuple[str, ...], Used] = {}
    for used_for, each in used:
        if query.first_day <= used_for.day <= query.last_day:
            group = tuple(getattr(used_for, name) for name in query.group_by)
            sums[group] = sums.get(group, Used()) + each
    return sorted(sums.items(), key=lambda row: row[0])


def day_of(time_s: float) -> str:
    """The day of a time since 1970, in UTC."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


def month_of(day: str) -> str:
    """As 2026-11."""
    return day[:7]


def next_day(day: str) -> datetime:
    """When budgets of a day begin anew."""
    return _midnight(date.fromisoformat(day) + timedelta(days=1))


def next_month(day: str) -> datetime:
    """When budgets of a month begin anew."""
    days_into_next = 32
    return _midnight((date.fromisoformat(day).replace(day=1) + timedelta(days=days_into_next)).replace(day=1))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
