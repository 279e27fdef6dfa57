"""Adapters as models: which requests carry one, /v1/models, and GET, POST and DELETE /admin/adapters."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.endpoints.adapters import LoadedAdapters
from app.api.endpoints.admin import Answers
from app.engine.request import Adapter, Pooling
from app.errors import InvalidSetup, UnsupportedAdapter
from app.text import Tokenizer
from tests.kit.service import ADMIN_KEY, KEY, OTHER_KEY, Answer, Script, Service, bearer, entry, say, vector


class Replicas:
    """One that has loaded what is served, and one that has not answered."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.by_name: dict[str, Adapter] = {}

    @property
    def adapters(self) -> list[Adapter]:
        return list(self.by_name.values())

    async def loaded(self) -> Answers[LoadedAdapters]:
        replica = LoadedAdapters(replica_id="r0", loaded=[each.digest for each in self.adapters], max_loaded=8)
        return Answers(reports=[replica], num_missing=1)

    async def load(self, name: str, path: str) -> Adapter:
        if path == "/wrong":
            raise UnsupportedAdapter("it has rank 65; at most 64 is computed")
        self.by_name[name] = Adapter(name=name, path=path, digest=f"digest of {path}")
        self.service.handler.names.serve_adapters("demo", self.adapters)
        return self.by_name[name]

    async def unload(self, name: str) -> None:
        del self.by_name[name]
        self.service.handler.names.serve_adapters("demo", self.adapters)


def answering(tokenizer: Tokenizer) -> Script:
    """Three numbers, or a vector where one is asked for."""
    three = say(tokenizer, "3 4 5.")
    return lambda request: vector(request, [1.0, 0.0]) if request.pooling else three(request)


class Adapted:
    """A service of two models, of which the first can have adapters."""

    def __init__(self, tokenizer: Tokenizer, **settings: Any) -> None:
        self.service = Service(tokenizer, answering(tokenizer), names=("demo", "other"), **settings)
        self.replicas = Replicas(self.service)
        self.service.app = self.service.built(adapters={"demo": self.replicas})

    def post(self, body: Any, **headers: str) -> Answer:
        return self.service.call("POST", "/admin/adapters", body, headers)

    def load(self, name: str, path: str = "/sql") -> Answer:
        return self.post({"model": "demo", "name": name, "path": path})


@pytest.fixture
def adapted(tokenizer: Tokenizer) -> Adapted:
    return Adapted(tokenizer)


COMPLETION = {"prompt": "Once", "max_tokens": 1, "ignore_eos": True}


def test_a_request_that_names_an_adapter_carries_it(adapted: Adapted) -> None:
    adapted.load("sql")
    answer = adapted.service.call("POST", "/v1/completions", COMPLETION | {"model": "sql"})
    assert (answer.status, answer.json["model"]) == (200, "sql")
    request = adapted.service.request
    assert request.adapter == Adapter(name="sql", path="/sql", digest="digest of /sql")
    assert request.prefix_salt != request.cache_salt


def test_a_request_for_the_base_carries_none(adapted: Adapted) -> None:
    adapted.load("sql")
    adapted.service.call("POST", "/v1/completions", COMPLETION | {"model": "demo"})
    assert adapted.service.request.adapter is None


def test_models_are_listed_with_their_parent(adapted: Adapted) -> None:
    adapted.load("sql")
    listed = adapted.service.call("GET", "/v1/models").json["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("demo", None), ("other", None), ("sql", "demo")]
    one = adapted.service.call("GET", "/v1/models/sql").json
    assert (one["root"], one["parent"], one["max_model_len"]) == ("sql", "demo", 200)


def test_the_entry_says_where_it_is_loaded(adapted: Adapted) -> None:
    expected = {
        "name": "sql", "object": "adapter", "model": "demo", "path": "/sql", "digest": "digest of /sql",
        "loaded_on": ["r0"],
    }  # fmt: skip
    assert adapted.load("sql").json == expected
    listed = adapted.service.call("GET", "/admin/adapters").json
    assert (listed["data"], listed["missing"]) == ([expected], 1)
    assert listed["replicas"] == [{"model": "demo", "replica": "r0", "loaded": 1, "max_loaded": 8}]


def test_an_unloaded_adapter_is_no_model_any_more(adapted: Adapted) -> None:
    adapted.load("org/sql")
    assert adapted.service.call("DELETE", "/admin/adapters/org/sql").status == 200
    assert adapted.service.call("DELETE", "/admin/adapters/org/sql").status == 404
    answer = adapted.service.call("POST", "/v1/completions", COMPLETION | {"model": "org/sql"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "demo", "name": "sql", "path": "/wrong"}, 400, "path"),
        ({"model": "demo", "name": "other", "path": "/sql"}, 400, "name"),
        ({"model": "demo", "name": "demo", "path": "/sql"}, 400, "name"),
        ({"model": "demo", "name": "", "path": "/sql"}, 400, "name"),
        ({"model": "demo", "name": "sql"}, 400, "path"),
        ({"model": "other", "name": "sql", "path": "/sql"}, 404, "model"),
        ({"name": "sql", "path": "/sql"}, 400, "model"),
    ],
)
def test_what_is_refused(adapted: Adapted, body: Any, status: int, param: str) -> None:
    answer = adapted.post(body)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)
    assert adapted.replicas.adapters == []


