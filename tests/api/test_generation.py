"""The fields of a request that decide which tokens are drawn reach the engine by every way in."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from app.api.endpoints.table import BULK_URLS
from app.api.schemas.requests import ChatRequest, CompletionRequest
from app.engine.request import FILTERS, Request, SamplingParams
from app.jobs.items import (
    SAMPLING_COLUMNS,
    TEXT_COLUMNS,
    RowSettings,
    item_of,
    row_from_cells,
    row_from_fields,
)
from app.jobs.job import Item
from tests.api.test_parameters import PATHS
from tests.kit.service import Service

# By field of SamplingParams: fields of a body that set it, and the value that it gets; None: any that is not empty.
EXAMPLES: dict[str, tuple[dict[str, Any], Any]] = {
    "max_tokens": ({"max_tokens": 9}, 9),
    "min_tokens": ({"min_tokens": 2}, 2),
    "temperature": ({"temperature": 0.25}, 0.25),
    **{name: ({name: value}, value) for name, value in FILTERS.items()},
    "seed": ({"seed": 11}, 11),
    "presence_penalty": ({"presence_penalty": 0.5}, 0.5),
    "frequency_penalty": ({"frequency_penalty": -0.5}, -0.5),
    "repetition_penalty": ({"repetition_penalty": 1.5}, 1.5),
    "logit_bias": ({"logit_bias": {"3": 1.5}}, ((3, 1.5),)),
    "stop_token_ids": ({"stop_token_ids": [11]}, (11,)),
    "ignore_eos": ({"ignore_eos": True}, True),
    "grammar": ({"structured_outputs": {"regex": "a+"}}, None),
    "allowed_token_ids": ({"allowed_token_ids": [7, 8]}, (7, 8)),
    "bad_words": ({"bad_words": ["x"]}, None),
    "logprobs": ({"logprobs": 2}, 2),
    "prompt_logprobs": ({"prompt_logprobs": 3}, 3),
}
NOT_IN_A_BODY = {"logprob_token_ids"}  # decisions have it by themselves
OTHER_NAMES: dict[tuple[str, str], dict[str, Any]] = {
    ("responses", "max_tokens"): {"max_output_tokens": 9},
    ("chat", "logprobs"): {"logprobs": True, "top_logprobs": 2},
    ("responses", "logprobs"): {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}
ROWS = ("row", "cells", "line")  # of a bulk run: columns, columns of a CSV file, lines of a batch
# Answers of these have no place for log-probabilities.
WITHOUT = {
    ("messages", "logprobs"), ("messages", "prompt_logprobs"), ("responses", "prompt_logprobs"),
    *product(("row", "cells"), ("logprobs", "prompt_logprobs")),
}  # fmt: skip
# Fields of chats and completions that are no columns of a row: a column of such a name is the user's own.
NOT_OF_ROWS = {
    # what the prompt is, and the columns that have it
    "model", "messages", "prompt", "documents", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "echo",
    "truncation_side",
    # other names of structured outputs, which columns of data often have
    "regex", "ebnf", "grammar", "json_schema",
    # how and when it runs, and what the answer shows
    "user", "priority", "service_tier", "deadline_s", "cache_salt", "request_id", "store", "stream", "stream_options",
    "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids",
    "skip_special_tokens", "include_stop_str_in_output", "no_stop_trim",
    "prediction",  # it changes how soon tokens come, never which
}  # fmt: skip


def sent(service: Service, way: str, body: dict[str, Any]) -> Request:
    """The engine's request of a body, or of a row of a bulk run."""
    path, prompt = PATHS["completions" if way in ROWS else way]
    if way in ROWS:
        columns = prompt | body
        if way == "cells":
            cells = [value if isinstance(value, str) else json.dumps(value) for value in columns.values()]
            row = row_from_cells([*columns], cells, number=0, place="rows:2")
        else:
            line = {"custom_id": "1", "url": path, "body": columns} if way == "line" else columns
            row = row_from_fields(line, number=0, place="rows:1")
        item = item_of(row, RowSettings(), BULK_URLS)
        assert isinstance(item, Item), item
        path, prompt, body = item.url, {}, dict(item.body)
    answer = service.call("POST", path, prompt | body)
    assert answer.status == 200, answer.body
    return service.generate.requests[-1]


def test_every_field_of_sampling_has_an_example() -> None:
    assert EXAMPLES.keys() | NOT_IN_A_BODY == {each.name for each in fields(SamplingParams)}


@pytest.mark.parametrize(("way", "name"), sorted({*product([*PATHS, *ROWS], EXAMPLES)} - WITHOUT))
def test_every_field_of_sampling_reaches_the_engine(service: Service, way: str, name: str) -> None:
    body, expected = EXAMPLES[name]
    sampling = sent(service, way, OTHER_NAMES.get((way, name), body)).sampling
    found = getattr(sampling, name)
    assert found if expected is None else found == expected


def test_every_field_of_generation_is_a_column_of_rows_or_left_out_on_purpose() -> None:
    known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert known == NOT_OF_ROWS | set(SAMPLING_COLUMNS)


def test_the_columns_of_text_are_those_whose_fields_take_a_text() -> None:
    properties = ChatRequest.model_json_schema()["properties"]
    forms = {name: properties[name].get("anyOf", [properties[name]]) for name in SAMPLING_COLUMNS}
    with_text = {name for name, several in forms.items() if any(form.get("type") == "string" for form in several)}
    assert with_text == set(TEXT_COLUMNS)


@pytest.mark.parametrize("way", [*PATHS, *ROWS])
@pytest.mark.parametrize(("given", "expected"), [(1e-38, 0.0), (9e-6, 0.0), (1e-5, 1e-5)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(
    service: Service, way: str, given: float, expected: float
) -> None:
    assert sent(service, way, {"temperature": given}).sampling.temperature == expected


def test_a_share_that_float32_does_not_have_keeps_the_likeliest_token(service: Service) -> None:
    assert sent(service, "completions", {"top_p": 1e-46}).sampling.top_p == 1e-6
