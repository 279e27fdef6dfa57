"""The account of a request, by its key."""

from __future__ import annotations

import hmac
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
        (f"Bearer {entry()['sha256']}",), (f"Bearer {KEY}", f"Bearer {KEY}"), ("Bearer unknown", f"Bearer {KEY}"),
        ("Bearer ключ",), ("Bearer " + "x" * 100_000,),
    ],
)  # fmt: skip
def test_every_other_header_is_unauthenticated(values: tuple[str, ...]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        ring(entry()).account_of(headers(*values))
    for secret in (KEY, "unknown", "ключ"):
        assert secret not in str(caught.value), "what was sent is not repeated"


def test_every_hash_is_compared_in_constant_time_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return real(known, given)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    known = ring(entry(KEY, "alice"), entry(OTHER_KEY, "bob"), entry("third", "carol"))
    for key in (KEY, OTHER_KEY, "third", "unknown"):
        compared.clear()
        try:
            known.account_of(headers(f"Bearer {key}"))
        except Unauthenticated:
            assert key == "unknown"
        assert len(compared) == 3


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
