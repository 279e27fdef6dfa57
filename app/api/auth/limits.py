"""The limits of a key: requests and tokens per minute, concurrent requests, body bytes, daily and monthly budgets.

Each process counts only its own requests, with its own clock. The ledger's owner divides the limits among the
processes.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from math import ceil
from operator import add

from app.config import KeyConfig
from app.errors import BudgetSpent, InvalidRequest, LimitReached, MoneySpent, NotPermitted
from app.fair import SharedPool
from app.usage import CallUsage, UsageCounter
from app.usage.records import MONEY, ROUNDING, SLOTS, BudgetTotals, LimitId, LimitUse, Share, next_day, next_month

CONCURRENCY_RETRY_S = 1.0  # the time until a slot is free is unknown, and a retry is cheap
# Limit for all bodies being read or checked. A parsed body is several times larger, but one body is parsed at a time.
MAX_BODY_BYTES_AT_ONCE = 512 * 1024 * 1024
SLOT_WAIT_S = 0.5  # how long a request waits for another process to release a slot
SHARES_MOVE_S = 2.0  # time from a refusal until each process has reported its demand and received its new share
# While the ledger's owner does not answer, all processes together may use UNASSIGNED_PART of a budget. The batches
# process may owe OWED_PART of it. Usage therefore exceeds a budget by at most the sum of both parts.
UNASSIGNED_PART, OWED_PART = 0.05, 0.05


class TokenBucket:
    """An allowance per minute. Unused allowance accumulates up to one minute's amount (the leaky bucket as a meter).

    A negative balance refills first. If several processes share the limit, each process has a bucket for its share.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float], *, share: float = 1.0) -> None:
        self.limit = per_minute
        self._clock = clock
        self._share = self._first_share = share
        self._was_given = False  # whether the owner has assigned a share
        self._owner_answers = False  # whether the owner is answering
        self._balance = share * per_minute
        self._counted_at = clock()
        self._elsewhere = 0.0  # the amount that other processes can pass on
        self._wanted = self._refused = 0.0  # since the last report

    @property
    def remaining(self) -> int:
        """The amount that can be taken now."""
        return max(0, int(self._counted()))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full, if nothing more is taken."""
        return max(0.0, self._share * self.limit - self._counted()) * 60 / self.limit

    def wait_s(self, amount: float, *, may_owe: bool = False) -> float:
        """Return the seconds until the amount can be taken, or until the bucket is full if the amount is too large.

        Refused demand pulls unused allowance from other processes. With `may_owe`, a request may use their allowance
        before it has moved here.
        """
        if may_owe and min(amount, self.limit * (1 - ROUNDING)) <= self._counted() + self._elsewhere:
            return 0.0
        if (self._owner_answers and self._share < 1) or not self._share:
            short = min(amount, self.limit) - self._counted()
            return max(SHARES_MOVE_S, short * 60 / self.limit) if short > ROUNDING * self.limit else 0.0
        most = self._share * self.limit
        return max(0.0, (min(amount, most) - self._counted()) * 60 / most)

    def take(self, amount: float) -> None:
        """Take an amount, which may exceed the balance. A negative amount is returned to the bucket."""
        self._balance = min(self._counted() - amount, self.limit)
        self._wanted += amount

    def refuse(self, amount: float) -> None:
        """Record a refused amount, so that the owner can move allowance here."""
        self._wanted += amount
        self._refused = min(amount, self._refused or amount)

    def use(self) -> LimitUse:
        """Return the values for a report to the owner, and reset the count of demand."""
        given = 0.0 if self._was_given else self._first_share * self.limit
        share = self._share if self._was_given else 0.0
        use = LimitUse(share, self._counted() - given, self._wanted, self._refused)
        self._wanted = self._refused = 0.0
        return use

    def set_share(self, share: Share) -> bool:
        """Apply the owner's share. Returns whether the owner must receive a report of the result."""
        self._counted()
        self._balance += share.amount - (0.0 if self._was_given else self._first_share * self.limit)
        self._share, self._elsewhere = share.share, share.elsewhere
        self._was_given = self._owner_answers = True
        return False

    def lose_owner(self, *, has_share: bool) -> None:
        """Record that the owner no longer answers. With `has_share`, it cannot have reassigned this share yet."""
        self._counted()
        self._owner_answers, self._elsewhere = False, 0.0
        if not has_share:
            self._share = min(self._share, self._first_share)

    def _counted(self) -> float:
        now, most = self._clock(), self._share * self.limit
        if self._balance < most:
            self._balance = min(self._balance + (now - self._counted_at) * most / 60, most)
        self._counted_at = now
        return self._balance


