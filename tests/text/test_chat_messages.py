"""What chat templates are given of conversations that they have no place for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.text import Tokenizer
from tests.text.tool_calls.templates import HERMES, tokenizer_with

# As ChatML's, which SmolLM 2 has; of other roles than these it says nothing, as Qwen 3's.
CHATML = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}</>
{%- endif %}{% endfor %}"""
# As Llama 2's, Mistral's and Gemma 3's: one system message, then turns by turns.
ALTERNATING = """{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</>
{%- set messages = messages[1:] %}{% endif %}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"""
# As Gemma 2's.
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATING

# As Llava's and SmolVLM's, which are for images too.
OF_PARTS = """{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}{{ part.text }}
{%- endfor %}{{ m.tool_calls[0].function.name if m.tool_calls }}</>{% endfor %}"""

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":  1}'}}


def said(role: str, content: str | None = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TURNS = [said("user", "Hi"), said("assistant", "Yes.", tool_calls=[CALL]), said("tool", "5"), said("user", "And?")]


def written(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer_with(template).render_chat(messages, **options)


@pytest.mark.parametrize("template", [CHATML, ALTERNATING])
def test_tools_calls_and_results_become_text(template: str) -> None:
    prompt = written(template, [said("system", "Be brief."), *TURNS], tools=[TOOL])
    assert prompt.startswith("<system>Be brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}\n' in prompt
    assert prompt.endswith(
        '<user>Hi</><assistant>Yes.\n<tool_call>\n{"name": "look", "arguments": {"at":  1}}\n</tool_call></>'
        "<user><tool_response>\n5\n</tool_response>\n\nAnd?</>"
    )


def test_tools_stand_in_a_system_message_of_their_own_where_there_is_none() -> None:
    assert written(CHATML, [said("user", "Hi")], tools=[TOOL]).startswith("<system># Tools\n")
    assert written(WITHOUT_SYSTEM, [said("user", "Hi")], tools=[TOOL]).startswith("<user># Tools\n")
    assert written(CHATML, [said("user", "Hi")], tools=[]) == "<user>Hi</>"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (CHATML, "<system>One</><system>Two</><user>Hi</><system>Three</><user>And?</>"),
        (ALTERNATING, "<system>One\n\nTwo</><user>Hi\n\nThree\n\nAnd?</>"),
        (WITHOUT_SYSTEM, "<user>One\n\nTwo\n\nHi\n\nThree\n\nAnd?</>"),
    ],
)
def test_no_instruction_is_lost(template: str, prompt: str) -> None:
    messages = [said("system", "One"), said("developer", "Two"), said("user", "Hi"), said("developer", "Three")]
    assert written(template, [*messages, said("user", "And?")]) == prompt


def test_a_template_that_knows_developers_gets_them() -> None:
    assert written(CHATML.replace("'system'", "'system', 'developer'"), [said("developer", "One")]) == (
        "<developer>One</>"
    )


def test_messages_of_one_role_are_joined_only_where_the_template_refuses_them() -> None:
    messages = [said("user", "Hi"), said("user", "Ho"), said("assistant", "A"), said("assistant", "B"), said("user")]
    assert written(CHATML, messages) == "<user>Hi</><user>Ho</><assistant>A</><assistant>B</><user></>"
    assert written(ALTERNATING, messages) == "<user>Hi\n\nHo</><assistant>A\n\nB</><user></>"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        written(ALTERNATING, [said("assistant", "A")])


def test_a_template_with_a_place_for_everything_gets_the_messages_as_they_are() -> None:
    prompt = written(HERMES, [said("system", "One"), *TURNS], tools=[TOOL])
    assert "# Tools" not in prompt
    assert prompt.endswith("<|end|><|tool|>5<|end|><|user|>And?<|end|><|assistant|>")


def test_the_bundled_model_is_told_of_tools(demo_path: Path) -> None:
    prompt = Tokenizer.load(str(demo_path)).render_chat([said("user", "Hi")], tools=[TOOL])
    assert prompt.startswith("<|system|># Tools\n")
    assert prompt.endswith("<|end|><|user|>Hi<|end|><|assistant|>")


def test_a_template_that_takes_only_parts_gets_parts() -> None:
    messages = [said("system", "Be brief."), *TURNS, said("user")]
    shown = "<system>Be brief.</><user>Hi</><assistant>Yes.look</><tool>5</><user>And?</><user></>"
    assert written(OF_PARTS, messages) == shown
    nothing_said = [said("user", "Hi"), said("assistant", None, tool_calls=[CALL])]
    assert written(OF_PARTS, nothing_said) == "<user>Hi</><assistant>look</>"
    going_on = [said("user", "Hi"), said("assistant", "Ye")]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert written(OF_PARTS, going_on, **options) == "<user>Hi</><assistant>Ye"


def test_a_template_that_takes_texts_gets_texts() -> None:
    either = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert written(either, [said("user", "Hi")]) == "Hi"
