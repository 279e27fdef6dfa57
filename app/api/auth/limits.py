"""What one key may use: requests and tokens a minute, requests and bytes of bodies at once, budgets of days and months.

All numbers are those of this process, by its clock.
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
from app.usage.records import MONEY, PLACES, ROUNDING, BudgetTotals, LimitId, LimitUse, Share, next_day, next_month

# How soon a place among the requests at once is free cannot be known, and a retry is cheap.
CONCURRENCY_RETRY_S = 1.0
# Of bodies that arrive or are being checked. They take several times as much once they are parsed, one after the other.
MAX_BODY_BYTES_AT_ONCE = 512 * 1024 * 1024
PLACE_WAIT_S = 0.5  # a request waits so long for a place that may come from another process
SHARES_MOVE_S = 2.0  # after a refusal: the next report of each process and its answer
# All processes together may use this part of a budget before the owner of the ledger has answered them, and after they
# have lost the owner. The process of batches may owe the other part. So a budget is exceeded by at most both.
UNTOLD_PART, OWED_PART = 0.05, 0.05


class TokenBucket:
    """An allowance for each minute, of which at most one minute's can be saved up (the leaky bucket as a meter).

    A balance below zero is filled up first. Where several processes share the limit, this is the part of one.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float], *, share: float = 1.0) -> None:
        self.limit = per_minute
        self._clock = clock
        self._share = self._first_share = share
        self._was_given = False  # a share, by the owner
        self._is_led = False  # the owner answers
        self._balance = share * per_minute
        self._counted_at = clock()
        self._elsewhere = 0.0  # what can come here from other processes
        self._wanted = self._refused = 0.0  # since the last report

    @property
    def remaining(self) -> int:
        """What could be taken now."""
        return max(0, int(self._counted()))

    @property
    def reset_s(self) -> float:
        """Seconds until it is full again, if nothing is taken."""
        return max(0.0, self._share * self.limit - self._counted()) * 60 / self.limit

    def wait_s(self, amount: float, *, may_owe: bool = False) -> float:
        """Seconds until so much could be taken; for more than a minute's worth, until the bucket is full.

        What is asked for here comes here from other processes, as far as there is any. With `may_owe` the amount may be
        taken before it has come.
        """
        if may_owe and min(amount, self.limit * (1 - ROUNDING)) <= self._counted() + self._elsewhere:
            return 0.0
        if (self._is_led and self._share < 1) or not self._share:
            short = min(amount, self.limit) - self._counted()
            return max(SHARES_MOVE_S, short * 60 / self.limit) if short > ROUNDING * self.limit else 0.0
        most = self._share * self.limit
        return max(0.0, (min(amount, most) - self._counted()) * 60 / most)

    def take(self, amount: float) -> None:
        """Take an amount, also beyond the balance; a negative amount is given back."""
        self._balance = min(self._counted() - amount, self.limit)
        self._wanted += amount

    def refuse(self, amount: float) -> None:
        """It was asked for more than there was."""
        self._wanted += amount
        self._refused = min(amount, self._refused or amount)

    def use(self) -> LimitUse:
        """What is reported; what was asked for counts from here on."""
        given = 0.0 if self._was_given else self._first_share * self.limit
        share = self._share if self._was_given else 0.0
        use = LimitUse(share, self._counted() - given, self._wanted, self._refused)
        self._wanted = self._refused = 0.0
        return use

    def set_share(self, share: Share) -> bool:
        """What the owner gives. Returns whether the owner has to be told what has come of it."""
        self._counted()
        self._balance += share.given - (0.0 if self._was_given else self._first_share * self.limit)
        self._share, self._elsewhere = share.share, share.elsewhere
        self._was_given = self._is_led = True
        return False

    def lose_owner(self, *, has_share: bool) -> None:
        """The owner is silent. `has_share`: it cannot have given the share to others yet."""
        self._counted()
        self._is_led, self._elsewhere = False, 0.0
        if not has_share:
            self._share = min(self._share, self._first_share)

    def _counted(self) -> float:
        now, most = self._clock(), self._share * self.limit
        if self._balance < most:
            self._balance = min(self._balance + (now - self._counted_at) * most / 60, most)
        self._counted_at = now
        return self._balance


