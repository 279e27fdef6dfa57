"""What a key makes of a call: its tenant, its cache, its lengths, its limits, and what its holder reads of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.errors import Overloaded
from app.text import Tokenizer
from tests.api.fakes import WAIT, Answer, Connection, Service, say
from tests.api.keys import KEY, OTHER_KEY, bearer, entry
from tests.waiting import until


def with_keys(tokenizer: Tokenizer, *keys: dict[str, Any], names: tuple[str, ...] = ("demo",), **more: Any) -> Service:
    return Service(tokenizer, say(tokenizer, "3 4 5."), names=names, keys=keys or (entry(),), **more)


def complete(service: Service, key: str = KEY, **fields: Any) -> Answer:
    return service.call("POST", "/v1/completions", {"prompt": "Hi"} | fields, bearer(key))


def test_the_name_of_the_key_is_the_tenant_whatever_the_body_says(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer)
    assert complete(service, user="somebody else").status == 200
    assert service.request.tenant == "alice"


def test_without_keys_the_user_of_the_body_is_the_tenant(service: Service) -> None:
    assert service.complete(user="somebody", cache_salt="mine").status == 200
    assert (service.request.tenant, service.request.cache_salt) == ("somebody", "mine")


def test_keys_share_no_cached_prefixes(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(), entry(OTHER_KEY, "bob"))
    for key in (KEY, OTHER_KEY):
        for salt in ("", "mine"):
            assert complete(service, key, cache_salt=salt).status == 200
    assert len({request.cache_salt for request in service.generate.requests}) == 4


def test_keys_share_cached_prefixes_where_that_is_wanted(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(), entry(OTHER_KEY, "bob"), share_prefixes=True)
    for key in (KEY, OTHER_KEY):
        complete(service, key)
    assert [request.cache_salt for request in service.generate.requests] == ["", ""]


def test_a_key_uses_and_sees_only_its_models(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(models=["small"]), names=("small", "large"))
    assert complete(service, model="small").status == 200
    assert complete(service).status == 200, "the only one that it may use needs no name"
    answer = complete(service, model="large")
    assert (answer.status, answer.error["type"], answer.error["code"]) == (403, "permission_error", "model_not_allowed")
    assert complete(service, model="huge").status == 404
    listed = service.call("GET", "/v1/models", headers=bearer()).json["data"]
    assert [model["id"] for model in listed] == ["small"]
    assert service.call("GET", "/v1/models/large", headers=bearer()).status == 403


def test_the_longest_output_of_a_key_is_a_limit_and_a_default(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(max_tokens=5))
    answer = complete(service, max_tokens=6)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert complete(service, min_tokens=6).error["param"] == "min_tokens"
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert service.call("POST", "/v1/chat/completions", body, bearer()).status == 200
    assert service.request.sampling.max_tokens == 5


def test_every_answer_to_a_limited_key_says_what_is_left(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(requests_per_minute=3, tokens_per_minute=10_000))
    first, wrong = complete(service, max_tokens=50), complete(service, n="two")
    streamed = complete(service, stream=True)
    assert [answer.status for answer in (first, wrong, streamed)] == [200, 400, 200]
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in (first, wrong, streamed)]
    assert left == [2, 1, 0]
    assert first.headers["x-ratelimit-limit-tokens"] == "10000"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = complete(service)
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert refused.error["code"] == "rate_limit_exceeded"
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_call_is_charged_what_it_used_in_the_end(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        service = with_keys(tokenizer, entry(tokens_per_minute=6_000_000))
        used = complete(service, n=2, max_tokens=100).json["usage"]["total_tokens"]
        complete(service, n=2, max_tokens=100, stream=stream)
        left = service.call("GET", "/v1/models", headers=bearer()).headers["x-ratelimit-remaining-tokens"]
        # The bucket fills again meanwhile, so that what is left is this much or a little more.
        assert 6_000_000 - 2 * used <= int(left) <= 6_000_000


def test_tokens_in_use_are_not_there_for_others(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [WAIT], keys=[entry(tokens_per_minute=150)])

    async def run() -> Answer:
        body = {"prompt": "Hi", "max_tokens": 100}
        async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as first:
            await until(lambda: bool(service.generate.open))
            async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as second:
                await second.finished()
                refused = second.answer()
            first.hang_up()
            await first.finished()
        async with Connection(service.app, "GET", "/v1/models", None, bearer()) as third:
            await third.finished()
            assert third.answer().headers["x-ratelimit-remaining-tokens"] == "150"
        return refused

    answer = asyncio.run(run())
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert "150 tokens a minute" in answer.error["message"]


def test_a_call_that_no_replica_took_costs_no_tokens(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [Overloaded("all are full")], keys=[entry(tokens_per_minute=1000)])
    answer = complete(service, max_tokens=100)
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    headers = service.call("GET", "/v1/models", headers=bearer()).headers
    assert headers["x-ratelimit-remaining-tokens"] == "1000"


@pytest.mark.parametrize("stream", [False, True])
def test_requests_at_once_are_counted_until_their_last_byte(tokenizer: Tokenizer, stream: bool) -> None:
    [first_token] = tokenizer.encode("3", add_special_tokens=False)[:1]
    service = Service(tokenizer, lambda request: [(first_token,), WAIT], keys=[entry(max_concurrency=1)])

    async def run() -> None:
        body = {"prompt": "Hi", "stream": stream}
        async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as first:
            await until(lambda: bool(service.generate.open))
            async with Connection(service.app, "GET", "/v1/models", None, bearer()) as second:
                await second.finished()
                assert second.answer().status == 429
            first.hang_up()
            await first.finished()
        async with Connection(service.app, "GET", "/v1/models", None, bearer()) as third:
            await third.finished()
            assert third.answer().status == 200

    asyncio.run(run())
