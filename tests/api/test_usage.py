"""What admins are told of usage, and how budgets of days and months end: over the API, with the real ledger."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.api.auth.keys import AccountLimits
from app.api.auth.limits import Account, SharedPools
from app.config import KeyConfig, PricesConfig
from app.errors import BudgetSpent, LimitReached
from app.text import Tokenizer
from app.usage import CallUsage, UsageCounter, UsageExchange, Used
from app.usage.records import BudgetTotals, LimitUse, Share, day_of, next_day, next_month
from tests.kit.engine import FakeClock
from tests.kit.service import ADMIN_KEY, KEY, OTHER_KEY, WAIT, Answer, Connection, Service, bearer, entry, say
from tests.kit.usage import NOON, LedgerOwner
from tests.waiting import until

PRICES = PricesConfig(input=10.0, cached_input=1.0, output=100.0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[LedgerOwner]:
    with closing(LedgerOwner(tmp_path, today=day_of(time.time()))) as owner:
        yield owner


def a_service(tokenizer: Tokenizer, owner: LedgerOwner | None = None, **limits: Any) -> Service:
    keys = [entry(**limits), entry(OTHER_KEY, "bob"), entry(ADMIN_KEY, "root", admin=True)]
    service = Service(tokenizer, say(tokenizer, "3 4 5."), keys=keys, prices=PRICES)
    service.app = service.built(ledger=owner)
    return service


def complete(service: Service, key: str = KEY, **fields: Any) -> Answer:
    return service.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 9} | fields, bearer(key))


def report(service: Service, owner: LedgerOwner, folder: Path) -> None:
    authenticator = service.handler.authenticator
    exchange = UsageExchange(authenticator.pools.usage, owner, folder, AccountLimits(authenticator))
    asyncio.run(exchange.exchange())


def usage(service: Service, query: str = "", key: str = ADMIN_KEY) -> Answer:
    return service.call("GET", "/admin/usage", headers=bearer(key), query=query)


def test_admins_see_what_each_key_has_used_of_which_model_in_which_class(
    tokenizer: Tokenizer, owner: LedgerOwner, tmp_path: Path
) -> None:
    service = a_service(tokenizer, owner)
    told = [complete(service).json["usage"], complete(service, service_tier="flex").json["usage"]]
    complete(service, OTHER_KEY, n=2)
    assert usage(service).json["data"] == [], "the ledger does not have them yet"
    report(service, owner, tmp_path)
    answer = usage(service, "group_by=class,key").json
    today = day_of(time.time())
    assert (answer["from"], answer["to"], answer["group_by"]) == (f"{today[:8]}01", today, ["key", "class"])
    assert (answer["kept"], answer["processes"]) == (True, None)
    background, online, of_bob = answer["data"]
    num_prompt, num_output = told[0]["prompt_tokens"], told[0]["completion_tokens"]
    assert online == {
        "key": "alice",
        "class": "online",
        "requests": 1,
        "prompt_tokens": num_prompt,
        "cached_tokens": 2,
        "output_tokens": num_output,
        "cost": round((10 * (num_prompt - 2) + 2 + 100 * num_output) / 1e6, 6),
    }
    assert background == online | {"class": "background"}
    assert (of_bob["key"], of_bob["requests"], of_bob["output_tokens"]) == ("bob", 1, 2 * num_output)
    [of_model] = usage(service, "group_by=model,day").json["data"]
    assert (of_model["model"], of_model["day"], of_model["requests"]) == ("demo", today, 3)


def test_usage_as_csv_has_the_same_numbers(tokenizer: Tokenizer, owner: LedgerOwner, tmp_path: Path) -> None:
    service = a_service(tokenizer, owner)
    for key in (KEY, OTHER_KEY):
        complete(service, key)
    report(service, owner, tmp_path)
    answer = usage(service, "group_by=key,day&format=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    as_json = usage(service, "group_by=key,day").json["data"]
    assert rows == [{name: str(value) for name, value in each.items()} for each in as_json]
    assert [row["key"] for row in rows] == ["alice", "bob"]


def test_usage_is_for_admins_alone(tokenizer: Tokenizer, owner: LedgerOwner, tmp_path: Path) -> None:
    service = a_service(tokenizer, owner)
    complete(service)
    report(service, owner, tmp_path)
    for path in ("/admin/usage", "/admin/keys"):
        refused = service.call("GET", path, headers=bearer())
        assert (refused.status, refused.error["code"]) == (403, "admin_key_required")
        assert service.call("GET", path).status == 401
    assert usage(service).status == 200


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("from=yesterday", "from", "`from` is 'yesterday'; send a day such as 2026-11-01"),
        ("to=2026-02-30", "to", "`to` is '2026-02-30'"),
        ("from=2026-11-02&to=2026-11-01", "from", "`from` is 2026-11-02, which is after `to`, 2026-11-01"),
        ("group_by=key,tenant", "group_by", "group_by contains 'tenant'; send one or more of key, model, class, day"),
        ("group_by=", "group_by", "group_by contains ''"),
        ("format=xml", "format", "`format` is 'xml'; it must be json or csv"),
    ],
)
def test_a_wrong_question_is_answered_with_what_to_ask(
    tokenizer: Tokenizer, owner: LedgerOwner, query: str, param: str, message: str
) -> None:
    answer = usage(a_service(tokenizer, owner), query)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]


def test_without_a_ledger_the_processes_tell_what_they_have_counted(tokenizer: Tokenizer) -> None:
    service = a_service(tokenizer)
    complete(service)
    answer = usage(service).json
    assert (answer["kept"], answer["processes"]) == (False, {"answered": 1, "missing": 0})
    assert [(each["key"], each["requests"]) for each in answer["data"]] == [("alice", 1)]
    assert usage(service, "to=2026-01-01&from=2026-01-01").json["data"] == []


@pytest.mark.parametrize("name", ["tokens_per_day", "tokens_per_month"])
def test_a_budget_in_tokens_is_refused_by_its_name_until_it_is_renewed(
    tokenizer: Tokenizer, owner: LedgerOwner, tmp_path: Path, name: str
) -> None:
    service = a_service(tokenizer, owner, **{name: 40})
    used = complete(service).json["usage"]["total_tokens"]
    for is_reported in (False, True):
        if is_reported:
            report(service, owner, tmp_path)
        answer = complete(service, max_tokens=40)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (
            429, "insufficient_quota", "budget_spent"
        )  # fmt: skip
        needed = answer.error["message"].split("needs up to ")[1].split(";")[0]
        assert int(needed) > 40
        renewed_at = {"tokens_per_day": next_day, "tokens_per_month": next_month}[name](day_of(time.time()))
        assert answer.error["message"].startswith(
            f"{name} of this API key is 40; {used} are used or reserved, and this request needs up to {needed}; the "
            f"budget is renewed at {renewed_at:%Y-%m-%dT%H:%M:%SZ}"
        )
        assert answer.headers["x-should-retry"] == "false"
        left_s = renewed_at.timestamp() - time.time()
        assert left_s < int(answer.headers["retry-after"]) < left_s + 60
        assert complete(service, OTHER_KEY, max_tokens=40).status == 200, "the budget is that key's alone"
    told = service.call("GET", "/admin/keys", headers=bearer(ADMIN_KEY)).json["data"][0]
    assert (told["requests"], told["refused"], told["limits"][name]) == (1, 2, 40)


def test_a_line_of_a_batch_waits_for_the_budget(tokenizer: Tokenizer) -> None:
    service, line = a_service(tokenizer, tokens_per_day=40), {"prompt": "Hi", "max_tokens": 20}
    answered = asyncio.run(service.handler.handle_item("alice", "/v1/completions", line))
    assert answered.status_code == 200
    with pytest.raises(BudgetSpent):
        asyncio.run(service.handler.handle_item("alice", "/v1/completions", line | {"max_tokens": 35}))


def test_a_budget_in_money_is_a_402_in_each_api(tokenizer: Tokenizer, owner: LedgerOwner) -> None:
    service = a_service(tokenizer, owner, money_per_month=0.001)
    assert complete(service).status == 200
    answer = complete(service, max_tokens=20)
    assert (answer.status, answer.error["code"]) == (402, "budget_spent")
    assert answer.error["message"].startswith("money_per_month of this API key is 0.0010; 0.0")
    body = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
    answer = service.call("POST", "/v1/messages", body, bearer())
    assert (answer.status, answer.json["error"]["type"]) == (402, "billing_error")


async def test_what_running_requests_may_use_is_not_there_for_others(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [WAIT], keys=[entry(tokens_per_day=150)])
    body = {"prompt": "Hi", "max_tokens": 100}
    async with Connection(service.app, "POST", "/v1/completions", body, bearer()) as first:
        await until(lambda: bool(service.generate.open))
        assert (await service.answer("POST", "/v1/completions", body, bearer())).status == 429
        first.hang_up()
        await first.finished()
    account = service.handler.authenticator.accounts[0]
    assert account.reserved == BudgetTotals()
    account.check_budgets(150, 0.0)


def test_a_new_day_has_a_new_budget() -> None:
    clock = FakeClock()
    clock.at = NOON
    pools = SharedPools()
    pools.usage = UsageCounter(clock)
    account = Account(KeyConfig.model_validate(entry(tokens_per_day=100)), clock, pools)
    with account.reserve() as reservation:
        reservation.usages.append(lambda: CallUsage("demo", False, Used(1, 40, 0, 60)))
    with pytest.raises(BudgetSpent) as caught:
        account.check_budgets(1, 0.0)
    assert caught.value.retry_after_s == (datetime(2026, 11, 28, tzinfo=UTC).timestamp() - NOON) == 43_200
    clock.advance(caught.value.retry_after_s)
    account.check_budgets(100, 0.0)


def test_what_other_processes_may_use_of_a_budget_is_refused_for_a_moment_and_then_given_here() -> None:
    pools = SharedPools(first_share=0.5, shares_budgets=True)
    account = Account(KeyConfig.model_validate(entry(tokens_per_day=1000)), FakeClock(), pools)
    [part] = account.shared_limits.values()
    with account.reserve() as reservation:
        reservation.reserve(25)  # a twentieth of the budget is here and elsewhere before its owner has answered
        with pytest.raises(
            LimitReached,
            match=r"1,000; 25 are used or reserved.* needs up to 20, but this process may use only 0 of the",
        ) as caught:
            reservation.reserve(20)
        assert (type(caught.value), caught.value.retry_after_s) == (LimitReached, 2.0)
        assert part.use() == LimitUse(0.0, -25.0, 45.0, 20.0)
        part.set_share(Share(0.5, 425.0))
        reservation.reserve(400)
        with pytest.raises(BudgetSpent, match="425 are used or reserved"):
            reservation.reserve(576)
        part.set_share(Share(0.5, -50.0))
        assert part.use().held == 0.0, "it cannot give up more than it has"
        part.lose_owner(has_share=False)
        reservation.usages.append(lambda: CallUsage("demo", False, Used(1, 40, 0, 60)))
    assert part.use().held == 325.0
