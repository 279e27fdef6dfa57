"""What admins are told: what keys have used, beside their limits, and never a key."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.auth.keys import KeyRing
from app.api.auth.limits import Account, Usage
from app.api.endpoints.admin import AdminRoutes, Answers, ProcessReport
from app.config import KeyConfig
from app.errors import LimitReached
from app.text import Tokenizer
from app.usage import CallUsage, Used
from tests.kit.service import ADMIN_KEY, KEY, Service, bearer, entry, say


@pytest.fixture
def keys_entries() -> list[dict[str, Any]]:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 1000, "max_concurrency": 2, "models": ["demo"]}
    return [entry(**limits), entry(ADMIN_KEY, "root", admin=True)]


def test_what_a_key_has_used_is_told_beside_its_limits(
    tokenizer: Tokenizer, keys_entries: list[dict[str, Any]]
) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5."), keys=keys_entries)
    usages = [
        service.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 9}, bearer()).json["usage"]
        for _ in range(2)
    ]
    statuses = [service.call("GET", "/v1/models", headers=bearer()).status for _ in range(2)]
    assert statuses == [200, 429]
    answer = service.call("GET", "/admin/keys", headers=bearer(ADMIN_KEY))
    alice, root = answer.json["data"]
    assert alice == {
        "name": "alice",
        "admin": False,
        "models": ["demo"],
        "requests": 3,
        "refused": 1,
        "running": 0,
        "tokens": sum(usage["total_tokens"] for usage in usages),
        "limits": {
            "requests_per_minute": 3, "tokens_per_minute": 1000, "max_concurrency": 2, "max_tokens": None,
            "tokens_per_day": None, "tokens_per_month": None, "money_per_month": None,
        },
    }  # fmt: skip
    assert (root["name"], root["admin"], root["requests"], root["running"]) == ("root", True, 1, 1)
    assert answer.json["processes"] == {"answered": 1, "missing": 0}
    for secret in (KEY, ADMIN_KEY, *(each["sha256"] for each in keys_entries)):
        assert secret.encode() not in answer.body


def test_several_processes_are_summed_and_those_that_say_nothing_are_counted(
    tokenizer: Tokenizer, keys_entries: list[dict[str, Any]]
) -> None:
    async def collect() -> Answers[ProcessReport]:
        of_alice = [Usage(3, 1, 2, 40), Usage(4, 0, 1, 60)]
        state = {"replica": "a", "is_suspect": False}
        reports = [
            ProcessReport(process=str(n), usage={"alice": each, "gone": each}, replicas={"demo": [state]})
            for n, each in enumerate(of_alice)
        ]
        return Answers(reports=reports, num_missing=1)

    async def wanted_replicas() -> list[dict[str, Any]]:
        return [{"model": "demo", "replicas": 1, "wanted": 3, "why": "20,000 tokens"}]

    keys = KeyRing(KeyConfig.model_validate(each) for each in keys_entries)
    routes = AdminRoutes(keys, collect, wanted_replicas)
    service = Service(tokenizer)
    service.app.router.routes[:0] = routes.routes()
    told = service.call("GET", "/admin/keys").json
    assert told["processes"] == {"answered": 2, "missing": 1}
    alice, root = told["data"]
    assert [alice[name] for name in ("requests", "refused", "running", "tokens")] == [7, 1, 3, 100]
    assert root["requests"] == 0
    fleet = service.call("GET", "/admin/fleet").json
    assert [(each["process"], each["model"]) for each in fleet["data"]] == [("0", "demo"), ("1", "demo")]
    assert fleet["autoscaling"] == [{"model": "demo", "replicas": 1, "wanted": 3, "why": "20,000 tokens"}]
    assert fleet["data"][0]["replicas"] == [{"replica": "a", "is_suspect": False}]


def test_a_line_that_has_to_wait_counts_as_refused_and_not_as_a_request() -> None:
    account = Account(KeyConfig.model_validate(entry(tokens_per_minute=10)), lambda: 0.0)
    with account.reserve_item() as reservation:
        reservation.reserve(10)
        reservation.usages.append(lambda: CallUsage("demo", False, Used(1, 4, 0, 6)))
    with pytest.raises(LimitReached), account.reserve_item() as reservation:
        reservation.reserve(1)
    assert account.usage == Usage(num_requests=1, num_refused=1, num_running=0, num_tokens=10)


def test_a_request_that_needs_more_tokens_than_there_are_is_told_as_refused(tokenizer: Tokenizer) -> None:
    keys = [entry(tokens_per_minute=20), entry(ADMIN_KEY, "root", admin=True)]
    service = Service(tokenizer, say(tokenizer, "3 4 5."), keys=keys)
    statuses = [
        service.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 19}, bearer()).status for _ in range(2)
    ]
    assert statuses == [200, 429]
    alice = service.call("GET", "/admin/keys", headers=bearer(ADMIN_KEY)).json["data"][0]
    assert (alice["requests"], alice["refused"], alice["running"]) == (1, 1, 0)
