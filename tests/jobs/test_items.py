"""What is wrong with an input file, by its lines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.jobs.items import MAX_LISTED_ERRORS, Checked, InputRules, check, read_lines
from app.jobs.line import InputLine
from tests.jobs.lives import CHAT, input_line, jsonl


def checked(folder: Path, content: bytes, *, max_lines: int = 100, max_line_bytes: int = 2000) -> Checked:
    path = folder / "input"
    path.write_bytes(content)
    return check(
        partial(path.open, "rb"), InputRules(endpoint=CHAT, max_lines=max_lines, max_line_bytes=max_line_bytes)
    )


def codes(result: Checked) -> list[tuple[int | None, str, str | None]]:
    return [(error.line, error.code, error.param) for error in result.errors]


def test_a_valid_file_has_its_lines_and_its_model(tmp_path: Path) -> None:
    result = checked(tmp_path, jsonl(input_line("a"), input_line("b")))
    assert result == Checked(num_lines=2, model="demo", errors=())


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end_are_harmless(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + jsonl(input_line("a")) + b"\r\n  \n" + jsonl(input_line("b")).rstrip()
    assert checked(tmp_path, content) == Checked(num_lines=2, model="demo", errors=())
    lines = list(
        read_lines(
            partial((tmp_path / "input").open, "rb"), InputRules(endpoint=CHAT, max_lines=9, max_line_bytes=2000)
        )
    )
    assert [line.number for line in lines if isinstance(line, InputLine)] == [1, 4]


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


def test_an_empty_file_and_one_of_blank_lines_have_no_requests(tmp_path: Path) -> None:
    for content in (b"", b"\n \n"):
        assert codes(checked(tmp_path, content)) == [(None, "empty_file", None)]


def test_one_line_too_many(tmp_path: Path) -> None:
    lines = [input_line(f"line-{n}") for n in range(4)]
    assert checked(tmp_path, jsonl(*lines[:3]), max_lines=3).errors == ()
    assert codes(checked(tmp_path, jsonl(*lines), max_lines=3)) == [(None, "too_many_lines", None)]


def test_no_more_errors_are_listed_than_anybody_reads(tmp_path: Path) -> None:
    result = checked(tmp_path, b"{\n" * 100_000, max_lines=1_000_000)
    assert len(result.errors) == MAX_LISTED_ERRORS
    assert result.errors[-1].line == MAX_LISTED_ERRORS


def test_messages_show_no_more_than_a_glance_of_what_was_sent(tmp_path: Path) -> None:
    line: dict[str, Any] = input_line("x", url="/" + "u" * 1000)
    [error] = checked(tmp_path, jsonl(line)).errors
    assert len(error.message) < 200
    assert json.dumps(error.message)
