"""Which format a chat template speaks, and what templates are given of tools and calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import InvalidRequest
from app.text import Tokenizer
from app.text.tool_calls import FORMATS, format_of
from tests.text.tool_calls.templates import TEMPLATES, TEXT_ARGUMENTS, XML, tokenizer_with

CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
ASKED = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    assert format_of(tokenizer_with(TEMPLATES[name])) is FORMATS[name]


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
