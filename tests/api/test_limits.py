"""What one key may use, and what it changes about a call: tenant, cache, lengths, and the headers about its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from app.api.auth import limits
from app.api.auth.keys import NoAuthentication
from app.api.auth.limits import SLOT_WAIT_S, Account, SharedPools, Slots, TokenBucket
from app.config import KeyConfig
from app.errors import InvalidRequest, LimitReached, NotPermitted, Overloaded
from app.fair import SharedPool
from app.text import Tokenizer
from app.usage import CallUsage, Used
from app.usage.records import SLOTS, BudgetTotals, LimitUse, Share
from tests.kit.engine import FakeClock
from tests.kit.service import KEY, OTHER_KEY, WAIT, Answer, Connection, Service, bearer, entry, say
from tests.waiting import TimelessLoop, until


def account(clock: FakeClock, **limits: Any) -> Account:
    return Account(KeyConfig.model_validate(entry(**limits)), clock)


def test_a_bucket_gives_a_minutes_worth_at_once_and_fills_evenly() -> None:
    clock = FakeClock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.remaining, bucket.reset_s) == (0, 60)
    assert bucket.wait_s(1) == 1
    clock.advance(1.5)
    assert bucket.remaining == 1
    assert bucket.wait_s(1) == 0
    clock.advance(1000)
    assert (bucket.remaining, bucket.reset_s) == (60, 0)


def test_a_bucket_pays_its_debt_before_it_gives_again() -> None:
    clock = FakeClock()
    bucket = TokenBucket(60, clock)
    bucket.take(90)
    assert bucket.remaining == 0
    assert bucket.wait_s(1) == 31
    clock.advance(31)
    assert bucket.wait_s(1) == 0


def test_more_than_a_minutes_worth_is_given_when_the_bucket_is_full() -> None:
    clock = FakeClock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait_s(1000) == 0
    bucket.take(1)
    assert bucket.wait_s(1000) == 1


def test_what_is_given_back_never_makes_a_bucket_more_than_full() -> None:
    bucket = TokenBucket(60, FakeClock())
    bucket.take(10)
    bucket.take(-30)
    assert bucket.remaining == 60


def test_requests_beyond_the_minutes_are_refused_with_the_time_to_wait() -> None:
    clock = FakeClock()
    limited = account(clock, requests_per_minute=2)
    for _ in range(2):
        with limited.reserve():
            pass
    with pytest.raises(LimitReached, match="2 requests a minute") as caught, limited.reserve():
        pass
    assert caught.value.retry_after_s == 30
    clock.advance(30)
    with limited.reserve():
        pass


def test_requests_at_once_are_counted_to_their_end_however_they_end() -> None:
    limited = account(FakeClock(), max_concurrency=1)

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
    limited = account(FakeClock(), requests_per_minute=5, max_concurrency=1)
    with limited.reserve():
        for _ in range(3):
            with pytest.raises(LimitReached), limited.reserve():
                pass
        assert limited.headers()["x-ratelimit-remaining-requests"] == "4"


def test_tokens_are_reserved_at_the_start_and_settled_at_the_end() -> None:
    limited = account(FakeClock(), tokens_per_minute=100)
    with limited.reserve() as reservation:
        reservation.reserve(80)
        assert limited.headers()["x-ratelimit-remaining-tokens"] == "20"
        with pytest.raises(LimitReached, match="needs up to 30, and 20 are left"), limited.reserve() as other:
            other.reserve(30)
        reservation.usages.append(lambda: CallUsage("demo", False, Used(1, 5, 0, 10)))
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "85"


def test_what_was_reserved_comes_back_when_nothing_was_computed() -> None:
    limited = account(FakeClock(), tokens_per_minute=100)

    def fail() -> None:
        with limited.reserve() as reservation:
            reservation.reserve(80)
            raise RuntimeError("no replica took it")

    with pytest.raises(RuntimeError):
        fail()
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_a_part_of_a_limit_is_what_a_process_has_until_it_is_given_more() -> None:
    clock, pools = FakeClock(), SharedPools(first_share=0.25)
    limits = entry(requests_per_minute=8, tokens_per_minute=400, max_concurrency=8)
    limited = Account(KeyConfig.model_validate(limits), clock, pools)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limited.reserve())
        with pytest.raises(LimitReached, match=r"8 requests at once \(6 of them currently .*\) and is running 2"):
            running.enter_context(limited.reserve())
        by_what = {limit_id.what: limit for limit_id, limit in limited.shared_limits.items()}
        assert by_what[SLOTS].use() == LimitUse(2, 2, 3), "two had slots, and one more was asked for"
        assert by_what["requests"].use() == LimitUse(0.0, -2.0, 2.0)
        by_what[SLOTS].set_share(Share(4))
        with pytest.raises(LimitReached, match="8 requests a minute; this request needs up to 1, and 0 are left"):
            running.enter_context(limited.reserve())
        by_what["requests"].set_share(Share(0.5, 5.0))
        last = running.enter_context(limited.reserve())
        by_what["tokens"].set_share(Share(0.5, 200.0))
        with pytest.raises(LimitReached, match="needs up to 201, and 200 are left") as caught:
            last.reserve(201)
        assert caught.value.retry_after_s == 2.0, "until what others have is here"
        for limit in by_what.values():
            limit.lose_owner(has_share=True)
        last.reserve(201)
        for limit in by_what.values():
            limit.lose_owner(has_share=False)
        assert by_what[SLOTS].use().share == 2


@pytest.fixture
def timeless() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        yield runner


async def asked(account: Account, running: ExitStack) -> float:
    """As the guard does; seconds until it has begun. Raises LimitReached."""
    began = asyncio.get_running_loop().time()
    await account.wait_for_slot()
    running.enter_context(account.reserve())
    return asyncio.get_running_loop().time() - began


def sharing(num_here: int, *, of: int) -> tuple[Account, Slots, list[None]]:
    """An account that shares its slots with others; the list gets one more whenever the owner should soon be told."""
    hurried: list[None] = []
    pools = SharedPools(first_share=0.5)
    pools.request_report = lambda: hurried.append(None)
    account = Account(KeyConfig.model_validate(entry(max_concurrency=of)), FakeClock(), pools)
    assert account.slots is not None
    account.slots.set_share(Share(num_here))
    return account, account.slots, hurried


def test_a_request_waits_for_a_place_of_another_process_and_asks_for_it_at_once(timeless: asyncio.Runner) -> None:
    limited, slots, hurried = sharing(1, of=4)

    async def run() -> list[float]:
        with ExitStack() as running:
            durations = [await asked(limited, running)]
            waiting = [asyncio.create_task(asked(limited, running)) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert slots.use() == LimitUse(1, 1, 3, refused=2)
            slots.set_share(Share(3))
            return [*durations, *await asyncio.gather(*waiting)]

    assert timeless.run(run()) == pytest.approx([0, 0.1, 0.1])
    assert len(hurried) == 2


def test_a_place_that_is_given_back_here_goes_to_a_request_that_waits(timeless: asyncio.Runner) -> None:
    limited, _, _ = sharing(1, of=4)

    async def run() -> float:
        with ExitStack() as running, ExitStack() as first:
            await asked(limited, first)
            waiting = asyncio.create_task(asked(limited, running))
            await asyncio.sleep(0.2)
            first.close()
            return await waiting

    assert timeless.run(run()) == pytest.approx(0.2)


@pytest.mark.parametrize("owner_is_lost", [False, True])
def test_a_request_without_a_place_is_refused_after_a_moment_and_at_once_where_none_can_come(
    owner_is_lost: bool, timeless: asyncio.Runner
) -> None:
    limited, slots, _ = sharing(1, of=4)

    async def run() -> float:
        with ExitStack() as running:
            await asked(limited, running)
            if owner_is_lost:
                slots.lose_owner(has_share=True)
            began = asyncio.get_running_loop().time()
            with pytest.raises(LimitReached, match="4 requests at once"):
                await asked(limited, running)
            assert slots.use().refused == 0, "none waits any more"
            return asyncio.get_running_loop().time() - began

    assert timeless.run(run()) == pytest.approx(0.0 if owner_is_lost else SLOT_WAIT_S)


def test_free_places_are_given_back_while_requests_wait_elsewhere() -> None:
    limited, slots, hurried = sharing(3, of=4)
    with limited.reserve():
        slots.set_share(Share(3, elsewhere=1.0))
        assert slots.use().share == 1
        assert not hurried
    assert len(hurried) == 1
    assert slots.use().share == 0
    slots.set_share(Share(2))
    assert slots.use().share == 2, "no request waits now"


def test_log_probabilities_of_calls_under_way_share_what_a_process_holds_at_once() -> None:
    limited = account(FakeClock())
    pool = limited.pools.logprobs
    with limited.reserve() as first:
        first.reserve(10)
        assert pool.held(limited) == 0, "it asks for none"
        for number in (1_000_000, 2_000_000):
            first.reserve(10, num_logprobs=number)
        with pytest.raises(LimitReached, match="other running answers of this API key up to 3,000,000") as caught:
            first.reserve(10, num_logprobs=2_000_001)
        assert caught.value.retry_after_s == 1.0
        assert pool.held(limited) == 3_000_000
    assert pool.held(limited) == 0


def test_a_line_that_a_limit_turns_away_has_used_nothing() -> None:
    limited = account(FakeClock(), requests_per_minute=5, tokens_per_minute=100)
    with limited.reserve_item() as first:
        first.reserve(60)
        for _ in range(3):
            with pytest.raises(LimitReached), limited.reserve_item() as turned_away:
                turned_away.reserve(60)
        left = limited.headers()
    assert (left["x-ratelimit-remaining-requests"], left["x-ratelimit-remaining-tokens"]) == ("4", "40")


def test_a_kept_response_counts_where_it_came_in_and_its_tokens_where_it_runs() -> None:
    limited = account(FakeClock(), max_concurrency=1, requests_per_minute=1, tokens_per_minute=100)
    with limited.reserve(), limited.reserve_for_stored() as reservation:
        reservation.reserve(60)
        reservation.usages.append(lambda: CallUsage("demo", False, Used(1, 20, 0, 10)))
        assert limited.headers()["x-ratelimit-remaining-tokens"] == "40"
    assert limited.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert (limited.usage.num_requests, limited.usage.num_running, limited.usage.num_tokens) == (1, 0, 30)


def test_headers_tell_only_of_the_limits_that_there_are() -> None:
    assert account(FakeClock()).headers() == {}
    clock = FakeClock()
    limited = account(clock, requests_per_minute=60)
    with limited.reserve():
        clock.advance(0.25)
        assert limited.headers() == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "0.750s",
        }


def test_a_key_is_for_its_models_or_for_all() -> None:
    assert account(FakeClock()).may_use("any")
    limited = account(FakeClock(), models=["small"])
    limited.check_model("small")
    with pytest.raises(NotPermitted, match="'large'") as caught:
        limited.check_model("large")
    assert caught.value.param == "model"


def test_an_output_that_is_too_long_for_the_key_is_refused_by_name() -> None:
    limited = account(FakeClock(), max_tokens=10)
    assert limited.max_tokens(10, "max_tokens") == 10
    assert limited.max_tokens(None, "max_tokens") == 10
    with pytest.raises(
        InvalidRequest, match="max_completion_tokens is 11; this API key may request at most 10"
    ) as caught:
        limited.max_tokens(11, "max_completion_tokens")
    assert caught.value.param == "max_completion_tokens"
    assert account(FakeClock()).max_tokens(10**6, "max_tokens") is None


def with_keys(tokenizer: Tokenizer, *keys: dict[str, Any], names: tuple[str, ...] = ("demo",), **more: Any) -> Service:
    return Service(tokenizer, say(tokenizer, "3 4 5."), names=names, keys=keys or (entry(),), **more)


def complete(service: Service, key: str = KEY, **fields: Any) -> Answer:
    return service.call("POST", "/v1/completions", {"prompt": "Hi"} | fields, bearer(key))


def test_the_name_of_the_key_is_the_tenant_whatever_the_body_says(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer)
    assert complete(service, user="somebody else").status == 200
    assert service.request.tenant == "alice"


def test_two_keys_share_no_session(tokenizer: Tokenizer) -> None:
    service = with_keys(tokenizer, entry(), entry(OTHER_KEY, "bob"))
    for key in (KEY, KEY, OTHER_KEY):
        headers = bearer(key) | {"x-carousel-session": "s" * 256}
        assert service.call("POST", "/v1/completions", {"prompt": "Hi"}, headers).status == 200
    first, again, others = [request.session for request in service.generate.requests]
    assert first == again != others
    assert complete(service).status == 200
    assert service.generate.requests[-1].session == "", "a request without a session has none"


def test_without_keys_the_user_of_the_body_is_the_tenant(service: Service) -> None:
    assert service.complete(user="somebody", cache_salt="mine").status == 200
    assert (service.request.tenant, service.request.cache_salt) == ("somebody", "mine")
    line = {"prompt": "Hi", "user": "somebody"}
    asyncio.run(service.handler.handle_item("alice", "/v1/completions", line))
    assert service.generate.requests[-1].tenant == "alice", "of a line, its owner"


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


async def test_tokens_in_use_are_not_there_for_others(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [WAIT], keys=[entry(tokens_per_minute=150)])

    body = {"prompt": "Hi", "max_tokens": 100}
    async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as first:
        await until(lambda: bool(service.generate.open))
        async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as second:
            answer = await second.finished()
        first.hang_up()
        await first.finished()
    async with Connection(service.app, "GET", "/v1/models", None, bearer()) as third:
        assert (await third.finished()).headers["x-ratelimit-remaining-tokens"] == "150"
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert "150 tokens a minute" in answer.error["message"]


def test_a_call_that_no_replica_took_costs_no_tokens(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [Overloaded("all are full")], keys=[entry(tokens_per_minute=1000)])
    answer = complete(service, max_tokens=100)
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    headers = service.call("GET", "/v1/models", headers=bearer()).headers
    assert headers["x-ratelimit-remaining-tokens"] == "1000"


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once_are_counted_until_their_last_byte(tokenizer: Tokenizer, stream: bool) -> None:
    [first_token] = tokenizer.encode("3", add_special_tokens=False)[:1]
    service = Service(tokenizer, lambda request: [(first_token,), WAIT], keys=[entry(max_concurrency=1)])

    body = {"prompt": "Hi", "stream": stream}
    async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as first:
        await until(lambda: bool(service.generate.open))
        async with Connection(service.app, "GET", "/v1/models", None, bearer()) as second:
            assert (await second.finished()).status == 429
        first.hang_up()
        await first.finished()
    async with Connection(service.app, "GET", "/v1/models", None, bearer()) as third:
        assert (await third.finished()).status == 200


def test_an_account_may_hold_as_much_as_is_free_and_one_that_comes_later_finds_some() -> None:
    pool = SharedPool[int](120)
    for index in range(3):  # one after the other takes what it may have
        while pool.allows(index, 1):
            pool.take(index, 1)
    assert [pool.held(index) for index in range(3)] == [60, 30, 15]
    for _ in range(200):  # each gives one back in its turn, and takes one where it may
        for index in range(3):
            pool.take(index, -1)
            for other in range(3):
                if pool.allows(other, 1):
                    pool.take(other, 1)
    held = [pool.held(index) for index in range(3)]
    assert max(held) - min(held) <= 1, held


def test_without_a_limit_of_its_own_a_key_may_have_half_of_the_places_and_others_find_some() -> None:
    pools = SharedPools(max_requests=8)
    keys = [KeyConfig.model_validate(entry(name, name)) for name in ("alice", "bob")]
    alice, bob = (Account(key, FakeClock(), pools) for key in keys)
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(alice.reserve())
        with pytest.raises(LimitReached, match=r"4 requests of this API key are running, and one more .* 8 slots"):
            running.enter_context(alice.reserve())
        for _ in range(2):
            running.enter_context(bob.reserve())
        with pytest.raises(LimitReached):
            running.enter_context(bob.reserve())
        assert (alice.usage.num_refused, bob.usage.num_refused) == (1, 1)
    assert pools.requests.allows(alice, 8), "all are given back"


def test_a_request_that_began_without_limits_owes_nothing_to_new_ones_and_old_ones_get_theirs_back() -> None:
    changing = Account(KeyConfig.model_validate(entry()), FakeClock(), SharedPools())
    assert not changing.is_limited
    with changing.reserve(), ExitStack() as running:
        changing.set_limits(KeyConfig.model_validate(entry(tokens_per_day=1000)))
        assert changing.is_limited
        running.enter_context(changing.reserve()).reserve(80)
        assert changing.reserved.tokens_today == 80
        changing.set_limits(KeyConfig.model_validate(entry()))
    assert changing.reserved == BudgetTotals()
    assert changing.usage.num_requests == 2


def test_a_limit_of_its_own_goes_before_the_places_that_are_free() -> None:
    key = KeyConfig.model_validate(entry(max_concurrency=3))
    account = Account(key, FakeClock(), SharedPools(max_requests=2))
    with ExitStack() as running:
        for _ in range(3):
            running.enter_context(account.reserve())
        with pytest.raises(LimitReached, match="may run 3 requests at once"):
            running.enter_context(account.reserve())


def test_requests_without_keys_share_half_of_the_places() -> None:
    account = NoAuthentication(SharedPools(max_requests=4)).account_of([])
    with (
        account.reserve(),
        account.reserve(),
        pytest.raises(LimitReached, match="2 requests without a key are running"),
        account.reserve(),
    ):
        pass


async def test_bodies_in_arrival_share_what_a_process_reads_at_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key sends bodies that never end; another is served, and after the first has gone it may send again."""
    monkeypatch.setattr(limits, "MAX_BODY_BYTES_AT_ONCE", 1_000_000, raising=False)
    keys = [entry(), entry(OTHER_KEY, "bob")]
    service = Service(tokenizer, say(tokenizer, "3 4 5."), keys=keys)

    async def status_of(body: bytes, headers: dict[str, str]) -> int:
        async with Connection(service.app, "POST", "/v1/completions", [body], headers) as connection:
            return (await connection.finished()).status

    async with AsyncExitStack() as stack:
        hogs = [
            await stack.enter_async_context(Connection(service.app, "POST", "/v1/completions", [], bearer()))
            for _ in range(8)
        ]
        for hog in hogs:
            hog.send_body(b" " * 100_000)
        await until(lambda: sum(bool(hog.messages) for hog in hogs) == 3)
        await asyncio.sleep(0.05)
        answers = [hog.answer() for hog in hogs if hog.messages]
        assert [answer.status for answer in answers] == [429] * 3, "five of 100,000 bytes are half of all"
        assert answers[0].headers["retry-after"] == "1"
        assert "request bodies of this API key with 500,000 bytes are already being read" in answers[0].error["message"]
        assert await status_of(b'{"prompt": "Hi"}', bearer(OTHER_KEY)) == 200
        assert await status_of(b'{"prompt": "Hi"}', bearer()) == 200, "a small whole body needs no room"
        assert await status_of(b'{"prompt": "Hi"}' + b" " * 200_000, bearer(OTHER_KEY)) == 200
        for hog in hogs:
            hog.hang_up()
            await hog.finished()
    assert await status_of(b'{"prompt": "Hi"}' + b" " * 400_000, bearer()) == 200


