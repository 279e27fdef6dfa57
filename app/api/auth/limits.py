"""What one key may use: requests and tokens a minute, requests and bytes of bodies at once.

All numbers are those of this process, by its clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.config import KeyConfig
from app.errors import InvalidRequest, LimitReached, NotPermitted
from app.fair import SharedPool

# How soon a place among the requests at once is free cannot be known, and a retry is cheap.
CONCURRENCY_RETRY_S = 1.0
# Of bodies that arrive or are being checked. They take several times as much once they are parsed, one after the other.
MAX_BODY_BYTES_AT_ONCE = 512 * 1024 * 1024


class TokenBucket:
    """An allowance for each minute, of which at most one minute's can be saved up (the leaky bucket as a meter).

    A balance below zero is filled up first.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.limit = per_minute
        self._clock = clock
        self._balance = float(per_minute)
        self._counted_at = clock()

    @property
    def remaining(self) -> int:
        """What could be taken now."""
        return max(0, int(self._counted()))

    @property
    def reset_s(self) -> float:
        """Seconds until it is full again, if nothing is taken."""
        return (self.limit - self._counted()) * 60 / self.limit

    def wait_s(self, amount: float) -> float:
        """Seconds until so much could be taken; for more than a minute's worth, until the bucket is full."""
        return max(0.0, (min(amount, self.limit) - self._counted()) * 60 / self.limit)

    def take(self, amount: float) -> None:
        """Take an amount, also beyond the balance; a negative amount is given back."""
        self._balance = min(self._counted() - amount, self.limit)

    def _counted(self) -> float:
        now = self._clock()
        self._balance = min(self._balance + (now - self._counted_at) * self.limit / 60, self.limit)
        self._counted_at = now
        return self._balance


class SharedPools:
    """The pools of one process."""

    def __init__(self, max_requests: int = sys.maxsize) -> None:
        """`max_requests`: requests that the process serves at once; by default, any number."""
        self.requests = SharedPool[Account](max_requests)
        self.body_bytes = SharedPool[Account](MAX_BODY_BYTES_AT_ONCE)
        # Log-probabilities that the calls under way may have together: 16 bytes each until the answer is written, some
        # 70 bytes while a client does not read its stream.
        max_logprobs_at_once = 8_000_000
        self.logprobs = SharedPool[Account](max_logprobs_at_once)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one key has used since this process has started, or has first known the key."""

    num_requests: int = 0  # that came in, those that run too
    num_refused: int = 0  # that were turned away for a limit of the key
    num_running: int = 0
    num_tokens: int = 0  # of prompts and outputs of requests that have ended

    def __add__(self, other: Usage) -> Usage:
        """Both together, as of two processes."""
        return Usage(
            self.num_requests + other.num_requests,
            self.num_refused + other.num_refused,
            self.num_running + other.num_running,
            self.num_tokens + other.num_tokens,
        )


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
        self.set_limits(key)

    def set_limits(self, key: KeyConfig | None) -> None:
        """Go on under these limits, with a new minute."""
        self.key = key
        self.name = key.name if key else ""
        self.may_administer = key.admin if key else self._may_administer_without_key
        self._requests = self._bucket(key.requests_per_minute if key else None)
        self.tokens = self._bucket(key.tokens_per_minute if key else None)

    @property
    def usage(self) -> Usage:
        return Usage(self._num_requests, self._num_refused, self.pools.requests.held(self), self._num_tokens)

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """Around one HTTP request, from its first byte to its last. Raises LimitReached."""
        limit, running = self.key.max_concurrency if self.key else None, self.pools.requests
        try:
            if limit is None and not running.allows(self, 1):
                raise LimitReached(
                    f"{running.held(self):,} requests {self.of_sender} are under way, and of the {running.size:,} "
                    f"places for them no more are free; wait for one of them",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )
            if limit is not None and (num_running := running.held(self)) >= limit:
                raise LimitReached(
                    f"this API key may have {limit:,} requests at once and has {num_running:,}; wait for one of them",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )
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
            reservation.release_body()
            self.pools.logprobs.take(self, -reservation.num_logprobs)
            num_used = sum(num_tokens() for num_tokens in reservation.usages)
            self._num_tokens += num_used
            if self.tokens:
                self.tokens.take(num_used - reservation.num_reserved)

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
        return TokenBucket(per_minute, self._clock) if per_minute else None

    @property
    def of_sender(self) -> str:
        """The sender of a request, in errors."""
        return "of this API key" if self.key else "without a key"


def _check(bucket: TokenBucket, amount: int, what: str) -> None:
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise LimitReached(
            f"this API key may use {bucket.limit:,} {what} a minute; this request needs up to {amount:,} and "
            f"{bucket.remaining:,} are left; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


@dataclass(slots=True)
class Reservation:
    """One HTTP request on an account: the tokens that it has reserved and has used, what it holds of the memory."""

    account: Account
    num_reserved: int = 0
    num_body_bytes: int = 0
    num_logprobs: int = 0
    usages: list[Callable[[], int]] = field(default_factory=list)  # each gives tokens that were used, at the end

    def reserve(self, num_tokens: int, *, num_logprobs: int = 0) -> None:
        """Reserve what a request may need at most. Its end settles the tokens and gives the log-probabilities back.

        Raises LimitReached.
        """
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
        if account.tokens:
            _check(account.tokens, num_tokens, "tokens")
            account.tokens.take(num_tokens)
        self.num_reserved += num_tokens

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