class Places:
    """How many requests a key may have at once: all, or where several processes share the limit, the part of one.

    A request that finds no free place here may wait for one from another process. While requests wait in any process,
    each gives its free places back, and does so at once: where places are few, the next request seldom comes to the
    process that has one.
    """

    def __init__(
        self, limit: int, num_taken: Callable[[], int], *, share: float = 1.0, hurry: Callable[[], None] = lambda: None
    ) -> None:
        """`hurry` is called when the owner should soon be told."""
        self.limit = limit
        self._own = limit * share  # all processes together have no more than the limit
        self.num_here = int(self._own) or ceil(self._own)
        self._num_taken = num_taken
        self._hurry = hurry
        self._most_taken = self._num_refused = 0  # since the last report
        self._is_led = False  # the owner answers
        self._some_wait_elsewhere = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def may_come(self) -> bool:
        """Whether none is free here, and a request may wait for one from another process."""
        is_full = self._num_taken() >= self.num_here
        return is_full and self._is_led and self.num_here < self.limit and len(self._waiting) < self.limit

    def wait(self, on_free: Callable[[], None]) -> None:
        """Call this when a place may be free. Until then, or until `leave`, the request counts as one that waits."""
        self._waiting.append(on_free)
        self._hurry()

    def leave(self, on_free: Callable[[], None]) -> None:
        """The request waits no longer."""
        if on_free in self._waiting:
            self._waiting.remove(on_free)

    def note_end(self) -> None:
        """A request has given its place back."""
        self._wake()
        if self._some_wait_elsewhere and self._num_taken() < self.num_here:
            self._hurry()

    def _wake(self) -> None:
        for _ in range(min(len(self._waiting), self.num_here - self._num_taken())):
            self._waiting.popleft()()

    def check(self) -> None:
        """Raises LimitReached when none is free."""
        num_taken, of_others = self._num_taken(), self.limit - self.num_here
        if num_taken < self.num_here:
            self._most_taken = max(self._most_taken, num_taken + 1)
            return
        self._num_refused += 1
        shared = f" ({of_others:,} of them in other processes now)" if of_others else ""
        raise LimitReached(
            f"this API key may have {self.limit:,} requests at once{shared} and has {num_taken:,}; wait for one of "
            f"them",
            retry_after_s=SHARES_MOVE_S if of_others else CONCURRENCY_RETRY_S,
        )

    def use(self) -> LimitUse:
        """What is reported; what was asked for counts from here on."""
        num_taken, num_waiting = self._num_taken(), len(self._waiting)
        wanted = max(self._most_taken, num_taken) + num_waiting + self._num_refused
        self._most_taken = self._num_refused = 0
        if self._some_wait_elsewhere:
            self.num_here = min(self.num_here, num_taken)
        return LimitUse(self.num_here, num_taken, wanted, num_waiting)

    def set_share(self, share: Share) -> bool:
        """As of a bucket. Places that the owner takes back are another's when it has been told."""
        before, self.num_here = self.num_here, int(share.share)
        self._is_led, self._some_wait_elsewhere = True, share.elsewhere > 0
        self._wake()
        return self.num_here < before

    def lose_owner(self, *, has_share: bool) -> None:
        """As of a bucket."""
        self._is_led = self._some_wait_elsewhere = False
        if not has_share:  # it may have given all of its places back
            self.num_here = int(self._own) or min(self.num_here, ceil(self._own))
            self._wake()


