"""A cascade: which model answers, what the response says of it, and what it costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.api.handler import RequestHandler
from app.config import ApiConfig
from app.errors import Overloaded
from app.metrics import RequestMetrics, Scrape, exposition
from app.text import Tokenizer
from tests.kit.service import (
    CASCADE,
    WAIT,
    Service,
    bearer,
    entry,
    hang_up,
    http_client,
    ring,
    say_likely,
    without_times,
)
from tests.metrics.test_exposition import value


def cascade(tokenizer: Tokenizer, logprob: float, **settings: Any) -> Service:
    """`both` over a small model of that confidence and a large one, with a bound of -0.5; both say the same."""
    return Service(
        tokenizer, say_likely(tokenizer, "3 4", logprob), names=("small", "large"), pipelines=[CASCADE], **settings
    )


@pytest.mark.parametrize(("logprob", "answers"), [(-0.4, "small"), (-0.5, "small"), (-0.6, "large"), (-1e30, "large")])
@pytest.mark.parametrize("stream", [False, True])
def test_the_large_model_answers_where_the_small_one_was_not_sure(
    tokenizer: Tokenizer, logprob: float, answers: str, stream: bool
) -> None:
    service = cascade(tokenizer, logprob)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = service.chat(model="both", **options)
    final = answer.chunks[-1] if stream else answer.json
    shown = max(logprob, -9999.0)
    num_tokens = final["usage"]["completion_tokens"]
    assert final["model"] == answer.headers["x-carousel-pipeline-model"] == answers
    assert float(answer.headers["x-carousel-pipeline-logprob"]) == pytest.approx(shown)
    told = without_times(final["usage"])["pipeline"]
    assert told["name"] == "both"
    shared = {"name": "both[0]", "kind": "cascade", "completion_tokens": num_tokens}
    shared["prompt_tokens"] = final["usage"]["prompt_tokens"]
    small = shared | {"model": "small", "mean_logprob": pytest.approx(shown), "is_sure": answers == "small"}
    assert told["steps"] == [small, *([] if answers == "small" else [shared | {"model": "large"}])]
    assert all(step["ms"] >= 0 for step in final["usage"]["pipeline"]["steps"])
    assert len(service.generate.requests) == (1 if answers == "small" else 2)
    if stream:
        text = "".join(choice["delta"].get("content", "") for chunk in answer.chunks for choice in chunk["choices"])
    else:
        text = final["choices"][0]["message"]["content"]
    assert text == "3 4"


def test_all_choices_count_together_and_completions_and_responses_cascade_too(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.6)
    assert service.complete(model="both", n=3).json["model"] == "large"
    assert len(service.generate.requests) == 6
    response = service.call("POST", "/v1/responses", {"model": "both", "input": "Hi"}).json
    assert (response["model"], response["usage"]["pipeline"]["steps"][-1]["model"]) == ("large", "large")


def test_log_probabilities_are_in_the_answers_to_requests_for_them_only(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.4)
    assert service.complete(model="both").json["choices"][0]["logprobs"] is None
    assert service.complete(model="both", logprobs=0).json["choices"][0]["logprobs"]["token_logprobs"][0] == -0.4


def test_each_model_is_measured_once(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.4)
    service.chat(model="both")
    text = service.call("GET", "/metrics").body
    assert value(text, "vllm:request_success_total", model_name="small", finished_reason="length") == 1
    assert value(text, "vllm:request_success_total", model_name="large", finished_reason="length") == 0
    service = cascade(tokenizer, -0.6)
    service.chat(model="both")
    text = service.call("GET", "/metrics").body
    for name in ("small", "large"):
        assert value(text, "vllm:request_success_total", model_name=name, finished_reason="length") == 1


def test_it_is_listed_and_a_key_must_be_for_both(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.4)
    assert [model["id"] for model in service.call("GET", "/v1/models").json["data"]] == ["small", "large", "both"]
    assert service.call("GET", "/v1/models/both").json["max_model_len"] == 200
    service = cascade(tokenizer, -0.4, keys=[entry(models=["small"])])
    body = {"model": "both", "prompt": "Hi"}
    assert service.call("POST", "/v1/completions", body, bearer()).status == 403
    assert [model["id"] for model in service.call("GET", "/v1/models", headers=bearer()).json["data"]] == ["small"]
    assert not service.generate.requests


def test_both_models_count_for_a_key(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.6, keys=[entry(tokens_per_minute=1000)])
    body = {"model": "both", "prompt": [5, 6, 7], "max_tokens": 50}
    usage = service.call("POST", "/v1/completions", body, bearer()).json["usage"]
    left = service.call("GET", "/v1/models", headers=bearer()).headers["x-ratelimit-remaining-tokens"]
    assert int(left) == 1000 - 2 * usage["total_tokens"]


@pytest.mark.parametrize(("logprob", "answers"), [(-0.4, "small"), (-0.6, "large")])
@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_line_of_a_batch_is_answered_as_the_call_is(
    tokenizer: Tokenizer, logprob: float, answers: str, endpoint: str
) -> None:
    service = cascade(tokenizer, logprob)
    metrics = RequestMetrics(["small", "large"])
    handler = RequestHandler(service.models, ApiConfig(), metrics, pipelines=service.pipelines)
    body: dict[str, Any] = {"model": "both"} | {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }[endpoint]
    online = service.call("POST", endpoint, body).json
    line = asyncio.run(handler.handle_item("", endpoint, body))
    assert line.status_code == 200
    assert line.body["model"] == answers
    assert without_times(line.body["usage"]) == without_times(online["usage"])
    assert all(request.is_background for request in service.generate.requests[len(service.generate.requests) // 2 :])
    text = exposition(Scrape(requests=[metrics.snapshot()], replicas={}))
    for name in ("small", "large"):
        ended = 1 if name in ("small", answers) else 0
        assert value(text, "vllm:request_success_total", model_name=name, finished_reason="length") == ended


async def test_a_list_of_prompts_may_be_for_a_cascade(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = cascade(tokenizer, -0.6)
    async with http_client(service, tmp_path) as client:
        answer = (await client.post("/v1/batch", json={"model": "both", "prompts": ["a", "b"]})).json()
        usages = [each["response"]["usage"] for each in answer["results"]]
        assert [usage["pipeline"]["steps"][-1]["model"] for usage in usages] == ["large"] * 2
        refused = await client.post("/v1/batch", json={"model": "both", "prompts": ["a"], "logprobs": 99})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_a_key_for_one_of_the_models_is_none_for_lines(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.4)
    keys = ring([entry(models=["small"])])
    handler = RequestHandler(service.models, ApiConfig(), RequestMetrics(), keys, pipelines=service.pipelines)
    owner = entry()["name"]
    body = {"model": "both", "prompt": "Hi"}
    assert asyncio.run(handler.handle_item(owner, "/v1/completions", body)).status_code == 403
    assert not service.generate.requests


def test_a_refusal_of_the_small_model_is_one_of_the_call(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [Overloaded("full")], names=("small", "large"), pipelines=[CASCADE])
    assert service.chat(model="both").status == 429
    assert service.chat(model="both", max_tokens=1000).status == 400


async def test_a_disconnect_ends_the_small_models_try(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), WAIT], names=("small", "large"), pipelines=[CASCADE])
    body = {"model": "both", "messages": [{"role": "user", "content": "Hi"}], "stream": True}

    await hang_up(service.app, "/v1/chat/completions", body, lambda: bool(service.generate.open))
    assert not service.generate.open


def test_the_large_model_has_the_time_that_is_left(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.6)
    service.chat(model="both", deadline_s=60)
    small, large = service.generate.requests
    assert small.deadline_s == 60
    assert large.deadline_s is not None
    assert 50 < large.deadline_s < 60
