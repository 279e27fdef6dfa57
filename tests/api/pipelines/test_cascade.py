"""A cascade: which model answers, what the response says of it, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.text import Tokenizer
from tests.kit.service import (
    CASCADE,
    Service,
    http_client,
    say_likely,
    without_times,
)


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


async def test_a_list_of_prompts_may_be_for_a_cascade(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = cascade(tokenizer, -0.6)
    async with http_client(service, tmp_path) as client:
        answer = (await client.post("/v1/batch", json={"model": "both", "prompts": ["a", "b"]})).json()
        usages = [each["response"]["usage"] for each in answer["results"]]
        assert [usage["pipeline"]["steps"][-1]["model"] for usage in usages] == ["large"] * 2
        refused = await client.post("/v1/batch", json={"model": "both", "prompts": ["a"], "logprobs": 99})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_the_large_model_has_the_time_that_is_left(tokenizer: Tokenizer) -> None:
    service = cascade(tokenizer, -0.6)
    service.chat(model="both", deadline_s=60)
    small, large = service.generate.requests
    assert small.deadline_s == 60
    assert large.deadline_s is not None
    assert 50 < large.deadline_s < 60