class Slots:
    """A key's slots for concurrent requests. If several processes share the limit, each process has some of the slots.

    A request that finds no free slot may wait for a slot from another process. While requests wait in any process, all
    processes return their free slots immediately: if slots are few, the next request seldom arrives at a process that
    has a free one.
    """

    def __init__(
        self, limit: int, num_taken: Callable[[], int], *, share: float = 1.0, report: Callable[[], None] = lambda: None
    ) -> None:
        """`report` requests an early report to the owner."""
        self.limit = limit
        self._own = limit * share  # the sum over all processes does not exceed the limit
        self.num_here = int(self._own) or ceil(self._own)
        self._num_taken = num_taken
        self._request_report = report
        self._most_taken = self._num_refused = 0  # since the last report
        self._owner_answers = False  # whether the owner is answering
        self._some_wait_elsewhere = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def may_receive_slot(self) -> bool:
        """Whether this process has no free slot, but another process may release one."""
        is_full = self._num_taken() >= self.num_here
        return is_full and self._owner_answers and self.num_here < self.limit and len(self._waiting) < self.limit

    def wait(self, on_free: Callable[[], None]) -> None:
        """Call `on_free` when a slot may be free. Until then, or until `leave`, the request counts as waiting."""
        self._waiting.append(on_free)
        self._request_report()

    def leave(self, on_free: Callable[[], None]) -> None:
        """Stop waiting. Does nothing if `on_free` was already called."""
        if on_free in self._waiting:
            self._waiting.remove(on_free)

    def note_end(self) -> None:
        """Offer a released slot to waiting requests, here or in another process."""
        self._wake()
        if self._some_wait_elsewhere and self._num_taken() < self.num_here:
            self._request_report()

    def _wake(self) -> None:
        for _ in range(min(len(self._waiting), self.num_here - self._num_taken())):
            self._waiting.popleft()()

    def check(self) -> None:
        """Raise LimitReached if no slot is free."""
        num_taken, of_others = self._num_taken(), self.limit - self.num_here
        if num_taken < self.num_here:
            self._most_taken = max(self._most_taken, num_taken + 1)
            return
        self._num_refused += 1
        shared = f" ({of_others:,} of them currently reserved for other processes)" if of_others else ""
        raise LimitReached(
            f"this API key may run {self.limit:,} requests at once{shared} and is running {num_taken:,}; wait for "
            f"one to finish",
            retry_after_s=SHARES_MOVE_S if of_others else CONCURRENCY_RETRY_S,
        )

    def use(self) -> LimitUse:
        """Return the values for a report to the owner, and reset the count of demand."""
        num_taken, num_waiting = self._num_taken(), len(self._waiting)
        wanted = max(self._most_taken, num_taken) + num_waiting + self._num_refused
        self._most_taken = self._num_refused = 0
        if self._some_wait_elsewhere:
            self.num_here = min(self.num_here, num_taken)
        return LimitUse(self.num_here, num_taken, wanted, num_waiting)

    def set_share(self, share: Share) -> bool:
        """See `TokenBucket.set_share`. After the next report, the owner passes withdrawn slots to other processes."""
        before, self.num_here = self.num_here, int(share.share)
        self._owner_answers, self._some_wait_elsewhere = True, share.elsewhere > 0
        self._wake()
        return self.num_here < before

    def lose_owner(self, *, has_share: bool) -> None:
        """See `TokenBucket.lose_owner`."""
        self._owner_answers = self._some_wait_elsewhere = False
        if not has_share:  # this process may have returned all of its slots
            self.num_here = int(self._own) or min(self.num_here, ceil(self._own))
            self._wake()


