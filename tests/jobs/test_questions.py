from __future__ import annotations

from typing import Any

import pytest

from app.jobs.preparation import RowSettings, row_from_fields
from app.jobs.questions import Question, ask
from app.jobs.record import Record

TURNS = [{"role": "user", "content": "Count from 3 to 9."}]


def asked(fields: dict[str, Any], *, model: str | None = None, **settings: Any) -> Question | Record:
    return ask(row_from_fields(fields, number=3, place="in.jsonl:4"), RowSettings(**settings), model=model)


def question(fields: dict[str, Any], *, model: str | None = None, **settings: Any) -> Question:
    found = asked(fields, model=model, **settings)
    assert isinstance(found, Question), found
    return found


def test_a_batch_line_is_passed_on_as_it_stands_in_the_lowest_class() -> None:
    body = {"messages": TURNS, "model": "other", "seed": 7, "logprobs": True, "service_tier": "priority"}
    found = question({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}, model="demo")
    assert (found.number, found.row_id, found.url) == (3, "a", "/v1/chat/completions")
    assert found.body == body | {"service_tier": "flex"}


def test_a_plain_row_has_the_defaults_of_the_run_and_a_seed_of_its_id() -> None:
    first = question({"id": 1, "prompt": "Once", "temperature": 0.5}, model="demo", max_tokens=5, temperature=1.0)
    assert first.url == "/v1/completions"
    assert {name: first.body[name] for name in ("prompt", "temperature", "max_tokens", "model")} == {
        "prompt": "Once", "temperature": 0.5, "max_tokens": 5, "model": "demo",
    }  # fmt: skip
    assert first.body["seed"] == question({"id": 1, "prompt": "Twice"}).body["seed"]
    assert first.body["seed"] != question({"id": 2, "prompt": "Once"}).body["seed"]
    assert "model" not in question({"prompt": "Once"}).body


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}, "nobody to stream to"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}, "n is 2; a row has one answer"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url should be one of"),
        ({"custom_id": "a", "url": ["x"], "body": {}}, "url should be one of"),
        ({"text": "x"}, "no column 'prompt'"),
    ],
)
def test_what_a_record_cannot_hold_is_not_asked(fields: dict[str, Any], words: str) -> None:
    found = asked(fields)
    assert isinstance(found, Record)
    assert words in str(found.error)
