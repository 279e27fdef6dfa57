"""Who somebody is, by the key that a request shows. Keys themselves are nowhere: only their hashes are compared."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from app.api.auth.limits import Account
from app.config import ApiConfig, KeyConfig
from app.errors import Unauthenticated

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI has them


class Doorkeeper(Protocol):
    """Decides who may come in."""

    def account_of(self, headers: Headers) -> Account:
        """The account of whoever sends these headers. Raises Unauthenticated."""

    def account_named(self, name: str) -> Account:
        """The account of the key of this name, for work that it has left here. Raises Unauthenticated."""

    @property
    def accounts(self) -> Sequence[Account]:
        """Those of all keys; nobody's where no keys are needed."""


class KeyRing:
    """The keys that there are, each with its account."""

    def __init__(self, keys: Iterable[KeyConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[KeyConfig]) -> None:
        """From now on there are these keys and no others; a key that stays goes on with what it has used."""
        accounts: dict[bytes, Account] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            account = self._accounts.get(digest) or Account(key, self._clock)
            if account.key != key:
                account.set_limits(key)
            accounts[digest] = account
        self._accounts = accounts

    def account_of(self, headers: Headers) -> Account:
        """The account of the key in `Authorization: Bearer`. Raises Unauthenticated, never with what was sent."""
        digest = hashlib.sha256(_bearer(headers)).digest()
        found: Account | None = None
        # Hashes, all of them, each in constant time: how long it takes says nothing about any key.
        for known, account in self._accounts.items():
            if hmac.compare_digest(known, digest):
                found = account
        if found is None:
            raise Unauthenticated("this API key is not known here; check it, or ask for another")
        return found

    def account_named(self, name: str) -> Account:
        """The account of the key of this name; nobody's for "", who came when no keys were needed.

        Raises Unauthenticated when there is no such key any more.
        """
        if not name:
            return Account(None, self._clock)
        for account in self._accounts.values():
            if account.name == name:
                return account
        raise Unauthenticated("the API key of whoever sent this is not known here any more")

    @property
    def accounts(self) -> Sequence[Account]:
        """Of all keys that there are, in their order."""
        return list(self._accounts.values())


class OpenDoor:
    """Where no keys are needed everybody is the same nobody."""

    def __init__(self, *, may_administer: bool = False) -> None:
        """`may_administer`: whether the admin routes are open too."""
        self._account = Account(None, time.monotonic, may_administer=may_administer)

    @property
    def accounts(self) -> Sequence[Account]:
        """Nobody's."""
        return [self._account]

    def account_of(self, headers: Headers) -> Account:
        """Nobody's account, which has no limits."""
        return self._account

    def account_named(self, name: str) -> Account:
        """Nobody's account, whoever once was somebody here."""
        return self._account


def open_door(config: ApiConfig) -> OpenDoor:
    """For a service without keys.

    It listens on loopback only, and whoever is on this machine as its user may do all to it anyway. Where others were
    let in without keys, the admin routes are nobody's.
    """
    return OpenDoor(may_administer=not config.allow_unauthenticated)


def _bearer(headers: Headers) -> bytes:
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        raise Unauthenticated("an API key is required; send it in the header `Authorization: Bearer <key>`")
    if len(given) > 1:
        raise Unauthenticated(f"there are {len(given)} Authorization headers; send one")
    scheme, _, key = given[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise Unauthenticated("the Authorization header should be `Bearer <key>`")
    return key.strip()