class BudgetPart:
    """The part of a budget that one process may still reserve. The ledger's owner enlarges and reduces this part."""

    def __init__(self, budget: float, *, share: float) -> None:
        """`share` is the process's share of `UNASSIGNED_PART`."""
        self.limit = budget
        self.left = self._first = share * UNASSIGNED_PART * budget
        self._was_given = False
        self._wanted = self._refused = 0.0  # since the last report

    def allows(self, amount: float, *, may_owe: bool = False) -> bool:
        """Return whether the amount may be reserved. With `may_owe`, another `OWED_PART` of the budget is available."""
        return amount <= self.left + (OWED_PART if may_owe else ROUNDING) * self.limit

    def take(self, amount: float) -> None:
        """Reserve an amount. A negative amount is returned."""
        self.left -= amount
        self._wanted += amount

    def refuse(self, amount: float) -> None:
        """Record a refused amount, so that the owner can enlarge this part."""
        self._wanted += amount
        self._refused = min(amount, self._refused or amount)

    def use(self) -> LimitUse:
        """Return the values for a report to the owner, and reset the count of demand."""
        use = LimitUse(0.0, self.left - (0.0 if self._was_given else self._first), self._wanted, self._refused)
        self._wanted = self._refused = 0.0
        return use

    def set_share(self, share: Share) -> bool:
        """Add the amount that the owner assigns, or subtract what it withdraws. See `TokenBucket.set_share`."""
        if self._was_given:  # since the report, requests may have reserved some of the amount that the owner withdraws
            self.left += max(share.amount, -max(0.0, self.left))
        else:
            self.left += share.amount - self._first
        self._was_given = True
        return share.amount < 0

    def lose_owner(self, *, has_share: bool) -> None:
        """See `TokenBucket.lose_owner`."""
        if not has_share:
            self.left = min(self.left, self._first)


SharedLimit = TokenBucket | Slots | BudgetPart


class SharedPools:
    """The pools that all accounts of a process share, and the counter of the process's usage."""

    def __init__(
        self, max_requests: int = sys.maxsize, *, first_share: float = 1.0, shares_budgets: bool = False
    ) -> None:
        """`max_requests` limits the requests that the process serves concurrently.

        `first_share` is the process's share of each key's limits until the owner assigns a share. With
        `shares_budgets`, the owner also assigns parts of budgets; otherwise, the process enforces budgets on its own.
        """
        self.first_share = first_share
        self.shares_budgets = shares_budgets
        self.requests = SharedPool[Account](max_requests)
        self.body_bytes = SharedPool[Account](MAX_BODY_BYTES_AT_ONCE)
        # Limit for the log-probabilities of all running calls. Each takes 16 bytes until the answer is written, and
        # about 70 bytes in a stream that the client does not read.
        max_logprobs_at_once = 8_000_000
        self.logprobs = SharedPool[Account](max_logprobs_at_once)
        self.usage = UsageCounter()
        self.changed: set[str] | None = None  # the keys whose limits the next report must include, or None for all
        self.request_report: Callable[[], None] = lambda: None  # requests an early report to the owner

    def note_change(self, key: str) -> None:
        """Include the limits of a key in the next report."""
        if self.changed is not None:
            self.changed.add(key)


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one key since this process started, or since it first loaded the key."""

    num_requests: int = 0  # accepted requests, including running requests
    num_refused: int = 0  # requests that a limit of the key has refused
    num_running: int = 0
    num_tokens: int = 0  # prompt and output tokens of requests that have ended

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of the usage in two processes."""
        return Usage(*map(add, astuple(self), astuple(other)))


