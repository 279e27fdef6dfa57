"""What is wrong with an upload, by its lines; and the items that rows of files mean."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.api.endpoints.table import BULK_URLS
from app.jobs.items import (
    MAX_LISTED_ERRORS,
    Checked,
    InputRules,
    RowSettings,
    check,
    has_question,
    id_of,
    item_of,
    read_items,
    row_from_cells,
    row_from_fields,
    row_from_line,
)
from app.jobs.job import InvalidItem, Item
from tests.kit.jobs import CHAT, input_line, jsonl


def checked(folder: Path, content: bytes, *, max_lines: int = 100, max_line_bytes: int = 2000) -> Checked:
    path = folder / "input"
    path.write_bytes(content)
    return check(
        partial(path.open, "rb"), InputRules(endpoint=CHAT, max_items=max_lines, max_line_bytes=max_line_bytes)
    )


def codes(result: Checked) -> list[tuple[int | None, str, str | None]]:
    return [(error.line, error.code, error.param) for error in result.errors]


def test_a_valid_file_has_its_lines_and_its_model(tmp_path: Path) -> None:
    result = checked(tmp_path, jsonl(input_line("a"), input_line("b")))
    assert result == Checked(num_items=2, model="demo", errors=())


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end_are_harmless(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + jsonl(input_line("a")) + b"\r\n  \n" + jsonl(input_line("b")).rstrip()
    assert checked(tmp_path, content) == Checked(num_items=2, model="demo", errors=())
    rules = InputRules(endpoint=CHAT, max_items=9, max_line_bytes=2000)
    items = list(read_items(partial((tmp_path / "input").open, "rb"), rules))
    assert [(item.number, item.id) for item in items] == [(0, "a"), (1, "b")]


def test_several_models_are_allowed_and_none_is_named(tmp_path: Path) -> None:
    result = checked(tmp_path, jsonl(input_line("a"), input_line("b", body={"model": "other"})))
    assert (result.model, result.errors) == (None, ())


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (b'{"custom_id": "x", "body": {"prompt": "y", "zzz": [1e999]}}', "invalid_json_line", None),
        (b"[" * 1500, "invalid_json_line", None),
        (jsonl(input_line("x", custom_id=None)), "missing_required_parameter", "custom_id"),
        (jsonl(input_line("x", body=None)), "missing_required_parameter", "body"),
        (jsonl(input_line("x", custom_id=7)), "invalid_custom_id", "custom_id"),
        (jsonl(input_line("")), "invalid_custom_id", "custom_id"),
        (jsonl(input_line("x" * 513)), "invalid_custom_id", "custom_id"),
        (jsonl(input_line("x", method="GET")), "invalid_method", "method"),
        (jsonl(input_line("x", url="/v1/completions")), "invalid_url", "url"),
        (jsonl(input_line("x", url=["/v1"])), "invalid_url", "url"),
        (jsonl(input_line("x", body=[1])), "invalid_body", "body"),
        (jsonl(input_line("x", body={"stream": True})), "stream_not_supported", "body.stream"),
        (jsonl(input_line("a")), "duplicate_custom_id", "custom_id"),
        (jsonl(input_line("x", body={"prompt": "y" * 2000})), "line_too_long", None),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: bytes, code: str, param: str | None) -> None:
    content = jsonl(input_line("a")) + line.rstrip() + b"\n" + jsonl(input_line("z", method="PUT"))
    assert codes(checked(tmp_path, content)) == [(2, code, param), (3, "invalid_method", "method")]


def test_the_place_in_a_line_that_is_no_json_is_its_column(tmp_path: Path) -> None:
    [error] = checked(tmp_path, jsonl(input_line("a")) + b"no JSON\n").errors
    assert (error.line, error.message) == (2, "the line is not valid JSON: expected ident at column 2")


def test_an_empty_file_and_one_of_blank_lines_have_no_requests(tmp_path: Path) -> None:
    for content in (b"", b"\n \n"):
        assert codes(checked(tmp_path, content)) == [(None, "empty_file", None)]


def test_one_line_too_many(tmp_path: Path) -> None:
    lines = [input_line(f"line-{n}") for n in range(4)]
    assert checked(tmp_path, jsonl(*lines[:3]), max_lines=3).errors == ()
    assert codes(checked(tmp_path, jsonl(*lines), max_lines=3)) == [(None, "too_many_lines", None)]


def test_the_list_of_errors_is_bounded(tmp_path: Path) -> None:
    result = checked(tmp_path, b"{\n" * 100_000, max_lines=1_000_000)
    assert len(result.errors) == MAX_LISTED_ERRORS
    assert result.errors[-1].line == MAX_LISTED_ERRORS


def test_messages_show_no_more_than_a_glance_of_what_was_sent(tmp_path: Path) -> None:
    line: dict[str, Any] = input_line("x", url="/" + "u" * 1000)
    [error] = checked(tmp_path, jsonl(line)).errors
    assert len(error.message) < 200
    assert json.dumps(error.message)


# Rows of files


@pytest.mark.parametrize("line", [b'{"id": "a"', b"[1, 2]", b"\xff\xfe", b'{"id": NaN}', b'{"a": -1e999}'])
def test_a_broken_line_is_a_row_named_by_its_place(line: bytes) -> None:
    row = row_from_line(line, number=4, place="input.jsonl:5")
    assert row.fields is None
    assert row.id == "input.jsonl:5"
    assert "input.jsonl:5" in row.error
    assert not has_question(row, RowSettings())


def test_only_texts_and_whole_numbers_are_ids() -> None:
    assert id_of({"custom_id": "a", "id": "b"}) == "a"
    assert id_of({"custom_id": "", "id": 0}) == "0"
    assert [id_of({"id": value}) for value in (None, True, 1.5, [], "x" * 513)] == [None] * 5


def test_a_row_asks_something_when_it_has_the_column_of_the_run() -> None:
    row = row_from_fields({"prompt": "Once"}, number=0, place="input.jsonl:1")
    assert has_question(row, RowSettings())
    assert not has_question(row, RowSettings(prompt_column="text"))


TURNS = [{"role": "user", "content": "Count from 3 to 9."}]


def item(fields: dict[str, Any], **settings: Any) -> Item:
    found = item_of(row_from_fields(fields, number=3, place="in.jsonl:4"), RowSettings(**settings), BULK_URLS)
    assert isinstance(found, Item), found
    return found


def test_a_batch_line_is_passed_on_as_it_stands() -> None:
    body = {"messages": TURNS, "model": "other", "seed": 7, "logprobs": True, "service_tier": "priority"}
    found = item({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    assert found == Item(number=3, id="a", url=CHAT, body=body)
    assert item({"custom_id": 17, "url": CHAT, "body": body}).id == "17"


def test_an_id_that_is_a_whole_number_is_one_also_as_a_float() -> None:
    assert id_of({"id": 1.0}) == "1"
    assert id_of({"custom_id": float("nan"), "id": -2e3}) == "-2000"


def test_a_plain_row_has_the_defaults_of_the_run_and_a_seed_of_its_id() -> None:
    first = item({"id": 1, "prompt": "Once", "temperature": 0.5}, max_tokens=5, temperature=1.0)
    assert first.url == "/v1/completions"
    assert {name: first.body[name] for name in ("prompt", "temperature", "max_tokens")} == {
        "prompt": "Once", "temperature": 0.5, "max_tokens": 5,
    }  # fmt: skip
    assert first.body["seed"] == item({"id": 1, "prompt": "Twice"}).body["seed"]
    assert first.body["seed"] != item({"id": 2, "prompt": "Once"}).body["seed"]


def item_of_cells(cells: dict[str, str], **settings: Any) -> Item | InvalidItem:
    row = row_from_cells(list(cells), list(cells.values()), number=0, place="t.csv:2")
    assert has_question(row, RowSettings(**settings))
    return item_of(row, RowSettings(**settings), BULK_URLS)


def body_of_cells(cells: dict[str, str], **settings: Any) -> dict[str, Any]:
    found = item_of_cells(cells, **settings)
    assert isinstance(found, Item), found
    return dict(found.body)


def test_cells_of_sampling_have_their_types_and_all_others_stay_texts() -> None:
    cells = {
        "id": "007", "prompt": "1", "max_tokens": "5", "temperature": "0.5", "seed": "7", "top_p": "", "stop": "[1]",
        "ignore_eos": "True", "logit_bias": '{"3": 1.5}', "reasoning_effort": "none", "rating": "4",
    }  # fmt: skip
    assert body_of_cells(cells) == {
        "prompt": "1", "max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": "[1]", "ignore_eos": True,
        "logit_bias": {"3": 1.5}, "reasoning_effort": "none",
    }  # fmt: skip
    assert item_of_cells(cells).id == "007"
    assert [body_of_cells({"prompt": text})["prompt"] for text in ("NA", "null", "[1]", "true")] == [
        "NA", "null", "[1]", "true",
    ]  # fmt: skip


def test_a_cell_of_messages_is_a_list_in_json_or_the_text_of_a_turn() -> None:
    assert body_of_cells({"messages": json.dumps(TURNS)})["messages"] == TURNS
    assert body_of_cells({"messages": "7 + 15?"})["messages"] == [{"role": "user", "content": "7 + 15?"}]
    assert body_of_cells({"seed": json.dumps(TURNS)}, messages_column="seed")["messages"] == TURNS
    assert body_of_cells({"messages": "[INST] Is it so?"})["messages"][0]["content"] == "[INST] Is it so?"
    assert body_of_cells({"prompt": "a", "stop": "[x]"})["stop"] == "[x]"
    assert body_of_cells({"prompt": "a", "stop": '["x", "y"]'})["stop"] == ["x", "y"]
    assert body_of_cells({"messages": "[x]"}, prompt_column="messages")["prompt"] == "[x]"
    assert body_of_cells({"seed": "7", "messages": "[x]"}, prompt_column="seed")["prompt"] == "7"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens is 'many'; it should be a number"),
        ({"prompt": "a", "temperature": "0,5"}, "temperature is '0,5'; it should be a number"),
        (
            {"messages": "[ {'role': 'user'}]"},
            "messages is .*; it should be messages in JSON, because it begins with",
        ),
    ],
)
def test_a_cell_that_has_no_value_is_the_reason_why_its_row_is_not_run(cells: dict[str, str], words: str) -> None:
    found = item_of_cells(cells | {"id": "a"})
    assert isinstance(found, InvalidItem)
    assert found.id == "a"
    assert re.match(words, found.reason)


def test_a_row_of_a_table_is_no_line_of_a_batch() -> None:
    assert body_of_cells({"custom_id": "a", "body": "Dear Sir"}, prompt_column="body")["prompt"] == "Dear Sir"