async def test_a_request_that_generates_holds_no_body(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams last; what they have sent is token ids by then."""
    monkeypatch.setattr(limits, "MAX_BODY_BYTES_AT_ONCE", 1_000_000, raising=False)
    [first_token] = tokenizer.encode("3", add_special_tokens=False)[:1]
    service = Service(tokenizer, lambda request: [(first_token,), WAIT])
    body = b'{"prompt": "Hi", "stream": true}' + b" " * 400_000

    async with AsyncExitStack() as stack:
        for number in range(1, 5):
            connection = Connection(service.app, "POST", "/v1/completions", [body], {})
            await stack.enter_async_context(connection)
            await until(lambda number=number: len(service.generate.open) == number)  # type: ignore[misc]
        account = service.handler.authenticator.accounts[0]
        assert not account.pools.body_bytes.held(account)


@pytest.mark.parametrize(("limits", "lowest"), [({}, 0), ({"min_priority": -5}, -5)])
def test_a_key_goes_before_others_as_far_as_its_entry_says(
    tokenizer: Tokenizer, limits: dict[str, int], lowest: int
) -> None:
    service = Service(tokenizer, say(tokenizer, "Hello"), keys=[entry(**limits)])
    for priority in (lowest, 100):
        assert complete(service, priority=priority).status == 200
        assert service.generate.requests[-1].priority == priority
    refused = complete(service, priority=lowest - 1)
    assert (refused.status, refused.error["param"]) == (400, "priority")
    assert refused.error["message"].startswith(
        f"`priority` is {lowest - 1}; this API key may use only {lowest} and above"
    )


def test_without_keys_any_priority_may_be_asked_for(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "Hello"))
    assert service.call("POST", "/v1/completions", {"prompt": "Hi", "priority": -100}).status == 200