class Account:
    """The usage and the limits of one key. An account exists as long as its key, even if the limits change."""

    def __init__(
        self,
        key: KeyConfig | None,
        clock: Callable[[], float],
        pools: SharedPools | None = None,
        *,
        may_administer: bool = False,
    ) -> None:
        """Create an account. All requests to a service without keys share one account, without a key, name or limits.

        All accounts of the process share `pools`. By default, the account has its own pools. `may_administer` opens the
        admin routes to requests without a key. A key has its own setting for this.
        """
        self._clock = clock
        self.pools = pools or SharedPools()
        self._may_administer_without_key = may_administer
        self._num_requests = self._num_refused = self._num_tokens = 0
        self.reserved = BudgetTotals()  # the maximum that running requests may use
        self.set_limits(key)

    def set_limits(self, key: KeyConfig | None) -> None:
        """Replace the limits, and start with full buckets."""
        self.key = key
        self.name = key.name if key else ""
        self.may_administer = key.admin if key else self._may_administer_without_key
        self._requests = self._bucket(key.requests_per_minute if key else None)
        self.tokens = self._bucket(key.tokens_per_minute if key else None)
        at_once = key.max_concurrency if key else None
        taken = partial(self.pools.requests.held, self)
        share, report = self.pools.first_share, lambda: self.pools.request_report()  # the function may be set later
        self.slots = Slots(at_once, taken, share=share, report=report) if at_once else None
        self.budgets = key.budgets if key else {}
        shared = self.budgets if self.pools.shares_budgets else {}
        self._budget_parts = {name: BudgetPart(each, share=share) for name, each in shared.items()}
        limits: dict[str, SharedLimit | None] = {"requests": self._requests, "tokens": self.tokens, SLOTS: self.slots}
        limits |= self._budget_parts
        self.shared_limits = {LimitId(self.name, what, limit.limit): limit for what, limit in limits.items() if limit}
        self.is_limited = bool(self.shared_limits or self.budgets)  # by more than the process's pools

    @property
    def usage(self) -> Usage:
        return Usage(self._num_requests, self._num_refused, self.pools.requests.held(self), self._num_tokens)

    async def wait_for_slot(self) -> None:
        """Wait up to `SLOT_WAIT_S` if no slot is free, but another process may release one. Call before `reserve`."""
        slots = self.slots
        if slots is None or not slots.may_receive_slot:
            return
        self.pools.note_change(self.name)
        is_free = asyncio.Event()
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                while slots.may_receive_slot:  # another request may have taken the slot
                    is_free.clear()
                    slots.wait(is_free.set)
                    await is_free.wait()
        except TimeoutError:
            pass
        finally:
            slots.leave(is_free.set)

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """Hold a slot during one HTTP request, from its first byte to its last. Raises LimitReached."""
        slots, running = self.slots, self.pools.requests
        if self.is_limited:
            self.pools.note_change(self.name)
        try:
            if slots is None and not running.allows(self, 1):
                raise LimitReached(
                    f"{running.held(self):,} requests {self.of_sender} are running, and one more would exceed one "
                    f"sender's current share of this server's {running.size:,} slots; wait for one to finish",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )
            if slots is not None:
                slots.check()
            if self._requests:
                _check(self._requests, 1, "requests")
                self._requests.take(1)
        except LimitReached:
            self._num_refused += 1
            raise
        self._num_requests += 1
        running.take(self, 1)
        reservation = Reservation(self)
        try:
            yield reservation
        except LimitReached:  # the request needed more tokens than were left
            self._num_requests -= 1
            self._num_refused += 1
            raise
        finally:
            running.take(self, -1)
            if self.slots is not None:
                self.slots.note_end()
            self._settle(reservation)

    @contextmanager
    def reserve_for_stored(self) -> Iterator[Reservation]:
        """Reserve for a stored response, which the receiving process has already counted as a request.

        The receiving process holds the tokens for the response, so this process may use them before they have moved.
        """
        reservation = Reservation(self, may_owe=True)
        try:
            yield reservation
        finally:
            self._settle(reservation)

    def _settle(self, reservation: Reservation) -> None:
        reservation.release_body()
        self.pools.logprobs.take(self, -reservation.num_logprobs)
        calls = [call for usage in reservation.usages if (call := usage()).used.num_requests]
        reservation.usages.clear()  # they refer to answers, which must not outlive the request
        for call in calls:
            self.pools.usage.add(self.name, call)
        num_used = sum(call.used.num_tokens for call in calls)
        self._num_tokens += num_used
        num_reserved, cost = reservation.num_reserved, reservation.cost_reserved
        if not self.is_limited and not num_reserved:
            return
        self.pools.note_change(self.name)
        self.reserved = self.reserved.plus(BudgetTotals(-num_reserved, -num_reserved, -cost))
        self._take_of_budgets(num_used - num_reserved, sum(call.used.cost for call in calls) - cost)
        if self.tokens:
            self.tokens.take(num_used - num_reserved)

    @contextmanager
    def reserve_item(self) -> Iterator[Reservation]:
        """Reserve for one batch item, which counts as a request unless the block raises LimitReached."""
        with self.reserve() as reservation:
            try:
                yield reservation
            except LimitReached:
                if self._requests:
                    self._requests.take(-1)
                raise

    def check_model(self, name: str) -> None:
        """Raise NotPermitted if the key may not use this model."""
        if not self.may_use(name):
            raise NotPermitted(f"this API key may not use the model {name!r}; send another key", param="model")

    def may_use(self, model_name: str) -> bool:
        """Return whether the key may use this model."""
        return self.key is None or not self.key.models or model_name in self.key.models

    def max_tokens(self, asked: int | None, param: str) -> int | None:
        """Return the key's limit of output tokens or None. Raises InvalidRequest if `asked`, in `param`, exceeds it."""
        cap = self.key.max_tokens if self.key else None
        if cap is not None and asked is not None and asked > cap:
            raise InvalidRequest(f"{param} is {asked:,}; this API key may request at most {cap:,}", param=param)
        return cap

    def check_priority(self, asked: int) -> None:
        """Raise InvalidRequest if the key may not use a priority this high (a number this low)."""
        if self.key is not None and asked < self.key.min_priority:
            raise InvalidRequest(
                f"`priority` is {asked}; this API key may use only {self.key.min_priority} and above (lower numbers "
                f"run first); raise it",
                param="priority",
            )

    def check_budgets(self, num_tokens: int, cost: float, *, may_owe: bool = False) -> None:
        """Raise BudgetSpent or MoneySpent if a request may use more than a daily or monthly budget has left.

        Raises LimitReached if the budget has enough, but other processes hold the amount that the request needs.
        """
        counter = self.pools.usage
        totals, end_of_month = counter.totals(self.name).plus(self.reserved), next_month(counter.today)
        used_and_needed = {
            "tokens_per_day": (totals.tokens_today, num_tokens, next_day(counter.today)),
            "tokens_per_month": (totals.tokens_this_month, num_tokens, end_of_month),
            MONEY: (totals.money_this_month, cost, end_of_month),
        }
        for name, budget in self.budgets.items():
            used, needed, renewed_at = used_and_needed[name]
            amount = partial(_amount, name)
            if used + needed > budget:
                raise (MoneySpent if name == MONEY else BudgetSpent)(
                    f"{name} of this API key is {amount(budget)}; {amount(used)} are used or reserved, and this "
                    f"request needs up to {amount(needed)}; the budget is renewed at "
                    f"{renewed_at:%Y-%m-%dT%H:%M:%SZ}; wait, or request fewer tokens",
                    retry_after_s=renewed_at.timestamp() - counter.now,
                )
            part = self._budget_parts.get(name)
            if part is not None and not part.allows(needed, may_owe=may_owe):
                part.refuse(needed)
                raise LimitReached(
                    f"{name} of this API key is {amount(budget)}; {amount(used)} are used or reserved. This request "
                    f"needs up to {amount(needed)}, but this process may use only {amount(max(0, part.left))} of the "
                    f"rest now. Try again in {SHARES_MOVE_S:.0f} s, or request fewer tokens",
                    retry_after_s=SHARES_MOVE_S,
                )

    def reserve_of_budgets(self, num_tokens: int, cost: float) -> None:
        """Reserve the maximum usage of a running request in all budgets."""
        self.reserved = self.reserved.plus(BudgetTotals(num_tokens, num_tokens, cost))
        self._take_of_budgets(num_tokens, cost)

    def _take_of_budgets(self, num_tokens: int, cost: float) -> None:
        for name, part in self._budget_parts.items():
            part.take(cost if name == MONEY else num_tokens)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-…` headers for the key's limits per minute."""
        headers: dict[str, str] = {}
        for what, bucket in (("requests", self._requests), ("tokens", self.tokens)):
            if bucket:
                headers[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(bucket.remaining)
                headers[f"x-ratelimit-reset-{what}"] = f"{bucket.reset_s:.3f}s"
        return headers

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return TokenBucket(per_minute, self._clock, share=self.pools.first_share) if per_minute else None

    @property
    def of_sender(self) -> str:
        """The sender of a request, for error messages."""
        return "of this API key" if self.key else "without a key"


def _amount(budget_name: str, amount: float) -> str:
    return f"{amount:,.4f}" if budget_name == MONEY else f"{int(amount):,}"


def _check(bucket: TokenBucket, amount: int, what: str, *, may_owe: bool = False) -> None:
    wait_s = bucket.wait_s(amount, may_owe=may_owe)
    if wait_s > 0:
        bucket.refuse(amount)
        raise LimitReached(
            f"this API key may use {bucket.limit:,} {what} a minute; this request needs up to {amount:,}, and "
            f"{bucket.remaining:,} are left; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


@dataclass(slots=True)
class Reservation:
    """The tokens, money and memory that one HTTP request has reserved from its account."""

    account: Account
    may_owe: bool = False  # whether the request may use amounts that other processes still hold
    num_reserved: int = 0
    cost_reserved: float = 0.0
    num_body_bytes: int = 0
    num_logprobs: int = 0
    usages: list[Callable[[], CallUsage]] = field(default_factory=list)  # return the usage so far; called at the end

    def reserve(self, num_tokens: int, *, num_logprobs: int = 0, cost: float = 0.0) -> None:
        """Reserve the maximum that a request may need. When the request ends, the unused part is returned.

        Raises LimitReached, and the errors of `Account.check_budgets`.
        """
        account = self.account
        account.pools.note_change(account.name)
        if account.budgets:
            account.check_budgets(num_tokens, cost, may_owe=self.may_owe)
        self.hold_logprobs(num_logprobs)
        if account.tokens:
            _check(account.tokens, num_tokens, "tokens", may_owe=self.may_owe)
            account.tokens.take(num_tokens)
        self.num_reserved += num_tokens
        self.cost_reserved += cost
        account.reserve_of_budgets(num_tokens, cost)

    def hold_logprobs(self, num_logprobs: int) -> None:
        """Reserve memory for an answer's log-probabilities until the request ends. Raises LimitReached."""
        account, pool = self.account, self.account.pools.logprobs
        if num_logprobs and not pool.allows(account, num_logprobs):
            raise LimitReached(
                f"this answer may contain {num_logprobs:,} log-probabilities, and other running answers "
                f"{account.of_sender} up to {pool.held(account):,}. Together, they exceed one sender's current share "
                f"of the {pool.size:,} log-probabilities that this server allows at once; wait for the other answers "
                f"to finish, or request fewer tokens or log-probabilities",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        pool.take(account, num_logprobs)
        self.num_logprobs += num_logprobs

    def hold_body(self, num_bytes: int) -> None:
        """Count received bytes of the body until `release_body` or the request's end. Raises LimitReached."""
        account, pool = self.account, self.account.pools.body_bytes
        if not pool.allows(account, num_bytes):
            raise LimitReached(
                f"request bodies {account.of_sender} with {pool.held(account):,} bytes are already being read, and "
                f"more bytes would exceed one sender's current share of the {pool.size:,} bytes that this server reads "
                f"at once; send fewer requests at once",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        pool.take(account, num_bytes)
        self.num_body_bytes += num_bytes

    def release_body(self) -> None:
        """Stop counting the body. Call once the body is no longer in memory."""
        self.account.pools.body_bytes.take(self.account, -self.num_body_bytes)
        self.num_body_bytes = 0


def rate_limit_headers(state: Mapping[str, object]) -> dict[str, str]:
    """Return the rate limit headers of the account in a request's state, or {} before the account is known."""
    account = state.get("account")
    return account.headers() if isinstance(account, Account) else {}
