"""A conversation: messages, tool calls in messages, and the tools that the model may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from app.api.schemas.fields import (
    MAX_ID_LENGTH,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOOLS_SIZE,
    ListOf,
    NonEmpty,
    RefusalPart,
    Schema,
    TemplateVariables,
    TextPart,
    joined_text,
    not_larger,
)
from app.text.tool_calls import INPUT_KEY

UNSEEN_IMAGE = "[An image, which this model cannot see.]"  # replaces an image in the result of a call

# The type of everything that is not a custom tool. Listing both types here lets the error for a wrong type name both.
FunctionType = Annotated[Literal["function", "custom"], WithJsonSchema({"const": "function"})]


def by_type(value: Any) -> str:
    """Return the tag of the union member that a value belongs to."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"#{kind}" if kind in ("custom", "allowed_tools") else "#function"


class CalledFunction(Schema):
    name: str = Field(max_length=MAX_ID_LENGTH)
    arguments: str  # JSON, exactly as the model wrote it


class CalledCustom(Schema):
    name: str = Field(max_length=MAX_ID_LENGTH)
    input: str


class MessageToolCall(Schema):
    """A function call that the model made in an earlier turn."""

    id: str = Field(max_length=MAX_ID_LENGTH)
    type: FunctionType = "function"
    function: CalledFunction


class MessageCustomCall(Schema):
    """A call of a custom tool that the model made in an earlier turn."""

    id: str = Field(max_length=MAX_ID_LENGTH)
    type: Literal["custom"]
    custom: CalledCustom

    @cached_property
    def function(self) -> CalledFunction:
        """The equivalent function call for chat templates."""
        arguments = json.dumps({INPUT_KEY: self.custom.input}, ensure_ascii=False)
        return CalledFunction(name=self.custom.name, arguments=arguments)


AnyToolCall = Annotated[
    Annotated[MessageToolCall, Tag("#function")] | Annotated[MessageCustomCall, Tag("#custom")], Discriminator(by_type)
]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(Schema):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # calls must match the schema; forced calls always match
    lark: ClassVar[str | None] = None

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it."""
        function = self.uncopied()
        function.pop("strict", None)
        return function


class CustomGrammar(Schema):
    syntax: Literal["lark", "regex"]
    definition: NonEmpty


class CustomFormat(Schema):
    """The inputs that a custom tool accepts: any text, or texts that match a grammar."""

    model_config = ConfigDict(
        json_schema_extra={"if": {"properties": {"type": {"const": "grammar"}}}, "then": {"required": ["grammar"]}}
    )

    type: Literal["text", "grammar"]
    grammar: Annotated[CustomGrammar | None, Field(validate_default=True)] = None

    @field_validator("grammar")
    @classmethod
    def _grammar_is_given(cls, value: CustomGrammar | None, info: ValidationInfo) -> CustomGrammar | None:
        if value is None and info.data.get("type") == "grammar":
            raise ValueError("is required with the type grammar")
        return value


class CustomDefinition(Schema):
    """A tool whose input is a text. Models and templates receive it as a strict function with one argument."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat = CustomFormat(type="text")
    strict: ClassVar[bool] = True

    @property
    def lark(self) -> str | None:
        """The Lark grammar of the input, if any."""
        grammar = self.format.grammar
        return grammar.definition if grammar is not None and grammar.syntax == "lark" else None

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the function's arguments. A Lark grammar appears only in a description."""
        text: dict[str, Any] = {"type": "string"}
        if self.lark is not None:
            text["description"] = f"A text by this Lark grammar:\n{self.lark}"
        elif self.format.grammar is not None:
            text["pattern"] = f"^(?:{self.format.grammar.definition})$"
        return {
            "type": "object",
            "properties": {INPUT_KEY: text},
            "required": [INPUT_KEY],
            "additionalProperties": False,
        }

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it."""
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.parameters}


Definition = FunctionDefinition | CustomDefinition


class Tool(Schema):
    """A function that the model may call. There are no built-in tools."""

    type: FunctionType
    function: FunctionDefinition

    @property
    def definition(self) -> Definition:
        return self.function


class CustomTool(Schema):
    """A tool whose input is a text and not a JSON object of arguments."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def definition(self) -> Definition:
        return self.custom


