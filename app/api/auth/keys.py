"""The account of a request, by its API key. Keys themselves are stored nowhere: only their hashes are looked up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from app.api.auth.limits import Account, SharedLimit, SharedPools
from app.config import ApiConfig, KeyConfig
from app.errors import Unauthenticated
from app.usage.records import BudgetTotals, LimitId, LimitUse, Share

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI has them


class Authenticator(Protocol):
    """Finds the account of a request."""

    def account_of(self, headers: Headers) -> Account:
        """The account of a request with these headers. Raises Unauthenticated."""

    def account_named(self, name: str) -> Account:
        """The account of the key of this name, for work that outlives its request. Raises Unauthenticated."""

    @property
    def accounts(self) -> Sequence[Account]:
        """Those of all keys; the one of all requests where no keys are needed."""

    @property
    def pools(self) -> SharedPools:
        """What all accounts share."""


class KeyRing:
    """All keys, each with its account."""

    def __init__(
        self,
        keys: Iterable[KeyConfig],
        pools: SharedPools | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.pools = pools or SharedPools()
        self._accounts: dict[bytes, Account] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[KeyConfig]) -> None:
        """Replace all keys by these. A key that was there before keeps its account and what it has used."""
        accounts: dict[bytes, Account] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            account = self._accounts.get(digest) or Account(key, self._clock, self.pools)
            if account.key != key:
                account.set_limits(key)
            accounts[digest] = account
        self._accounts = accounts

    def account_of(self, headers: Headers) -> Account:
        """The account of the first key that was sent and is known. Raises Unauthenticated, never with what was sent."""
        for key in _keys_of(headers):
            # How long a look-up takes depends on the key's hash alone, which says nothing about any other key.
            account = self._accounts.get(hashlib.sha256(key).digest())
            if account is not None:
                return account
        raise Unauthenticated("this API key is not known here; check it, or ask for another")

    def account_named(self, name: str) -> Account:
        """The account of the key of this name.

        Raises Unauthenticated when there is no such key any more, and for "", the name of a time without keys.
        """
        if not name:  # no key could read its results, and none has limits for it
            raise Unauthenticated("this was sent without an API key, before this server required one")
        for account in self._accounts.values():
            if account.name == name:
                return account
        raise Unauthenticated("the API key that sent this is not known here any more")

    @property
    def accounts(self) -> Sequence[Account]:
        """Of all keys that there are, in their order."""
        return list(self._accounts.values())


class NoAuthentication:
    """Where no keys are needed: all requests have the same account, without a name, with the process's limits alone."""

    def __init__(self, pools: SharedPools | None = None, *, may_administer: bool = False) -> None:
        """`may_administer`: whether the admin routes are open too."""
        self.pools = pools or SharedPools()
        self._account = Account(None, time.monotonic, self.pools, may_administer=may_administer)

    @property
    def accounts(self) -> Sequence[Account]:
        """The one account."""
        return [self._account]

    def account_of(self, headers: Headers) -> Account:
        """The one account."""
        return self._account

    def account_named(self, name: str) -> Account:
        """The one account."""
        return self._account


class AccountLimits:
    """The limits of all accounts that an authenticator has, for `app.usage`."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.takes_slack = authenticator.pools.first_share > 0

    def reserved(self) -> dict[str, BudgetTotals]:
        """See `app.usage.records.Limits`, as for the others."""
        return {account.name: account.reserved for account in self._authenticator.accounts if account.budgets}

    def uses(self) -> dict[LimitId, LimitUse]:
        return {limit_id: limit.use() for limit_id, limit in self._limits()}

    def take(self, shares: Mapping[LimitId, Share]) -> None:
        for limit_id, limit in self._limits():
            if limit_id in shares:
                limit.set_share(shares[limit_id])

    def lose_owner(self, *, has_share: bool) -> None:
        for _, limit in self._limits():
            limit.lose_owner(has_share=has_share)

    def _limits(self) -> Iterator[tuple[LimitId, SharedLimit]]:
        for account in self._authenticator.accounts:
            yield from account.shared_limits.items()


def without_keys(config: ApiConfig, pools: SharedPools | None = None) -> NoAuthentication:
    """For a service without keys.

    On loopback, processes of this machine may use the admin routes. A service that other machines reach without keys
    (`allow_unauthenticated`) has no admin routes.
    """
    return NoAuthentication(pools, may_administer=not config.allow_unauthenticated)


def _keys_of(headers: Headers) -> list[bytes]:
    """The keys in `Authorization: Bearer`, and in `x-api-key` as Anthropic's clients send it.

    Clients and proxies may send both headers. One without a value does not count.
    """
    given = [(name, value.strip()) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if not any(value for _, value in given):
        raise Unauthenticated("an API key is required; send it in the header `Authorization: Bearer <key>`")
    keys = [value if name == b"x-api-key" else _bearer(value) for name, value in given]
    if not any(keys):
        raise Unauthenticated("the Authorization header should be `Bearer <key>`")
    return [key for key in keys if key]


def _bearer(value: bytes) -> bytes:
    """The key in an Authorization header; empty: there is none."""
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
