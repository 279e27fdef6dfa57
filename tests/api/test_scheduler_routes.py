"""GET and POST /admin/scheduler: what may be switched to, what is refused, and what the answer says."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.endpoints.admin import Answers
from app.api.endpoints.scheduler import ReplicaScheduling
from app.config import PolicyConfig, SchedulerConfig, StaticConfig, StrategyConfig
from app.text import Tokenizer
from tests.kit.service import ADMIN_KEY, Answer, Service, bearer, entry


class Replicas:
    """Two, of which the second has not answered."""

    def __init__(self) -> None:
        self.scheduler = SchedulerConfig()
        self.num_switches = 0

    async def in_force(self) -> Answers[ReplicaScheduling]:
        at = 12.5 if self.num_switches else None
        one = ReplicaScheduling(replica_id="r0", group="bold", scheduler=self.scheduler, switched_at=at)
        return Answers(reports=[one], num_missing=1)

    async def switch(self, strategy: StrategyConfig | None, policy: PolicyConfig | None) -> Answers[ReplicaScheduling]:
        changes = {"strategy": strategy, "policy": policy}
        self.scheduler = SchedulerConfig(**{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
        self.num_switches += 1
        return await self.in_force()


class Switched:
    """A service of two models, of which the replicas of the first can be switched."""

    def __init__(self, tokenizer: Tokenizer, **settings: Any) -> None:
        self.service = Service(tokenizer, names=("demo", "other"), **settings)
        self.replicas = Replicas()
        self.service.app = self.service.built(switches={"demo": self.replicas})

    def post(self, body: Any, **headers: str) -> Answer:
        return self.service.call("POST", "/admin/scheduler", body, headers)


@pytest.fixture
def switched(tokenizer: Tokenizer) -> Switched:
    return Switched(tokenizer)


def test_a_strategy_and_a_policy_are_named_or_given_with_parameters(switched: Switched) -> None:
    answer = switched.post({"model": "demo", "strategy": {"name": "static", "max_wait_ms": 4}, "policy": "fair"})
    assert answer.json == {
        "model": "demo",
        "replicas": [
            {
                "replica": "r0", "group": "bold", "switched_at": 12.5,
                "strategy": {"name": "static", "max_wait_ms": 4.0}, "policy": {"name": "fair"},
            }
        ],
        "missing": 1,
    }  # fmt: skip
    assert switched.replicas.scheduler.strategy == StaticConfig(max_wait_ms=4)
    shown = switched.service.call("GET", "/admin/scheduler").json
    assert (shown["object"], shown["data"]) == ("list", [answer.json])
    assert shown["strategies"] == ["static", "dynamic", "bucketed", "sorted", "adaptive", "continuous", "hybrid"]
    assert shown["policies"] == ["fcfs", "sjf", "priority", "fair", "deadline"]


def test_what_is_not_named_is_as_deployed(switched: Switched) -> None:
    switched.post({"model": "demo", "strategy": "static", "policy": "sjf"})
    switched.post({"model": "demo", "policy": "fair", "strategy": None})
    assert switched.replicas.scheduler == SchedulerConfig(policy="fair")  # type: ignore[arg-type]
    switched.post({"model": "demo"})
    assert switched.replicas.scheduler == SchedulerConfig()


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"model": "demo", "strategy": "magic"}, 400, "strategy", "must be one of static, dynamic"),
        ({"model": "demo", "strategy": {"max_wait_ms": 2}}, 400, "strategy", "without a name"),
        ({"model": "demo", "strategy": 5}, 400, "strategy", ""),
        ({"model": "demo", "strategy": ["static"]}, 400, "strategy", ""),
        (
            {"model": "demo", "strategy": {"name": "static", "max_wait_ms": 700_000}},
            400, "strategy.static.max_wait_ms", "less than or equal to 600000; got 700000",
        ),
        ({"model": "demo", "policy": {"name": "fcfs", "x": 1}}, 400, "policy", "fcfs has no parameter 'x'"),
        ({"model": "demo", "stategy": "static"}, 400, "stategy", "there is no field stategy"),
        ({"model": "demo", "max_running": 2}, 400, "max_running", ""),
        ({"strategy": "static"}, 400, "model", "this server has demo, other"),
        ({"model": "none", "strategy": "static"}, 404, "model", "there is no model 'none'"),
        ({"model": "other", "strategy": "static"}, 404, "model", "no replicas of 'other' to switch"),
        ("static", 400, None, "a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(
    switched: Switched, body: Any, status: int, param: str | None, message: str
) -> None:
    answer = switched.post(body)
    assert (answer.status, answer.error["param"]) == (status, param), answer.json
    assert message in answer.error["message"]
    assert switched.replicas.num_switches == 0


def test_only_an_admin_switches(tokenizer: Tokenizer) -> None:
    switched = Switched(tokenizer, keys=[entry(), entry(ADMIN_KEY, "root", admin=True)])
    body = {"model": "demo", "strategy": "static"}
    assert [switched.post(body, **headers).status for headers in ({}, bearer(), bearer(ADMIN_KEY))] == [401, 403, 200]
    assert switched.replicas.num_switches == 1
