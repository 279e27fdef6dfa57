"""Inputs of custom tools: the text in the arguments of a call, decoded while it comes."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.text.tool_calls import FORMATS, LIST, CallParser, CallPiece, InputParser, Parsed, ToolParser
from app.text.tool_calls.inputs import InputReader

TEXTS = st.text(st.sampled_from('ab"\\\n\té\U0001f600{}/u0d8'), max_size=12)


def cut(text: str, places: list[int]) -> list[str]:
    at = [0, *sorted(each % (len(text) + 1) for each in places), len(text)]
    return [text[first:last] for first, last in pairwise(at)]


def together(parser: CallParser, pieces: list[str]) -> tuple[str, dict[int, CallPiece]]:
    """The text, and each call as one piece."""
    parsed: list[Parsed] = [part for piece in pieces for part in parser.push(piece)]
    calls: dict[int, CallPiece] = {}
    for part in (*parsed, *parser.flush()):
        for call in part.calls:
            before = calls.get(call.number)
            calls[call.number] = (
                call if before is None else before._replace(arguments=before.arguments + call.arguments)
            )
    return "".join(part.text for part in parsed), calls


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_however_the_arguments_are_cut_the_input_is_the_text(text: str, is_ascii: bool, places: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader = InputReader()
    assert "".join(map(reader.push, cut(written, places))) + reader.flush() == text


def test_it_comes_before_the_arguments_are_complete() -> None:
    reader = InputReader()
    pieces = ['{"in', 'put" :\n "a', "b\\", "nc\\ud83d", "\\ude00", "\\u00", "e9", '"}']
    assert list(map(reader.push, pieces)) == ["", "a", "b", "\nc", "\U0001f600", "", "é", ""]


def test_arguments_of_another_form_are_the_input_as_they_are_written() -> None:
    for written in ('{"query": "a"}', "SELECT 1", "{}", '{"input": 5}', "{" + " " * 2000 + '"input": "a"}'):
        reader = InputReader()
        assert "".join(map(reader.push, written)) + reader.flush() == written


def test_half_a_pair_is_replaced_and_an_escape_that_breaks_off_is_left_out() -> None:
    for written, text in (
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "a\\u12', "a"),
    ):
        reader = InputReader()
        assert "".join(map(reader.push, written)) + reader.flush() == text


@given(st.lists(st.integers(0, 200), max_size=6))
def test_only_calls_of_these_tools_have_inputs(places: list[int]) -> None:
    text = 'Well.<tool_call>{"name": "f", "arguments": {"input": "a"}}</tool_call>\n'
    text += '<tool_call>\n{"name": "sql", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    parser = InputParser(ToolParser(FORMATS["hermes"], {"f", "sql"}), {"sql"})
    said, calls = together(parser, cut(text, places))
    assert said == "Well."
    assert calls == {0: CallPiece(0, "f", '{"input": "a"}'), 1: CallPiece(1, "sql", "a\nb", is_custom=True)}


@given(st.lists(st.integers(0, 200), max_size=6))
def test_an_input_without_quotes_goes_to_the_end(places: list[int]) -> None:
    rest = 'SELECT "a"\n</tool_call>\n'
    for form, begin in (
        (FORMATS["hermes"], "<tool_call>\n"), (FORMATS["llama3"], ""), (FORMATS["mistral"], "[TOOL_CALLS][ "),
        (LIST, "["),
    ):  # fmt: skip
        text = f'{begin}{{"name": "sql", "{form.arguments_key}": {{}}}}\n{rest}'
        parser = ToolParser(form, {"f", "sql"}, only_first=True, is_strict=True, raw_names={"sql"})
        said, calls = together(parser, cut(text, places))
        assert (said, calls) == ("", {0: CallPiece(0, "sql", rest, is_custom=True)})