class VendorTool(Schema):
    """A tool that only its vendor can run, or that only the vendor's models can call. Models here do not receive it."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=MAX_ID_LENGTH)


AnyTool = Annotated[Annotated[Tool, Tag("#function")] | Annotated[CustomTool, Tag("#custom")], Discriminator(by_type)]


class ChosenFunction(Schema):
    name: FunctionName


class _OneTool(Schema):
    mode: ClassVar[str] = "named"

    @property
    def named(self) -> Sequence[Self]:
        return [self]


class NamedTool(_OneTool):
    """`tool_choice` as an object: the model must call this function."""

    type: FunctionType
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(_OneTool):
    """`tool_choice` as an object: the model must call this custom tool."""

    type: Literal["custom"]
    custom: ChosenFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(Schema):
    mode: Literal["auto", "required"]
    tools: ListOf[
        Annotated[
            Annotated[NamedTool, Tag("#function")] | Annotated[NamedCustomTool, Tag("#custom")], Discriminator(by_type)
        ]
    ] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(Schema):
    """`tool_choice` as an object: only these tools may be called. The prompt lists all tools, to keep its prefix."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def mode(self) -> str:
        return self.allowed_tools.mode

    @property
    def named(self) -> Sequence[NamedTool | NamedCustomTool]:
        return self.allowed_tools.tools


ToolChoiceObject = Annotated[
    Annotated[NamedTool, Tag("#function")]
    | Annotated[NamedCustomTool, Tag("#custom")]
    | Annotated[AllowedToolsChoice, Tag("#allowed_tools")],
    Discriminator(by_type),
]


_joined_content = joined_text({"text": "text", "refusal": "refusal"})


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
    content: str | None = Field(None, validate_default=True)
    refusal: str | None = None  # the assistant's refusal in an earlier turn, instead of its content
    reasoning_content: str | None = None  # the reasoning of an earlier turn, for templates that read it
    reasoning: str | None = None  # another name for `reasoning_content`
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: ListOf[AnyToolCall] | None = Field(None, max_length=128)
    function_call: Annotated[dict[str, Any] | None, WithJsonSchema({"type": "object", "maxProperties": 0})] = None

    @field_validator("function_call")
    @classmethod
    def _no_function_call(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported; send tool_calls instead")
        return value

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart | RefusalPart] | None)
    @classmethod
    def _content_is_text(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return value
        if value is None and info.data.get("role") not in ("assistant", None):
            raise ValueError(f"is required in a message of role {info.data['role']!r}")
        return _joined_content(value)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them: with `content`, and with other keys only if they have a value.

    The result of a call includes the function's name, because some templates need it.
    """
    names: dict[str, str] = {}
    written = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        one: dict[str, Any] = {"role": message.role, "content": message.content or message.refusal or ""}
        if reasoning := message.reasoning_content or message.reasoning:
            one["reasoning_content"] = reasoning
        if message.name is not None:
            one["name"] = message.name
        elif message.role == "tool" and message.tool_call_id in names:
            one["name"] = names[message.tool_call_id]
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            one["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in message.tool_calls
            ]
        written.append(one)
    return written


def template_tools(tools: Sequence[Tool | CustomTool]) -> list[dict[str, Any]]:
    """Return the tools as chat templates expect them."""
    return [{"type": "function", "function": tool.definition.for_template()} for tool in tools]


Messages = Annotated[ListOf[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class Conversation(Schema):
    """The fields that a chat template renders into a prompt."""

    messages: Messages
    tools: Annotated[ListOf[AnyTool], not_larger(MAX_TOOLS_SIZE)] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)  # they override `reasoning_effort`
