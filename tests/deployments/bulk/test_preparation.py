from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.api import RequestHandler, ServedModel
from app.api.auth.limits import Account
from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.decisions import prepare_decisions
from app.api.request_context import RequestContext
from app.api.schemas.decisions import DecisionsRequest
from app.api.schemas.requests import ChatRequest
from app.config import ApiConfig
from app.engine.request import Pooling
from app.jobs.job import InvalidItem, Item
from deployments.bulk.engine_worker import PreparedItem
from deployments.bulk.pipeline import prepare_row
from tests.deployments.bulk.conftest import Prepare

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
DECISIONS, CLASSIFY = "/v1/decisions", "/v1/classify"
PREDICATE = {"type": "predicate", "instructions": "Is it a tale?"}
TURNS = [{"role": "user", "content": "Count from 3 to 9."}]


def batch_line(body: Any, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "line-1", "method": "POST", "url": CHAT, "body": body} | changes


def request_of(row: PreparedItem | InvalidItem) -> PreparedItem:
    assert isinstance(row, PreparedItem), row
    return row


def error_of(row: PreparedItem | InvalidItem) -> str:
    assert isinstance(row, InvalidItem), row
    return row.reason


def test_a_batch_line_becomes_the_request_that_the_api_would_make(prepared: Prepare, model: ServedModel) -> None:
    body = {"messages": TURNS, "temperature": 0.5, "seed": 7, "max_completion_tokens": 20, "stop": "8", "top_p": 0.9}
    row = request_of(prepared(batch_line(body)))
    with Account(None, lambda: 0.0).reserve() as reservation:
        context = RequestContext(reservation=reservation, request_id="r")
        call = prepare_chat(ChatRequest.model_validate(body), model, context)
    assert row.requests[0].sampling == call.requests[0].sampling
    assert row.requests[0].prompt_token_ids == call.requests[0].prompt_token_ids
    assert (row.id, row.stop) == ("line-1", ("8",))


def test_a_line_with_one_question_asks_for_its_labels(prepared: Prepare, model: ServedModel) -> None:
    body = {"input": "Once upon a time.", "questions": [PREDICATE]}
    row = request_of(prepared(batch_line(body, url=DECISIONS), max_tokens=9, temperature=0.5))
    with Account(None, lambda: 0.0).reserve() as reservation:
        context = RequestContext(reservation=reservation, request_id="r")
        [request] = prepare_decisions(DecisionsRequest.model_validate(body), model, context).requests
    assert row.requests[0].prompt_token_ids == request.prompt_token_ids
    assert row.requests[0].sampling == request.sampling
    text_of = pickle.loads(pickle.dumps(row.text_of_numbers))  # it crosses processes
    assert json.loads(text_of([[-1.0, -1.0]])) == {"type": "predicate", "name": None, "probability": 0.5}


def test_a_line_with_one_text_asks_for_the_scores_of_labels(model: ServedModel) -> None:
    classifier = replace(model, model_info=replace(model.model_info, labels=("glad", "sad")))
    item = Item(number=0, id="line-1", url=CLASSIFY, body={"input": "Once"})
    row = request_of(asyncio.run(prepare_row(item, RequestHandler([classifier], ApiConfig()))))
    assert row.requests[0].pooling == Pooling.SCORE
    assert row.requests[0].prompt_token_ids == model.tokenizer.encode("Once", add_special_tokens=True)
    text_of = pickle.loads(pickle.dumps(row.text_of_numbers))  # it crosses processes
    assert json.loads(text_of([np.array([0.25, 0.75], np.float32)])) == {
        "index": 0,
        "label": "sad",
        "probs": [0.25, 0.75],
        "num_classes": 2,
    }


def test_a_plain_row_takes_its_sampling_columns_and_leaves_the_users_own_alone(prepared: Prepare) -> None:
    row = request_of(
        prepared({"id": 17, "messages": TURNS, "temperature": 0, "max_tokens": 5, "user": {"any": "thing"}, "n": 9})
    )
    assert row.id == "17"
    assert (row.requests[0].sampling.temperature, row.requests[0].sampling.max_tokens) == (0, 5)
    assert row.requests[0].tenant == ""


