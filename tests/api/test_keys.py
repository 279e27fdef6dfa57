"""The account of a request, by its key."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from app.api.auth.keys import KeyRing, NoAuthentication
from app.config import KeyConfig
from app.errors import Unauthenticated
from tests.kit.service import KEY, OTHER_KEY, entry


def ring(*entries: dict[str, Any]) -> KeyRing:
    return KeyRing(map(KeyConfig.model_validate, entries))


def headers(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"here"), *((b"authorization", value.encode()) for value in values)]


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY}  "])
def test_a_known_key_names_its_account(value: str) -> None:
    known = ring(entry(OTHER_KEY, "bob"), entry(KEY, "alice"))
    assert known.account_of(headers(value)).name == "alice"


@pytest.mark.parametrize(
    "values",
    [
        (), ("",), ("Bearer",), ("Bearer ",), (KEY,), (f"Basic {KEY}",), (f"Token {KEY}",), ("Bearer unknown",),
        (f"Bearer {KEY}x",), (f"Bearer {KEY[:-1]}",), (f"Bearer {KEY.upper()}",), (f"Bearer {KEY} {KEY}",),
        (f"Bearer {entry()['sha256']}",), (f"Bearer {KEY}x", "Bearer unknown"), (f"Basic {KEY}", ""),
        ("Bearer ключ",), ("Bearer " + "x" * 100_000,),
    ],
)  # fmt: skip
def test_every_other_header_is_unauthenticated(values: tuple[str, ...]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        ring(entry()).account_of(headers(*values))
    for secret in (KEY, "unknown", "ключ"):
        assert secret not in str(caught.value), "what was sent is not repeated"


@pytest.mark.parametrize(
    "sent",
    [
        [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)],
        [("x-api-key", KEY), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}")] * 2,
        [("authorization", f"Bearer {KEY}"), ("x-api-key", "")],
        [("authorization", "Bearer "), ("x-api-key", KEY)],
        [("authorization", ""), ("x-api-key", f" {KEY} ")],
        [("authorization", "Bearer unknown"), ("x-api-key", KEY)],
        [("authorization", "Basic abc"), ("x-api-key", KEY)],
    ],
)
def test_of_several_headers_one_with_a_known_key_is_enough(sent: list[tuple[str, str]]) -> None:
    known = ring(entry(OTHER_KEY, "bob"), entry(KEY, "alice"))
    assert known.account_of([(name.encode(), value.encode()) for name, value in sent]).name == "alice"


def test_a_look_up_takes_as_long_with_many_keys_as_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    class Digest(bytes):
        """Of a key, which counts what it is compared with."""

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return bytes(self) == other

        __hash__ = bytes.__hash__

    known = ring(*(entry(f"key {number}", f"name-{number}") for number in range(200)))
    sha256 = hashlib.sha256
    monkeypatch.setattr(
        "app.api.auth.keys.hashlib.sha256", lambda key: SimpleNamespace(digest=lambda: Digest(sha256(key).digest()))
    )
    for key, num_compared in (("key 0", 1), ("key 199", 1), ("unknown", 0)):
        compared.clear()
        with suppress(Unauthenticated):
            known.account_of(headers(f"Bearer {key}"))
        assert len(compared) == num_compared


def test_a_replaced_key_ring_knows_the_new_keys_alone() -> None:
    known = ring(entry(KEY, "alice"))
    known.replace([KeyConfig.model_validate(entry(OTHER_KEY, "bob"))])
    assert known.account_of(headers(f"Bearer {OTHER_KEY}")).name == "bob"
    with pytest.raises(Unauthenticated):
        known.account_of(headers(f"Bearer {KEY}"))


def test_a_key_that_stays_goes_on_with_what_it_has_used() -> None:
    limited = entry(KEY, "alice", requests_per_minute=10)
    known = ring(limited)
    with known.account_of(headers(f"Bearer {KEY}")).reserve():
        pass
    known.replace([KeyConfig.model_validate(limited), KeyConfig.model_validate(entry(OTHER_KEY, "bob"))])
    account = known.account_of(headers(f"Bearer {KEY}"))
    assert account.headers()["x-ratelimit-remaining-requests"] == "9"
    known.replace([KeyConfig.model_validate(limited | {"requests_per_minute": 20})])
    assert account.headers()["x-ratelimit-limit-requests"] == "20"


def test_what_a_key_has_left_here_is_counted_on_its_own_account() -> None:
    known = ring(entry(OTHER_KEY, "bob"), entry(KEY, "alice"))
    assert known.account_named("alice") is known.account_of(headers(f"Bearer {KEY}"))
    for name in ("eve", ""):  # a key that was revoked, a time without keys
        with pytest.raises(Unauthenticated):
            known.account_named(name)
    assert NoAuthentication().account_named("alice").name == ""
