"""Tool calls in texts of all formats, however the text is cut and whatever is wrong with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.tool_calls import FORMATS, LIST, ToolFormat, ToolParser

Calls = list[tuple[str, str]]
ALL = (*FORMATS.values(), LIST)
NAMES = ("f", "get_weather")


def parsed(form: ToolFormat, pieces: Iterable[str], **settings: Any) -> tuple[str, Calls]:
    """The text and the calls, put together as a client does."""
    parser = ToolParser(form, NAMES, texts={"f": {"text"}}, **settings)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.flush()
    calls: list[list[str]] = []
    for piece in (piece for part in parts for piece in part.calls):
        if piece.name is not None:
            assert piece.number == len(calls), "names come first, once, in order"
            calls.append([piece.name, ""])
        calls[piece.number][1] += piece.arguments
    assert parser.has_calls == bool(calls)
    return "".join(part.text for part in parts), [(name, arguments) for name, arguments in calls]


def in_order(form: ToolFormat, pieces: Iterable[str], **settings: Any) -> list[str | int]:
    """Texts, and numbers of calls where more of them comes, as they follow each other."""
    parser, order = ToolParser(form, NAMES, **settings), list[str | int]()
    for part in [*(part for piece in pieces for part in parser.push(piece)), *parser.flush()]:
        if part.text and order and isinstance(order[-1], str):
            order[-1] += part.text
        elif part.text:
            order.append(part.text)
        order += [call.number for call in part.calls if order[-1:] != [call.number]]
    return order


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({*places, len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def tag_call(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n</tool_call>"


TAG_CALL = tag_call("a", "\n1\n")
TEXTS = {
    "hermes": [
        ("Only text < that.", "Only text < that.", []),
        (HERMES_CALL, "", [("f", '{"a": 1}')]),
        (f"One moment.\n\n{HERMES_CALL}\n{HERMES_CALL}\n", "One moment.", [("f", '{"a": 1}')] * 2),
        ('<tool_call>{"arguments": {"b": "}<{"}, "name": "f"}</tool_call>', "", [("f", '{"b": "}<{"}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>', "", [("f", '{"a": "é"}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"id": [1, {}], "name": "f", "arguments": {}}}</tool_call>bye', "bye", [("f", "{}")]),
        ('<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', "", [("unheard_of", "{}")]),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": []}', "", [("f", "{}"), ("f", "[]")]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        ('{"name": "f", "age": 36}', '{"name": "f", "age": 36}', []),
        ('See: {"name": "f", "parameters": {}}', 'See: {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', "", [("f", '{"a": 1}')]),
        ('Yes.[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]', "Yes.", [("f", "{}"), ("g", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS] are called so", "[TOOL_CALLS] are called so", []),
    ],
    "qwen3_coder": [
        (TAG_CALL, "", [("f", '{"a": 1}')]),
        (f"One moment.\n\n{TAG_CALL}\n{TAG_CALL}\n", "One moment.", [("f", '{"a": 1}')] * 2),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        (tag_call("b", '\n{"c": [1]}\n'), "", [("f", '{"b": {"c": [1]}}')]),
        (tag_call("b", "\nTrue\n"), "", [("f", '{"b": true}')]),
        (tag_call("b", "\n{'c': None}\n"), "", [("f", '{"b": {"c": null}}')]),
        (tag_call("b", "\nNaN\n"), "", [("f", '{"b": "NaN"}')]),
        (tag_call("b", "\ntwo words, <p>\n\n"), "", [("f", '{"b": "two words, <p>\\n"}')]),
        (tag_call("text", "\n12\n"), "", [("f", '{"text": "12"}')]),
        (tag_call("text", '\nif a < 2:\n\n  "b\\n"\n'), "", [("f", json.dumps({"text": 'if a < 2:\n\n  "b\\n"'}))]),
        (tag_call("text", "</param"), "", [("f", '{"text": "</param"}')]),
        (tag_call("text", ""), "", [("f", '{"text": ""}')]),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>bye", "bye", [("f", '{"a": 1}')]),
        ("<tool_call>\n<function=f>\n<parameter=text>\ncut sho", "", [("f", '{"text": "cut sho')]),
        ("<tool_call>\n<function=f>\n<param", "<tool_call>\n<function=f>\n<param", []),
        ("<tool_call>\n<invoke name=f>", "<tool_call>\n<invoke name=f>", []),
        (f"<tool_call>\n{TAG_CALL}", "<tool_call>\n", [("f", '{"a": 1}')]),
        (HERMES_CALL, "", [("f", '{"a": 1}')]),
    ],
    "lfm2": [
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>Done.", "Done.", [("f", '{"a": 1}')]),
        ("<|tool_call_start|>[f(a=1), g.h()]<|tool_call_end|>", "", [("f", '{"a": 1}'), ("g.h", "{}")]),
        ("<|tool_call_start|>f(a=1)<|tool_call_end|>", "", [("f", '{"a": 1}')]),
        (
            """<|tool_call_start|>[f(a='it\\'s "x"\\n', b=[True, None, -1.5e3], """
            "c={'d': (1, 2,)}, )]<|tool_call_end|>",
            "",
            [("f", '{"a": "it\'s \\"x\\"\\n", "b": [true, null, -1.5e3], "c": {"d": [1, 2]}}')],
        ),
        (r"<|tool_call_start|>[f(a='\xe9\u00e9\d\\')]<|tool_call_end|>", "", [("f", r'{"a": "\u00e9\u00e9\\d\\"}')]),
        ('<|tool_call_start|>[{"name": "f", "arguments": {}}]<|tool_call_end|>', "", [("f", "{}")]),
        ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
        ("<|tool_call_start|>[f", "<|tool_call_start|>[f", []),
        ("<|tool_call_start|>[f(a='cut sho", "", [("f", '{"a": "cut sho')]),
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>f(b) is it", "f(b) is it", [("f", '{"a": 1}')]),
        ("See f(a=1).", "See f(a=1).", []),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('<|tool_call|>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("<|tool_call|> none", "<|tool_call|> none", []),
    ],
    "nemotron": [
        ('<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>\nDone.', "Done.", [("f", '{"a": 1}')]),
        ('Yes.\n<TOOLCALL>[{"name": "f"}, {"name": "g"}]</TOOLCALL>', "Yes.", [("f", "{}"), ("g", "{}")]),
        ('<TOOLCALL>[{"name": "f"}]</TOOLCALL>{"name": "g"}', '{"name": "g"}', [("f", "{}")]),
        ("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    ],
    "gemma4": [
        ("<|tool_call>call:f{a:1}<tool_call|>", "", [("f", '{"a": 1}')]),
        ("Yes.<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>", "Yes.", [("f", "{}"), ("g", "{}")]),
        (
            '<|tool_call>call:f{a:<|"|>x "y", {z} <|\\n<|"|>,b:[true,{c:-2}],d:<|"|><|"|>}<tool_call|>',
            "",
            [("f", '{"a": "x \\"y\\", {z} <|\\\\n", "b": [true, {"c": -2}], "d": ""}')],
        ),
        ('<|tool_call>call:f{"a": "b\\n", c: word}<tool_call|>', "", [("f", '{"a": "b\\n", "c": "word"}')]),
        ("<|tool_call>call:f{a:1<tool_call|>Well.", "Well.", [("f", '{"a": 1')]),
        ("<|tool_call>f{a:1}<tool_call|>", "<|tool_call>f{a:1}<tool_call|>", []),
        ("<|tool_call>call:{}", "<|tool_call>call:{}", []),
        ('<|tool_call>call:f{a:<|"|>cut', "", [("f", '{"a": "cut')]),
    ],
    "list": [
        ('[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]', "", [("f", "{}"), ("f", "{}")]),
    ],
}  # fmt: skip
CASES = [(form, *case) for form in ALL for case in TEXTS[form.name]]


@pytest.mark.parametrize(
    ("form", "written", "text", "calls"), CASES, ids=[f"{case[0].name}-{case[1]}" for case in CASES]
)
def test_calls_are_taken_out_of_the_text(form: ToolFormat, written: str, text: str, calls: Calls) -> None:
    assert parsed(form, [written]) == (text, calls)
    assert parsed(form, written) == (text, calls), "character by character"


# What is broken before it is clear that there is a call stays text; what is broken behind that stays arguments.
@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        ("<tool_call>", "<tool_call>", []),
        ("<tool_call>\n[1]</tool_call>", "<tool_call>\n[1]</tool_call>", []),
        ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
        (f"<tool_call> no {HERMES_CALL}", "<tool_call> no", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "x', "", [("f", '{"a": [1, "x')]),
        (
            f'<tool_call>{{"name": "f", "arguments": {{"a": 1</tool_call>{HERMES_CALL}',
            "",
            [("f", '{"a": 1'), ("f", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f", "arguments": "{}"</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {a: nonsense, }}</tool_call>', "", [("f", "{a: nonsense, }")]),
    ],
)  # fmt: skip
def test_broken_calls(written: str, text: str, calls: Calls) -> None:
    assert parsed(FORMATS["hermes"], [written]) == (text, calls)


def test_text_after_a_call_comes_after_it() -> None:
    written = f"One.{HERMES_CALL}Two.{HERMES_CALL}Three.<tool"
    assert in_order(FORMATS["hermes"], [written]) == ["One.", 0, "Two.", 1, "Three.<tool"]


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"a') == [("", ((0, "f", '{"a', False),))]
    assert parser.push('": 1') == [("", ((0, None, '": 1', False),))]
    assert parser.push("}}") == [("", ((0, None, "}", False),))]


@pytest.mark.parametrize("form", [FORMATS["hermes"], FORMATS["llama3"], LIST], ids=lambda form: form.name)
def test_the_first_of_several_calls_can_be_the_end(form: ToolFormat) -> None:
    written = {
        "hermes": HERMES_CALL * 2,
        "llama3": '{"name": "f", "parameters": {}};{"name": "f", "parameters": {}}',
        "list": '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]',
    }[form.name]
    text, calls = parsed(form, written, only_first=True)
    assert (text, len(calls)) == ("", 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(
    st.sampled_from(NAMES), st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), JSON, max_size=3)
)


def written_calls(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As a model of that family would write them."""
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if form.name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form.name == "llama3":
        return "; ".join(objects)
    if form.name == "qwen3_coder":
        return "\n".join(in_tags(name, arguments) for name, arguments in calls)
    if form.name == "gemma4":
        return "".join(f"{form.begin}call:{name}{in_marks(arguments)}{form.end}" for name, arguments in calls)
    if form.name == "lfm2":
        own = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
        return f"{form.begin}[{', '.join(own)}]{form.end}"
    return f"{form.begin}[{', '.join(objects)}]{form.end}"


def in_tags(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{json.dumps(each)}\n</parameter>\n" for key, each in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def in_marks(value: Any) -> str:
    """As Gemma 4 writes values."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{in_marks(key)}:{in_marks(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_marks, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@given(st.data(), st.sampled_from(ALL), st.lists(CALL, min_size=1, max_size=3))
def test_what_was_meant_is_read_however_the_text_is_cut(
    data: st.DataObject, form: ToolFormat, meant: list[tuple[str, dict[str, Any]]]
) -> None:
    written = written_calls(form, meant)
    places = data.draw(st.lists(st.integers(0, len(written)), max_size=8))
    text, calls = parsed(form, cut(written, places))
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == meant


FRAGMENTS = st.sampled_from(
    [
        "<function=", "f>", "<parameter=", "text>", "</parameter>", "</function>", "f(", "a=", ")",
        "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "call:", "<tool_call|>", '<|"|>', "'",
        "<|tool_call|>", "<TOOLCALL>",
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}",
        ",", ":", ";", '"', "\\", " ", "\n", "<", '"name"', '"arguments"', '"f"', "f", "null",
        '{"name": "f", "arguments": {',
    ]
)  # fmt: skip


@given(st.data(), st.sampled_from(ALL), st.lists(FRAGMENTS | st.text(max_size=3), max_size=14), st.booleans())
def test_no_text_breaks_a_parser_and_no_cut_changes_what_it_says(
    data: st.DataObject, form: ToolFormat, fragments: list[str], only_first: bool
) -> None:
    written = "".join(fragments)
    places = data.draw(st.lists(st.integers(0, len(written)), max_size=8))
    whole = parsed(form, [written], only_first=only_first)
    assert parsed(form, cut(written, places), only_first=only_first) == whole
    order = in_order(form, [written], only_first=only_first)
    assert in_order(form, cut(written, places), only_first=only_first) == order
    if not whole[1]:
        assert whole[0] == written, "where there is no call, every character is text"


@pytest.mark.parametrize("escaped", ["\\ud800", "\\udc00\\ud800", "f\\udfff"])
def test_a_lone_surrogate_is_replaced_in_names_and_arguments_and_the_rest_is_kept(escaped: str) -> None:
    written = f'<tool_call>{{"name": "{escaped}", "arguments": "{{\\"a\\": \\"{escaped}é\\"}}"}}</tool_call>'
    written = written.replace('\\"a', '\\"\\ud83d\\ude00a')
    _, [(name, arguments)] = parsed(FORMATS["hermes"], [written])
    assert "\ufffd" in name
    assert arguments.startswith('{"\U0001f600a": "')
    assert "\ufffd" in arguments
    assert "é" in arguments
    (name + arguments).encode()


def cpu_s(form: ToolFormat, begin: str, piece: str, num_pieces: int, names: Iterable[str], is_strict: bool) -> float:
    began = time.thread_time()
    parser = ToolParser(form, [*names], is_strict=is_strict)
    parser.push(begin)
    for _ in range(num_pieces):
        parser.push(piece)
    parser.flush()
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("form", "begin", "piece"),
    [
        ("hermes", "", " " * 64),
        ("hermes", "", (" " * 31 + "<") * 2),
        ("hermes", "<tool_call>", " " * 64),
        ("hermes", '<tool_call>{"name": "f", "id": "', "a" * 64),
        ("hermes", '<tool_call>{"name": "f", "arguments": "', "a" * 64),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "a" * 64),
        ("hermes", '<tool_call>{"arguments": [', "[1], " * 13),
        ("mistral", "[TOOL_CALLS]", "f" * 64),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]", "1" * 64),
        ("llama3", "{", " " * 64),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>", "</parameter" * 6),
        ("lfm2", "<|tool_call_start|>[f(a=", "[[1], " * 11),
        ("llama3", "", '{"name": "f", "parameters": {}};' + " " * 32),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True], ids=["", "strict"])
def test_time_is_linear_in_the_length_of_the_text(form: str, begin: str, piece: str, is_strict: bool) -> None:
    names = [f"function_{number}" for number in range(64)] + ["f"]
    few = min(cpu_s(FORMATS[form], begin, piece, 250, names, is_strict) for _ in range(3))
    tries = (cpu_s(FORMATS[form], begin, piece, 2000, names, is_strict) for _ in range(3))
    assert any(many < 8 * 3 * few for many in tries), f"{few:.3f} s for 250 pieces, 24 times as long for 2,000"


@pytest.mark.parametrize("text", [" " * 100_000, "<tool_call>" + " " * 100_000, '<tool_call>{"a": "' + "b" * 1_000_000])
def test_what_is_held_back_is_bounded(text: str) -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    pieces = (text[begin : begin + 1000] for begin in range(0, len(text), 1000))
    said = "".join(part.text for piece in pieces for part in parser.push(piece))
    assert len(said) > len(text) * 0.7
    assert said + "".join(part.text for part in parser.flush()) == text


def test_a_deep_name_is_no_call() -> None:
    deep = '<tool_call>{"name": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parsed(FORMATS["hermes"], [deep]) == (deep, [])
