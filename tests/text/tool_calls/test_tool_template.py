"""Which format a chat template speaks, and what templates are given of tools and calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import InvalidRequest
from app.text import Tokenizer, marks_of
from app.text.tool_calls import FORMATS, ToolParser, format_of
from tests.text.tool_calls import published
from tests.text.tool_calls.templates import TEMPLATES, TEXT_ARGUMENTS, XML, tokenizer_with

CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
ASKED = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    assert format_of(tokenizer_with(TEMPLATES[name])) is FORMATS[name]


# By template: the format, the beginning of reasoning, and special tokens.
PUBLISHED = {
    "QWEN3_5": ("qwen3_coder", "<think>", ("<tool_call>", "</tool_call>")),
    "LFM2": ("lfm2", None, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "LFM2_5": ("lfm2", "<think>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "GRANITE_3": ("granite", None, ("<|tool_call|>",)),
    "GRANITE_4": ("hermes", None, ("<tool_call>", "</tool_call>")),
    "MISTRAL_LIST": ("mistral", None, ("[TOOL_CALLS]",)),
    "MISTRAL_CALL_ID": ("mistral", None, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "MINISTRAL_3": ("mistral", "[THINK]", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")),
    "NEMOTRON_NANO_2": ("nemotron", "<think>", ("<TOOLCALL>", "</TOOLCALL>")),
    "GEMMA_4": ("gemma4", "<|channel>thought", ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")),
}
SAID = {
    "word": 'a "fine" carousel,\nnamed\t}<\'',
    "years": 3,
    "is_open": True,
    "rides": [{"price": 1.5, "for": ["all"]}],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_family_publishes_is_known_by_its_template(name: str) -> None:
    form, begin, special = PUBLISHED[name]
    tokenizer = tokenizer_with(getattr(published, name), special)
    assert format_of(tokenizer) is FORMATS[form]
    marks = marks_of(tokenizer)
    assert (None if marks is None else marks.begin) == begin


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_are_read_back_from_what_a_published_template_writes(name: str, size: int) -> None:
    form = FORMATS[PUBLISHED[name][0]]
    said = SAID | ({"word": "a fine carousel"} if name == "LFM2_5" else {})  # it writes texts without escapes
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": called, "arguments": json.dumps(own)}}
        for number, (called, own) in enumerate(
            [("look_up", said), ("now", {})][: 1 if name.startswith("MISTRAL_") else 2]
        )
    ]
    tokenizer = tokenizer_with(getattr(published, name), PUBLISHED[name][2])
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    asked = tokenizer.render_chat([ASKED], add_generation_prompt=False)
    written = tokenizer.render_chat([ASKED, answer], add_generation_prompt=False).removeprefix(asked)
    parser = ToolParser(form, {"look_up", "now"}, texts={"look_up": {"word"}})
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    parsed = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    read: list[list[str]] = []
    for call in (call for part in parsed for call in part.calls):
        if call.name is not None:
            read.append([call.name, ""])
        read[call.number][1] += call.arguments
    assert [(called, json.loads(own)) for called, own in read] == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    assert not any(mark in "".join(part.text for part in parsed) for mark in form.special_texts)


@pytest.mark.parametrize("template", [XML, TEXT_ARGUMENTS, "{{ raise_exception('no') }}", "{{ messages }}"])
def test_other_templates_have_no_format(template: str) -> None:
    assert format_of(tokenizer_with(template)) is None


def test_a_template_without_a_place_for_tools_has_the_format_in_which_they_are_written_into_messages(
    demo_path: Path,
) -> None:
    tokenizer = Tokenizer.load(str(demo_path))
    assert not tokenizer.has_tools_in_template
    assert format_of(tokenizer) is FORMATS["hermes"]


def test_templates_get_arguments_as_objects() -> None:
    said = tokenizer_with(TEMPLATES["hermes"]).render_chat(
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    )
    assert '{"name": "f", "arguments": {"a": [1, "é"]}}' in said


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "[" * 5000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert f'"arguments": "{arguments}"' in tokenizer_with(TEMPLATES["hermes"]).render_chat([ASKED, message])


def test_templates_that_cannot_take_objects_get_the_text() -> None:
    said = tokenizer_with(TEXT_ARGUMENTS).render_chat([{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert 'f: {"a": [1, "é"]}' in said


def test_a_refusal_of_the_template_is_told() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "short"}]}
    with pytest.raises(InvalidRequest, match="ids have 9 characters"):
        tokenizer_with(TEMPLATES["mistral"]).render_chat([ASKED, message])


def test_tools_are_in_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    tokenizer = tokenizer_with(TEMPLATES["hermes"])
    assert tokenizer.has_tools_in_template
    assert '"look_up"' in tokenizer.render_chat([ASKED], tools=[tool])
    assert "Tools" not in tokenizer.render_chat([ASKED], tools=[])


def test_special_tokens_of_a_format_are_known_by_their_texts() -> None:
    tokenizer = tokenizer_with(TEMPLATES["mistral"])
    shown = tokenizer.special_ids(FORMATS["mistral"].special_texts)
    assert tokenizer.token_texts(sorted(shown)) == ["[TOOL_CALLS]", "[ARGS]"]