SQL_STEPS: list[Any] = [
    [{"kind": "generate", "model": "sql"}],
    [{"kind": "cascade", "small": "sql", "large": "other"}],
    [{"kind": "route", "cases": [{"model": "sql", "max_prompt_tokens": 9}, {"model": "other"}]}],
    [{"kind": "embed", "model": "sql", "top_n": 1}, {"kind": "generate", "model": "sql"}],
]


def with_pipeline(tokenizer: Tokenizer, steps: Any) -> Adapted:
    models = [{"name": "demo", "adapters": {"sql": "/sql"}}, {"name": "other"}]
    return Adapted(tokenizer, models=models, pipelines=[{"name": "p", "steps": steps}], pooling=Pooling.LAST)


@pytest.mark.parametrize("steps", SQL_STEPS)
def test_a_step_may_name_an_adapter_which_is_then_as_it_is_served_now(tokenizer: Tokenizer, steps: Any) -> None:
    adapted = with_pipeline(tokenizer, steps)
    body = COMPLETION | {"model": "p"} | ({"documents": ["red", "blue"]} if len(steps) > 1 else {})
    for path in ("/sql", "/sql-2"):
        adapted.load("sql", path)
        adapted.service.generate.requests.clear()
        answer = adapted.service.call("POST", "/v1/completions", body)
        assert (answer.status, answer.json["model"]) == (200, "sql"), answer.body
        carried = [each.adapter for each in adapted.service.generate.requests]
        assert carried == [Adapter(name="sql", path=path, digest=f"digest of {path}")] * len(carried)
    adapted.service.call("DELETE", "/admin/adapters/sql")
    gone = adapted.service.call("POST", "/v1/completions", body)
    assert (gone.status, gone.json["error"]["code"]) == (404, "model_not_found")
    assert "the adapter 'sql' of demo is no longer served" in gone.json["error"]["message"]


def test_an_adapter_of_another_model_does_not_take_its_place_in_a_pipeline(tokenizer: Tokenizer) -> None:
    adapted = with_pipeline(tokenizer, SQL_STEPS[0])
    adapted.service.handler.names.serve_adapters("other", [Adapter(name="sql", path="/sql", digest="x")])
    assert adapted.service.call("POST", "/v1/completions", COMPLETION | {"model": "p"}).status == 404


CASES = [{"model": "demo", "examples": ["a"]}, {"model": "other", "examples": ["b"]}]


@pytest.mark.parametrize(
    ("step", "field"),
    [
        ({"kind": "embed", "model": "sql", "index": "documents.jsonl"}, "model"),
        ({"kind": "route", "classifier": "sql", "cases": CASES}, "classifier"),
    ],
)
def test_vectors_of_an_adapter_are_not_kept(tokenizer: Tokenizer, step: Any, field: str) -> None:
    steps = [step] if step["kind"] == "route" else [step, {"kind": "generate", "model": "demo"}]
    with pytest.raises(InvalidSetup, match=rf"pipelines\[0\]\.steps\[0\]\.{field}: sql is an adapter"):
        with_pipeline(tokenizer, steps)


def test_a_key_for_the_base_is_for_its_adapters_and_no_other_is(tokenizer: Tokenizer) -> None:
    keys = [
        entry(ADMIN_KEY, "root", admin=True), entry(KEY, "alice", models=["demo"]),
        entry(OTHER_KEY, "bob", models=["other"]),
    ]  # fmt: skip
    adapted = Adapted(tokenizer, keys=keys)
    assert adapted.post({"name": "sql", "path": "/sql", "model": "demo"}, **bearer(KEY)).status == 403
    assert adapted.post({"name": "sql", "path": "/sql", "model": "demo"}, **bearer(ADMIN_KEY)).status == 200
    body = COMPLETION | {"model": "sql"}
    answers = [adapted.service.call("POST", "/v1/completions", body, bearer(key)) for key in (KEY, OTHER_KEY)]
    assert [answer.status for answer in answers] == [200, 403]
    listed = adapted.service.call("GET", "/v1/models", None, bearer(OTHER_KEY)).json["data"]
    assert [each["id"] for each in listed] == ["other"]