class BudgetPart:
    """How much of a budget one process may still reserve. The owner of the ledger gives it, and takes it back."""

    def __init__(self, budget: float, *, share: float) -> None:
        """`share`: the process's part of UNTOLD_PART."""
        self.limit = budget
        self.left = self._first = share * UNTOLD_PART * budget
        self._was_given = False
        self._wanted = self._refused = 0.0  # since the last report

    def allows(self, amount: float, *, may_owe: bool = False) -> bool:
        """Whether so much may be reserved. With `may_owe` other processes may still have OWED_PART of it."""
        return amount <= self.left + (OWED_PART if may_owe else ROUNDING) * self.limit

    def take(self, amount: float) -> None:
        """Reserve an amount, or give a negative amount back."""
        self.left -= amount
        self._wanted += amount

    def refuse(self, amount: float) -> None:
        """Note a request that needs more than is left here."""
        self._wanted += amount
        self._refused = min(amount, self._refused or amount)

    def use(self) -> LimitUse:
        """What is reported. The sums of what was asked for begin anew."""
        use = LimitUse(0.0, self.left - (0.0 if self._was_given else self._first), self._wanted, self._refused)
        self._wanted = self._refused = 0.0
        return use

    def set_share(self, share: Share) -> bool:
        """Add what the owner gives, or give up what it takes back. See `TokenBucket.set_share`."""
        if self._was_given:  # requests may have reserved some of that since the report
            self.left += max(share.given, -max(0.0, self.left))
        else:
            self.left += share.given - self._first
        self._was_given = True
        return share.given < 0

    def lose_owner(self, *, has_share: bool) -> None:
        """See `TokenBucket.lose_owner`."""
        if not has_share:
            self.left = min(self.left, self._first)


SharedLimit = TokenBucket | Places | BudgetPart


