"""Finds the account of a request by its API key. Keys are never stored: only their hashes are looked up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from app.api.auth.limits import Account, SharedPools
from app.config import ApiConfig, KeyConfig
from app.errors import Unauthenticated
from app.usage.records import LimitChanges, LimitId, Share

Headers = Iterable[tuple[bytes, bytes]]  # ASGI headers, with names in lower case


class Authenticator(Protocol):
    """Finds the account of a request."""

    def account_of(self, headers: Headers) -> Account:
        """Return the account of a request with these headers. Raises Unauthenticated."""

    def account_named(self, name: str) -> Account:
        """Return the account of the key with this name, for work that outlives its request. Raises Unauthenticated."""

    @property
    def accounts(self) -> Sequence[Account]:
        """The accounts of all keys, or the single account of all requests if no keys are required."""

    @property
    def pools(self) -> SharedPools:
        """The pools that all accounts share."""


class KeyRing:
    """All API keys and their accounts."""

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
        self._by_name: dict[str, Account] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[KeyConfig]) -> None:
        """Replace all keys. A key that existed before retains its account and its usage."""
        accounts: dict[bytes, Account] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            account = self._accounts.get(digest) or Account(key, self._clock, self.pools)
            if account.key != key:
                account.set_limits(key)
            accounts[digest] = account
        self._accounts = accounts
        self._by_name = {account.name: account for account in accounts.values()}
        self.pools.changed = None

    def account_of(self, headers: Headers) -> Account:
        """Return the account of the first known key in the headers. Raises Unauthenticated, without quoting any key."""
        for key in _keys_of(headers):
            # The time of a look-up depends only on the hash of the sent key, so it reveals nothing about other keys.
            account = self._accounts.get(hashlib.sha256(key).digest())
            if account is not None:
                return account
        raise Unauthenticated("this API key is not valid; check the key, or ask the operator for another one")

    def account_named(self, name: str) -> Account:
        """Return the account of the key with this name.

        Raises Unauthenticated if the key was removed, and for "", the name that a service without keys stores.
        """
        if not name:  # no key could read the results, and no key's limits apply
            raise Unauthenticated(
                "this request was sent before this server required API keys; send it again with an API key"
            )
        account = self._by_name.get(name)
        if account is None:
            raise Unauthenticated("the API key of this request has been removed; use another key")
        return account

    @property
    def accounts(self) -> Sequence[Account]:
        """The accounts of all current keys, in the order of the keys."""
        return list(self._accounts.values())


class NoAuthentication:
    """Assigns all requests to one account without a name. Only the limits of the process apply."""

    def __init__(self, pools: SharedPools | None = None, *, may_administer: bool = False) -> None:
        """`may_administer` opens the admin routes to requests without a key."""
        self.pools = pools or SharedPools()
        self._account = Account(None, time.monotonic, self.pools, may_administer=may_administer)

    @property
    def accounts(self) -> Sequence[Account]:
        return [self._account]

    def account_of(self, headers: Headers) -> Account:
        return self._account

    def account_named(self, name: str) -> Account:
        return self._account


class AccountLimits:
    """The limits of all accounts of an authenticator. Implements `app.usage.records.Limits`."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.takes_slack = authenticator.pools.first_share > 0

    def on_report_request(self, request_report: Callable[[], None]) -> None:
        """See `app.usage.records.Limits`, which documents all of these methods."""
        self._authenticator.pools.request_report = request_report

    def changes(self, keys: Iterable[str] | None) -> LimitChanges:
        pools, accounts = self._authenticator.pools, self._authenticator.accounts
        are_all = keys is None or pools.changed is None
        if keys is not None and pools.changed is not None:
            accounts = [each for name in pools.changed.union(keys) if (each := self._named(name)) is not None]
        pools.changed = set()
        uses = {limit_id: limit.use() for each in accounts for limit_id, limit in each.shared_limits.items()}
        return LimitChanges(uses, {each.name: each.reserved for each in accounts if each.budgets}, are_all)

    def take(self, shares: Mapping[LimitId, Share], *, asked: Collection[str]) -> None:
        pools = self._authenticator.pools
        for limit_id, share in shares.items():
            account = self._named(limit_id.key)
            limit = None if account is None else account.shared_limits.get(limit_id)
            if limit is not None and limit.set_share(share):
                pools.note_change(limit_id.key)
        for key in asked:
            pools.note_change(key)
        if not {limit_id.key for limit_id in shares}.issuperset(asked):
            pools.request_report()

    def lose_owner(self, *, has_share: bool) -> None:
        for account in self._authenticator.accounts:
            for limit in account.shared_limits.values():
                limit.lose_owner(has_share=has_share)

    def _named(self, name: str) -> Account | None:
        """Return the account of the key with this name, or None if the key was removed."""
        try:
            return self._authenticator.account_named(name)
        except Unauthenticated:
            return None


def without_keys(config: ApiConfig, pools: SharedPools | None = None) -> NoAuthentication:
    """Return the authentication of a service without keys.

    All processes of the machine may use its admin routes, unless other machines may send requests without a key
    (`allow_unauthenticated`).
    """
    return NoAuthentication(pools, may_administer=not config.allow_unauthenticated)


def _keys_of(headers: Headers) -> list[bytes]:
    """Return the keys in `Authorization: Bearer` and in `x-api-key`, the header of Anthropic's clients.

    Clients and proxies may send both headers. A header without a value is ignored. Raises Unauthenticated.
    """
    given = [(name, value.strip()) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if not any(value for _, value in given):
        raise Unauthenticated("an API key is required; send it in the header `Authorization: Bearer <key>`")
    keys = [value if name == b"x-api-key" else _bearer(value) for name, value in given]
    if not any(keys):
        raise Unauthenticated("the Authorization header must have the form `Bearer <key>`")
    return [key for key in keys if key]


def _bearer(value: bytes) -> bytes:
    """Return the key in an Authorization header, or an empty value if the header has no key."""
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