def test_a_text_in_the_messages_column_is_a_users_turn(prepared: Prepare) -> None:
    chat = request_of(prepared({"messages": TURNS}))
    question = request_of(prepared({"question": TURNS[0]["content"]}, messages_column="question"))
    assert question.requests[0].prompt_token_ids == chat.requests[0].prompt_token_ids


def test_a_prompt_is_completed_as_it_stands(prepared: Prepare, model: ServedModel) -> None:
    row = request_of(prepared({"text": "Once", "messages": TURNS}, prompt_column="text"))
    assert row.requests[0].prompt_token_ids == model.tokenizer.encode("Once", add_special_tokens=True)


def test_what_a_row_says_goes_before_what_the_run_says(prepared: Prepare) -> None:
    def length(fields: dict[str, Any]) -> int:
        return request_of(prepared(fields, max_tokens=9, temperature=0.0)).requests[0].sampling.max_tokens

    assert length({"prompt": "Once"}) == 9
    assert length({"prompt": "Once", "max_tokens": 4}) == 4
    assert length(batch_line({"messages": TURNS, "max_completion_tokens": 3})) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"question": "?"}, "no column 'prompt'; it has question"),
        ({"prompt": None}, "no column 'prompt'"),
        ({"prompt": ["one", "two"]}, "contains 2 prompts"),
        ({"prompt": ""}, "`prompt` has no tokens"),
        ({"prompt": "Once", "max_tokens": 5000}, "this model accepts 2,048"),
        ({"prompt": "Once", "temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "messages[0].role"),
        (batch_line({"messages": TURNS, "stream": True}), "cannot be streamed"),
        (batch_line({"messages": TURNS, "n": 2}), "n is 2"),
        (batch_line({"messages": TURNS, "best_of": 2}), "best_of is 2"),
        (batch_line({"messages": TURNS, "logprobs": True}), "bulk runs do not support `logprobs`"),
        (batch_line({"messages": TURNS, "prompt_logprobs": 0}), "bulk runs do not support `prompt_logprobs`"),
        (batch_line({"messages": TURNS, "return_token_ids": True}), "bulk runs do not support `return_token_ids`"),
        (batch_line({"prompt": "a", "echo": True}, url="/v1/completions"), "bulk runs do not support `echo`"),
        (batch_line({"messages": TURNS, "tools": [TOOL]}), "bulk runs do not support tools"),
        (batch_line({"messages": TURNS, "model": "other"}), "there is no model 'other'; this server has demo"),
        (batch_line({"messages": TURNS}, url="/v1/responses"), "url should be one of"),
        (batch_line({"input": "a"}, url="/v1/embeddings"), "the model 'demo' does not support embeddings"),
        (
            batch_line({"input": ["a", "b"]}, url="/v1/embeddings"),
            "`input` contains 2 texts, but an item may have only one",
        ),
        (batch_line({"query": "a", "documents": ["b"]}, url="/v1/rerank"), "the model 'demo' does not support scores"),
        (batch_line({"text_1": "a"}, url="/v1/score"), "text_2 is required"),
        (
            batch_line({"input": "a", "questions": [PREDICATE] * 2}, url=DECISIONS),
            "`questions` contains 2 questions, but an item may have only one",
        ),
        (batch_line({"input": "a", "questions": [{}]}, url=DECISIONS), 'type is "predicate"'),
        (batch_line({"input": "a"}, url=CLASSIFY), "the model 'demo' is not a classifier"),
        (batch_line({"input": ["a", "b"]}, url=CLASSIFY), "`input` contains 2 texts, but an item may have only one"),
        (batch_line({}, url=["x"]), "url should be one of"),
        (batch_line({"messages": TURNS}, method="GET"), "method should be 'POST'"),
        (batch_line("text"), "body should be an object"),
        (batch_line({"messages": TURNS}, custom_id=None), "custom_id is required"),
    ],
)
def test_what_is_wrong_with_a_row_becomes_its_reason(prepared: Prepare, fields: dict[str, Any], words: str) -> None:
    assert words in error_of(prepared(fields))
