"""A conversation: its messages, the calls in them, and the tools on offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from app.api.schemas.fields import (
    MAX_ID_LENGTH,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOOLS_SIZE,
    ListOf,
    Schema,
    TemplateVariables,
    TextPart,
    joined_text,
    not_larger,
)


class CalledFunction(Schema):
    name: str = Field(max_length=MAX_ID_LENGTH)
    arguments: str  # JSON, as the model wrote it


class MessageToolCall(Schema):
    """A call that the model made in an earlier turn."""

    id: str = Field(max_length=MAX_ID_LENGTH)
    type: Literal["function"] = "function"
    function: CalledFunction


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(Schema):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # calls keep to the schema; forced calls always do


class Tool(Schema):
    """A function that the model may call. There are no built-in and no custom tools."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = self.function.uncopied()
        function.pop("strict", None)
        return {"type": "function", "function": function}


class ChosenFunction(Schema):
    name: FunctionName


class NamedTool(Schema):
    """`tool_choice` as an object: this function and no other."""

    type: Literal["function"]
    function: ChosenFunction


class Message(Schema):
    """One turn of a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(joined_text({"text": "text"}), json_schema_input_type=str | list[TextPart] | None)
    ] = Field(None, validate_default=True)
    reasoning_content: str | None = None  # of an earlier turn, for templates that take it
    reasoning: str | None = None  # another name for it
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: ListOf[MessageToolCall] | None = Field(None, max_length=128)
    function_call: Annotated[dict[str, Any] | None, WithJsonSchema({"type": "object", "maxProperties": 0})] = None

    @field_validator("function_call")
    @classmethod
    def _no_function_call(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported; send tool_calls instead")
        return value

    @field_validator("content")
    @classmethod
    def _content_is_given(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") not in ("assistant", None):
            raise ValueError(f"is required in a message of role {info.data['role']!r}")
        return value


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it: only keys that have a value, and `content` always.

    Some templates need the function's name in the result of a call.
    """
    names: dict[str, str] = {}
    written = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if reasoning := message.reasoning_content or message.reasoning:
            one["reasoning_content"] = reasoning
        if message.name is not None:
            one["name"] = message.name
        elif message.role == "tool" and message.tool_call_id in names:
            one["name"] = names[message.tool_call_id]
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            one["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        written.append(one)
    return written


class Conversation(Schema):
    """What a chat template makes a prompt of."""

    messages: ListOf[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[ListOf[Tool], not_larger(MAX_TOOLS_SIZE)] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Extra names for the chat template."""
        return self.chat_template_kwargs