class SharedPools:
    """The pools of one process, and the counter of what its requests use."""

    def __init__(
        self, max_requests: int = sys.maxsize, *, first_share: float = 1.0, shares_budgets: bool = False
    ) -> None:
        """`max_requests`: requests that the process serves at once; by default, any number.

        `first_share`: its part of the limits of a key until it is given another. `shares_budgets`: whether the owner of
        a ledger gives it parts of budgets; otherwise it keeps budgets by its own count alone.
        """
        self.first_share = first_share
        self.shares_budgets = shares_budgets
        self.requests = SharedPool[Account](max_requests)
        self.body_bytes = SharedPool[Account](MAX_BODY_BYTES_AT_ONCE)
        # Log-probabilities that the calls under way may have together: 16 bytes each until the answer is written, some
        # 70 bytes while a client does not read its stream.
        max_logprobs_at_once = 8_000_000
        self.logprobs = SharedPool[Account](max_logprobs_at_once)
        self.usage = UsageCounter()
        # The keys whose limits the owner has to be told of; None: all of them.
        self.changed: set[str] | None = None
        self.hurry: Callable[[], None] = lambda: None  # have it told soon

    def note_change(self, key: str) -> None:
        """Something was asked of a key's limits."""
        if self.changed is not None:
            self.changed.add(key)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one key has used since this process has started, or has first known the key."""

    num_requests: int = 0  # that came in, those that run too
    num_refused: int = 0  # that were turned away for a limit of the key
    num_running: int = 0
    num_tokens: int = 0  # of prompts and outputs of requests that have ended

    def __add__(self, other: Usage) -> Usage:
        """Both together, as of two processes."""
        return Usage(*map(add, astuple(self), astuple(other)))


class Account:
    """What one key has used. Lives as long as its key, and outlives a change of its limits."""

    def __init__(
        self,
        key: KeyConfig | None,
        clock: Callable[[], float],
        pools: SharedPools | None = None,
        *,
        may_administer: bool = False,
    ) -> None:
        """Without a key it is the account of all requests where no keys are needed: it has no name and no limits.

        `pools` are shared with all accounts of the process; by default, with none. `may_administer` says whether
        requests without keys may use the admin routes; of a key, the key says so.
        """
        self._clock = clock
        self.pools = pools or SharedPools()
        self._may_administer_without_key = may_administer
        self._num_requests = self._num_refused = self._num_tokens = 0
        self.reserved = BudgetTotals()  # what requests that run may use
        self.set_limits(key)

    def set_limits(self, key: KeyConfig | None) -> None:
        """Go on under these limits, with a new minute."""
        self.key = key
        self.name = key.name if key else ""
        self.may_administer = key.admin if key else self._may_administer_without_key
        self._requests = self._bucket(key.requests_per_minute if key else None)
        self.tokens = self._bucket(key.tokens_per_minute if key else None)
        at_once = key.max_concurrency if key else None
        taken = partial(self.pools.requests.held, self)
        share, hurry = self.pools.first_share, lambda: self.pools.hurry()  # of later
        self.places = Places(at_once, taken, share=share, hurry=hurry) if at_once else None
        self.budgets = key.budgets if key else {}
        shared = self.budgets if self.pools.shares_budgets else {}
        self._budget_parts = {name: BudgetPart(each, share=share) for name, each in shared.items()}
        limits: dict[str, SharedLimit | None] = {
            "requests": self._requests, "tokens": self.tokens, PLACES: self.places, **self._budget_parts
        }  # fmt: skip
        # Those that processes share.
        self.shared_limits = {LimitId(self.name, what, limit.limit): limit for what, limit in limits.items() if limit}
        self.is_limited = bool(self.shared_limits or self.budgets)  # by more than the pools of the process

    @property
    def usage(self) -> Usage:
        return Usage(self._num_requests, self._num_refused, self.pools.requests.held(self), self._num_tokens)

    async def wait_for_place(self) -> None:
        """Before `reserve`: wait a moment if all places are taken here and one may come from another process."""
        places = self.places
        if places is None or not places.may_come:
            return
        self.pools.note_change(self.name)
        is_free = asyncio.Event()
        try:
            async with asyncio.timeout(PLACE_WAIT_S):
                while places.may_come:  # another request may have come first
                    is_free.clear()
                    places.wait(is_free.set)
                    await is_free.wait()
        except TimeoutError:
            pass
        finally:
            places.leave(is_free.set)

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """Around one HTTP request, from its first byte to its last. Raises LimitReached."""
        places, running = self.places, self.pools.requests
        if self.is_limited:
            self.pools.note_change(self.name)
        try:
            if places is None and not running.allows(self, 1):
                raise LimitReached(
                    f"{running.held(self):,} requests {self.of_sender} are under way, and of the {running.size:,} "
                    f"places for them no more are free; wait for one of them",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )
            if places is not None:
                places.check()
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
        except LimitReached:  # the request needed more tokens than there were
            self._num_requests -= 1
            self._num_refused += 1
            raise
        finally:
            running.take(self, -1)
            if self.places is not None:
                self.places.note_end()
            self._settle(reservation)

    @contextmanager
    def reserve_kept(self) -> Iterator[Reservation]:
        """Around a response that is kept, which was counted as a request where it came in.

        It came in at another process, which has the tokens for it, so it does not wait until they are here.
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
        """Around one item of a batch, which counts as a request. An item that LimitReached ends has used nothing."""
        with self.reserve() as reservation:
            try:
                yield reservation
            except LimitReached:
                if self._requests:
                    self._requests.take(-1)
                raise

    def check_model(self, name: str) -> None:
        """Raises NotPermitted when the key is not for this model."""
        if not self.may_use(name):
            raise NotPermitted(f"this API key is not for the model {name!r}; ask for another key", param="model")

    def may_use(self, model_name: str) -> bool:
        """Whether the key is for this model."""
        return self.key is None or not self.key.models or model_name in self.key.models

    def max_tokens(self, asked: int | None, param: str) -> int | None:
        """The longest output this key may have; None: any. Raises InvalidRequest when more was asked for in `param`."""
        cap = self.key.max_tokens if self.key else None
        if cap is not None and asked is not None and asked > cap:
            raise InvalidRequest(f"{param} is {asked:,}; this API key may ask for at most {cap:,}", param=param)
        return cap

    def check_priority(self, asked: int) -> None:
        """Raises InvalidRequest when the key may not go before others by so much."""
        if self.key is not None and asked < self.key.min_priority:
            raise InvalidRequest(
                f"priority is {asked}; this API key may ask for {self.key.min_priority} or more (a lower number goes "
                f"first); send no lower one",
                param="priority",
            )

    def check_budgets(self, num_tokens: int, cost: float, *, may_owe: bool = False) -> None:
        """Raises BudgetSpent when a request may use more than a day's or a month's budget has left.

        Raises LimitReached when other processes have what it needs of that.
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
                    f"{renewed_at:%Y-%m-%dT%H:%M:%SZ}; wait, or ask for fewer tokens",
                    retry_after_s=renewed_at.timestamp() - counter.now,
                )
            part = self._budget_parts.get(name)
            if part is not None and not part.allows(needed, may_owe=may_owe):
                part.refuse(needed)
                raise LimitReached(
                    f"{name} of this API key is {amount(budget)}; {amount(used)} are used or reserved. This request "
                    f"needs up to {amount(needed)}, and this process may give {amount(max(0, part.left))} now, "
                    f"as other processes have the rest; try again in {SHARES_MOVE_S:.0f} s, or ask for fewer tokens",
                    retry_after_s=SHARES_MOVE_S,
                )

    def reserve_of_budgets(self, num_tokens: int, cost: float) -> None:
        """A request that runs may use so much."""
        self.reserved = self.reserved.plus(BudgetTotals(num_tokens, num_tokens, cost))
        self._take_of_budgets(num_tokens, cost)

    def _take_of_budgets(self, num_tokens: int, cost: float) -> None:
        for name, part in self._budget_parts.items():
            part.take(cost if name == MONEY else num_tokens)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-…`, as OpenAI's, for the limits that there are."""
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
        """The sender of a request, in errors."""
        return "of this API key" if self.key else "without a key"


