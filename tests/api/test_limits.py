"""What one key may use, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.auth.limits import Account, TokenBucket
from app.config import KeyConfig
from app.errors import InvalidRequest, LimitReached, NotPermitted
from tests.api.keys import entry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, **limits: Any) -> Account:
    return Account(KeyConfig.model_validate(entry(**limits)), clock)


def test_a_bucket_gives_a_minutes_worth_at_once_and_fills_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.remaining, bucket.reset_s) == (0, 60)
    assert bucket.wait_s(1) == 1
    clock.now += 1.5
    assert bucket.remaining == 1
    assert bucket.wait_s(1) == 0
    clock.now += 1000
    assert (bucket.remaining, bucket.reset_s) == (60, 0)


def test_a_bucket_pays_its_debt_before_it_gives_again() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(90)
    assert bucket.remaining == 0
    assert bucket.wait_s(1) == 31
    clock.now += 31
    assert bucket.wait_s(1) == 0


def test_more_than_a_minutes_worth_is_given_when_the_bucket_is_full() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait_s(1000) == 0
    bucket.take(1)
    assert bucket.wait_s(1000) == 1


def test_what_is_given_back_never_makes_a_bucket_more_than_full() -> None:
    bucket = TokenBucket(60, Clock())
    bucket.take(10)
    bucket.take(-30)
    assert bucket.remaining == 60


def test_requests_beyond_the_minutes_are_refused_with_the_time_to_wait() -> None:
    clock = Clock()
    limited = account(clock, requests_per_minute=2)
    for _ in range(2):
        with limited.reserve():
            pass
    with pytest.raises(LimitReached, match="2 requests a minute") as caught, limited.reserve():
        pass
    assert caught.value.retry_after_s == 30
    clock.now += 30
    with limited.reserve():
        pass


def test_requests_at_once_are_counted_to_their_end_however_they_end() -> None:
    limited = account(Clock(), max_concurrency=1)

    def fail() -> None:
        with limited.reserve():
            with pytest.raises(LimitReached, match="1 requests at once"), limited.reserve():
                pass
            raise RuntimeError("it failed")

    with pytest.raises(RuntimeError):
        fail()
    with limited.reserve():
        pass


def test_a_refused_request_uses_nothing() -> None:
    limited = account(Clock(), requests_per_minute=5, max_concurrency=1)
    with limited.reserve():
        for _ in range(3):
            with pytest.raises(LimitReached), limited.reserve():
                pass
        assert limited.headers()["x-ratelimit-remaining-requests"] == "4"


def test_tokens_are_reserved_at_the_start_and_settled_at_the_end() -> None:
    limited = account(Clock(), tokens_per_minute=100)
    with limited.reserve() as reservation:
        reservation.reserve(80)
        assert limited.headers()["x-ratelimit-remaining-tokens"] == "20"
        with pytest.raises(LimitReached, match="needs up to 30 and 20 are left"), limited.reserve() as other:
            other.reserve(30)
        reservation.add_usage(lambda: 15)
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "85"


def test_what_was_reserved_comes_back_when_nothing_was_computed() -> None:
    limited = account(Clock(), tokens_per_minute=100)

    def fail() -> None:
        with limited.reserve() as reservation:
            reservation.reserve(80)
            raise RuntimeError("no replica took it")

    with pytest.raises(RuntimeError):
        fail()
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_a_line_that_a_limit_turns_away_has_used_nothing() -> None:
    limited = account(Clock(), requests_per_minute=5, tokens_per_minute=100)
    with limited.reserve_item() as first:
        first.reserve(60)
        for _ in range(3):
            with pytest.raises(LimitReached), limited.reserve_item() as turned_away:
                turned_away.reserve(60)
        left = limited.headers()
    assert (left["x-ratelimit-remaining-requests"], left["x-ratelimit-remaining-tokens"]) == ("4", "40")


def test_headers_tell_only_of_the_limits_that_there_are() -> None:
    assert account(Clock()).headers() == {}
    clock = Clock()
    limited = account(clock, requests_per_minute=60)
    with limited.reserve():
        clock.now += 0.25
        assert limited.headers() == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "0.750s",
        }


def test_a_key_is_for_its_models_or_for_all() -> None:
    assert account(Clock()).may_use("any")
    limited = account(Clock(), models=["small"])
    limited.check_model("small")
    with pytest.raises(NotPermitted, match="'large'"):
        limited.check_model("large")


def test_an_output_that_is_too_long_for_the_key_is_refused_by_name() -> None:
    limited = account(Clock(), max_tokens=10)
    assert limited.max_tokens(10, "max_tokens") == 10
    assert limited.max_tokens(None, "max_tokens") == 10
    with pytest.raises(InvalidRequest, match="max_completion_tokens is 11; this API key may ask for at most 10"):
        limited.max_tokens(11, "max_completion_tokens")
    assert account(Clock()).max_tokens(10**6, "max_tokens") is None
