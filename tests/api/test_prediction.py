"""`prediction` of a chat: it reaches the engine as token ids, and usage says what became of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from app.engine.request import FinishReason, Request, TokenDelta
from app.text import Tokenizer
from tests.kit.service import MAX_MODEL_LEN, Service, say

TEXT = "3 4 5."


def predicting(content: Any = TEXT) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.fixture
def drafting(tokenizer: Tokenizer) -> Service:
    """A model that answers with `3 4 5.`, of which it says that two tokens were drafted, and three in vain."""

    def answer(request: Request) -> Iterator[TokenDelta]:
        first, second, *rest = tokenizer.encode(TEXT, add_special_tokens=False)
        yield TokenDelta(request.request_id, (first, second), num_accepted=1, num_rejected=3)
        yield TokenDelta(request.request_id, tuple(rest), num_accepted=1)
        yield TokenDelta(request.request_id, (4,), FinishReason.STOP, stop_token_id=4)

    return Service(tokenizer, answer)


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": "3 4"}, {"type": "text", "text": "5."}]])
def test_it_reaches_the_engine_as_token_ids(service: Service, content: Any) -> None:
    assert service.chat(**predicting(content)).status == 200
    text = TEXT if isinstance(content, str) else "3 4\n5."
    assert service.request.prediction_token_ids == service.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_became_of_it_and_counts_only_the_output(drafting: Service, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = drafting.chat(**predicting(), stream=stream, n=2, **options)
    usage = (answer.chunks[-1] if stream else answer.json)["usage"]
    num_tokens = len(drafting.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert usage["completion_tokens"] == 2 * num_tokens
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 6,
    }


def test_without_one_usage_does_not_speak_of_it_and_where_nothing_is_drafted_it_has_zeros(service: Service) -> None:
    assert service.chat().json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    details = service.chat(**predicting()).json["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_an_output_that_a_stop_string_ends_has_no_more_accepted_tokens_than_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("3 4 5 6 7 8.", add_special_tokens=False)
    service = Service(tokenizer, lambda request: [TokenDelta(request.request_id, token_ids, num_accepted=5)])
    usage = service.chat(**predicting(), stop=" 5").json["usage"]
    assert usage["completion_tokens"] < 5
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0, "max_completion_tokens": 20},
        {"structured_outputs": {"regex": "[0-9 ]+"}},
        {"prompt_logprobs": 1, "return_token_ids": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_it_goes_with_every_other_field(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    service = Service(tokenizer, say(tokenizer, TEXT))
    service.chat(**predicting(), **fields)
    assert all(request.prediction_token_ids for request in service.generate.requests)
    assert len(service.generate.requests) == fields.get("n", 1)


@pytest.mark.parametrize(
    ("prediction", "param", "said"),
    [
        ("3 4", "prediction", "prediction"),
        ({"content": TEXT}, "prediction.type", "is required"),
        ({"type": "content"}, "prediction.content", "is required"),
        ({"type": "file", "content": TEXT}, "prediction.type", "'content'"),
        ({"type": "content", "content": 5}, "prediction.content", "a string or a list of text parts"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content", "only text"),
        ({"type": "content", "content": [{"type": "text", "text": ""}] * 4097}, "prediction.content", "4,097 parts"),
        (
            {"type": "content", "content": "3 " * MAX_MODEL_LEN},
            "prediction",
            rf"`prediction` has \d+ tokens; this model accepts {MAX_MODEL_LEN} for prompt and output together",
        ),
        (
            {"type": "content", "content": "3 " * 40_000},
            "prediction",
            f"`prediction` contains a text of 80,000 characters, which is more than {MAX_MODEL_LEN} tokens",
        ),
    ],
)
def test_one_that_cannot_be_is_refused_by_name(service: Service, prediction: Any, param: str, said: str) -> None:
    answer = service.chat(prediction=prediction)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert re.search(said, answer.error["message"])
    assert not service.generate.requests
