"""Adapts conversations to chat templates that do not support tools, tool calls or some roles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_RESULT_BEGIN, _RESULT_END = "<tool_response>", "</tool_response>"
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {begin}{end} XML tags:
{begin}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""  # the text of Hermes and Qwen 2.5 models, which most small models know from training


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks before, between and after calls that are written into a message as JSON objects."""

    begin: str
    between: str
    end: str


_HERMES_MARKS = CallMarks(f"{CALL_BEGIN}\n", f"\n{CALL_END}\n{CALL_BEGIN}\n", f"\n{CALL_END}")
# Maps a text in a family's template to the marks of its models, for templates that show tools but not calls.
_MARKS_OF_FAMILIES = {
    "<|tool_list_start|>": CallMarks("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),  # LFM2
    "<|tool_call|>": CallMarks("<|tool_call|>[", ", ", "]"),  # Granite 3
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The parts of a conversation that a chat template supports."""

    tools: bool
    calls: bool  # calls in the assistant's messages
    results: bool  # messages with the role `tool`
    call_marks: CallMarks  # used for calls if the template does not support them
    developer: bool  # messages with the role `developer`
    system: bool  # a first message with the role `system`
    later_system: bool  # further messages with the role `system`, anywhere in the conversation


def call_marks_of(template: str) -> CallMarks:
    """Return the marks with which calls are written into messages if the chat template does not support calls."""
    return next((marks for text, marks in _MARKS_OF_FAMILIES.items() if text in template), _HERMES_MARKS)


def adapted(messages: Sequence[Message], tools: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Adapt a conversation to a template with these traits. No text is lost or reordered.

    If the template does not support tools, they are listed in the system message. If it does not support calls, calls
    and results become text in the format of its model family, or otherwise of Hermes models. An unsupported role
    `developer` becomes `system`. If the template supports only one system message, the leading system messages are
    joined, and later ones become user messages. If it supports none, the leading one also becomes a user message.
    """
    adapted = list(messages)
    if not traits.developer:
        adapted = [each | {"role": "system"} if each["role"] == "developer" else each for each in map(dict, adapted)]
    if tools and not traits.tools:
        adapted = _with_tools(adapted, tools)
    is_changed = False
    if not traits.calls and any(each["role"] == "tool" or each.get("tool_calls") for each in adapted):
        adapted, is_changed = [_with_calls_as_text(each, traits) for each in adapted], True
    if not traits.later_system and any(each["role"] == "system" for each in adapted):
        adapted, is_changed = _with_one_system_message(adapted, is_taken=traits.system), True
    return joined_turns(adapted) if is_changed else adapted


def joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive user messages, and consecutive assistant messages, which some templates do not accept."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        may_join = last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant")
        if last is not None and may_join and not last.get("tool_calls"):
            turns[-1] = {**last, **message, "content": _joined(last["content"], message["content"])}
        else:
            turns.append(message)
    return turns


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Convert each content to a list of parts, for templates that do not accept plain text."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}] if each["content"] else []} for each in messages
    ]


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _with_tools(messages: list[Message], tools: Sequence[Message]) -> list[Message]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=listed, begin=CALL_BEGIN, end=CALL_END)
    if messages and messages[0]["role"] == "system":
        first, *others = messages
        return [{**first, "content": _joined(first["content"], text)}, *others]
    return [{"role": "system", "content": text}, *messages]


def _with_calls_as_text(message: Message, traits: TemplateTraits) -> Message:
    if message["role"] == "tool":
        if traits.results:
            return message
        return {"role": "user", "content": f"{_RESULT_BEGIN}\n{message['content']}\n{_RESULT_END}"}
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    calls, marks = [_call_text(call["function"]) for call in message.get("tool_calls") or ()], traits.call_marks
    text = f"{marks.begin}{marks.between.join(calls)}{marks.end}" if calls else ""
    return kept | {"content": "\n".join(filter(None, (message["content"], text)))}


def _call_text(function: Mapping[str, str]) -> str:
    """Return a call as a JSON object. Its arguments remain exactly as the model wrote them."""
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {function["arguments"]}}}'


def _with_one_system_message(messages: list[Message], *, is_taken: bool) -> list[Message]:
    num_first = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    others = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages[num_first:]]
    if num_first == 0:
        return others
    first = {
        "role": "system" if is_taken else "user",
        "content": _joined(*(m["content"] for m in messages[:num_first])),
    }
    return [first, *others]