def _amount(budget_name: str, amount: float) -> str:
    return f"{amount:,.4f}" if budget_name == MONEY else f"{int(amount):,}"


def _check(bucket: TokenBucket, amount: int, what: str, *, may_owe: bool = False) -> None:
    wait_s = bucket.wait_s(amount, may_owe=may_owe)
    if wait_s > 0:
        bucket.refuse(amount)
        raise LimitReached(
            f"this API key may use {bucket.limit:,} {what} a minute; this request needs up to {amount:,} and "
            f"{bucket.remaining:,} are left; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


@dataclass(slots=True)
class Reservation:
    """One HTTP request on an account: the tokens that it has reserved and has used, what it holds of the memory."""

    account: Account
    may_owe: bool = False  # it may take what other processes still have
    num_reserved: int = 0
    cost_reserved: float = 0.0
    num_body_bytes: int = 0
    num_logprobs: int = 0
    usages: list[Callable[[], CallUsage]] = field(default_factory=list)  # what was used, at the end

    def reserve(self, num_tokens: int, *, num_logprobs: int = 0, cost: float = 0.0) -> None:
        """Reserve what a request may need at most. Its end settles the tokens and gives the log-probabilities back.

        Raises LimitReached.
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
        """Count log-probabilities that an answer may have in memory, until its end. Raises LimitReached."""
        account, pool = self.account, self.account.pools.logprobs
        if num_logprobs:
            if not pool.allows(account, num_logprobs):
                raise LimitReached(
                    f"this answer may have {num_logprobs:,} log-probabilities; others under way {account.of_sender} "
                    f"may have {pool.held(account):,}, and of the {pool.size:,} that this server holds at once not so "
                    f"many more are free; wait for one of them, or ask for fewer tokens",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )
            pool.take(account, num_logprobs)
            self.num_logprobs += num_logprobs

    def hold_body(self, num_bytes: int) -> None:
        """Count bytes of the body that have come, until `release_body` or the end. Raises LimitReached."""
        account, pool = self.account, self.account.pools.body_bytes
        if not pool.allows(account, num_bytes):
            raise LimitReached(
                f"{pool.held(account):,} bytes of other bodies {account.of_sender} are being read, and of the "
                f"{pool.size:,} that this server reads at once no more are free; send fewer at once",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        pool.take(account, num_bytes)
        self.num_body_bytes += num_bytes

    def release_body(self) -> None:
        """The body is not in memory any more."""
        self.account.pools.body_bytes.take(self.account, -self.num_body_bytes)
        self.num_body_bytes = 0


def rate_limit_headers(state: Mapping[str, object]) -> dict[str, str]:
    """Of the account that a request's state names, once it is known."""
    account = state.get("account")
    return account.headers() if isinstance(account, Account) else {}
