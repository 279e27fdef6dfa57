"""The bodies of Anthropic's API, POST /v1/messages and /v1/messages/count_tokens, and their conversion to chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from app.api.schemas.conversation import UNSEEN_IMAGE, FunctionName, VendorTool
from app.api.schemas.fields import (
    MAX_ID_LENGTH,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOOLS_SIZE,
    JoinedText,
    ListOf,
    NonEmpty,
    NumTokens,
    ReasoningEffort,
    Schema,
    TemplateVariables,
    not_larger,
    refuse_media,
)
from app.api.schemas.requests import ChatRequest, GenerationRequest, without_user
from app.engine.request import MAX_TENANT_LENGTH
from app.errors import InvalidRequest

_ROLES: Mapping[str, tuple[str, ...]] = {  # maps each block type to the roles of messages that may contain it
    "text": ("user", "assistant", "system"),
    "document": ("user",),
    "search_result": ("user",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    # Tools that Anthropic runs, in conversations that started at Anthropic.
    "server_tool_use": ("assistant",),
    "web_search_tool_result": ("assistant",),
    "web_fetch_tool_result": ("assistant",),
    "code_execution_tool_result": ("assistant",),
    "bash_code_execution_tool_result": ("assistant",),
    "text_editor_code_execution_tool_result": ("assistant",),
    "tool_search_tool_result": ("assistant",),
    "mcp_tool_use": ("assistant",),
    "mcp_tool_result": ("assistant",),
}
_OF_RESULTS = ("text", "document", "search_result", "tool_reference", "image")  # block types in the results of calls
_OF_VENDOR = tuple(kind for kind in _ROLES if kind.startswith(("server_", "mcp_")) or kind.endswith("_tool_result"))
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CacheControl(Schema):
    """A marker without effect, because all prefixes are cached."""

    type: str = Field("ephemeral", max_length=MAX_ID_LENGTH)
    ttl: str | None = Field(None, max_length=MAX_ID_LENGTH)


class ContentBlock(Schema):
    """Base of all message blocks."""

    cache_control: CacheControl | None = None


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str


def _tag(block: Any) -> str:
    return f"#{block['type'] if isinstance(block, dict) else block.type}"


def _has_text(value: Any) -> Any:
    """Check a value before its union does, because the union's error would not explain that files are unsupported."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "content"):
        raise ValueError('should have the type "text" or "content"; this server cannot read PDF files, images or URLs')
    return value


class PlainTextSource(Schema):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Schema):
    type: Literal["content"]
    content: JoinedText

    @property
    def text(self) -> str:
        return self.content


class DocumentBlock(ContentBlock):
    """A text document. The model reads its title, its context and its text, each on separate lines."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainTextSource, Tag("#text")] | Annotated[ContentSource, Tag("#content")],
        Discriminator(_tag),
        BeforeValidator(_has_text),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(ContentBlock):
    """A search result. The model reads its title, its source and its text, each on separate lines."""

    type: Literal["search_result"]
    source: str
    title: str
    content: JoinedText

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.source, self.content)))


class ToolReferenceBlock(ContentBlock):
    """A tool that the client's tool search has found. The model reads its name."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ImageBlock(ContentBlock):
    """An image in the result of a call. The model reads a note instead, because no model here can see images."""

    type: Literal["image"]
    text: ClassVar[str] = UNSEEN_IMAGE


class ToolUseBlock(ContentBlock):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str = Field(max_length=MAX_ID_LENGTH)
    name: str = Field(max_length=MAX_ID_LENGTH)
    input: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """Return the call as a part of an assistant message."""
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


def _blocks_of(kinds: Sequence[str]) -> Callable[[Any], Any]:
    """Return a validator for blocks of these types, which also converts a string to a text block."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ValueError("should be a string or a list of blocks")
        if len(value) > MAX_PARTS:
            raise ValueError(f"has {len(value):,} blocks; at most {MAX_PARTS:,} are accepted")
        for number, block in enumerate(value):
            kind = block.get("type") if isinstance(block, dict) else None
            if not isinstance(kind, str) or kind not in kinds:
                refuse_media(str(kind), number)
                shown = f"a block of type {kind[:60]!r}" if isinstance(kind, str) else "a value without a type"
                raise ValueError(
                    f"has {shown} at index {number}; this server accepts blocks of type {', '.join(kinds)}"
                )
        return value

    return check


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[DocumentBlock, Tag("#document")]
    | Annotated[SearchResultBlock, Tag("#search_result")]
    | Annotated[ToolReferenceBlock, Tag("#tool_reference")]
    | Annotated[ImageBlock, Tag("#image")],
    Discriminator(_tag),
]


class ToolResultBlock(ContentBlock):
    """The result of a call. `is_error` is not passed on, because chat templates have no variable for it."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_ID_LENGTH)
    content: Annotated[
        ListOf[ResultBlock],
        BeforeValidator(_blocks_of(_OF_RESULTS), json_schema_input_type=str | list[ResultBlock]),
    ] = Field(default_factory=list)
    is_error: bool = False

    def for_chat(self) -> dict[str, Any]:
        content = "\n".join(block.text for block in self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ThinkingBlock(Schema):
    """The reasoning of an earlier turn. This server does not sign reasoning and ignores the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Schema):
    """Reasoning that only Anthropic can read. The prompt does not include it."""

    type: Literal["redacted_thinking"]
    data: str = ""


class VendorBlock(Schema):
    """A call of a tool that Anthropic runs, or the result of such a call. The prompt does not include it."""

    type: str


AnyBlock = (
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | VendorBlock
)


def _block_tag(block: Any) -> str:
    tag = _tag(block)
    return "#vendor" if tag[1:] in _OF_VENDOR else tag


MessageBlock = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[DocumentBlock, Tag("#document")]
    | Annotated[SearchResultBlock, Tag("#search_result")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[VendorBlock, Tag("#vendor")],
    Discriminator(_block_tag),
]


class AnthropicMessage(Schema):
    """One turn of a conversation, or instructions between its turns."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        ListOf[MessageBlock],
        BeforeValidator(_blocks_of(tuple(_ROLES)), json_schema_input_type=str | list[MessageBlock]),
    ]

    @model_validator(mode="after")
    def _blocks_are_of_role(self) -> AnthropicMessage:
        for block in self.content:
            if self.role not in _ROLES[block.type]:
                raise ValueError(f"has the role {self.role!r}, which may not have blocks of type {block.type!r}")
        return self


class AnthropicTool(Schema):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


def _tool_tag(tool: Any) -> str:
    """Return the tag of a tool. Anthropic's own tools have a type and no schema."""
    if not isinstance(tool, dict):
        return "#vendor" if isinstance(tool, VendorTool) else "#custom"
    kind = tool.get("type") or "custom"
    return "#custom" if kind == "custom" or tool.get("input_schema") is not None else "#vendor"


AnyAnthropicTool = Annotated[
    Annotated[AnthropicTool, Tag("#custom")] | Annotated[VendorTool, Tag("#vendor")], Discriminator(_tool_tag)
]


class AnthropicToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _tool_has_a_name(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise InvalidRequest("tool_choice of type tool requires a name; send it too", param="tool_choice.name")
        return self

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return _TOOL_CHOICES[self.type]


class AnthropicMetadata(Schema):
    user_id: str | None = Field(None, max_length=MAX_TENANT_LENGTH)


class AnthropicFormat(Schema):
    """The format of the text: a JSON document that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    format: AnthropicFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # reasoning effort

    def for_chat(self) -> dict[str, Any] | None:
        if self.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.format.schema_, "strict": True}}


class Thinking(Schema):
    """Whether the model reasons (if its chat template has `enable_thinking`), and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None


class ContextEdit(Schema):
    """A rule that removes parts of the conversation at Anthropic. This server removes nothing."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=MAX_ID_LENGTH)
    keep: Any = None

    @property
    def asks_for_nothing(self) -> bool:
        return self.type.startswith("clear_thinking_") and self.keep in ("all", {"type": "all"})


class ContextManagement(Schema):
    edits: ListOf[ContextEdit] = Field(default_factory=list, max_length=MAX_TOOLS)


class AnthropicPrompt(Schema):
    """The fields that make up a prompt."""

    messages: ListOf[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: JoinedText = ""
    tools: Annotated[ListOf[AnyAnthropicTool], not_larger(MAX_TOOLS_SIZE)] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    thinking: Thinking | None = None
    context_management: ContextManagement = ContextManagement()

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat that has the same prompt."""
        return {
            "messages": self._chat_messages(),
            "tools": [tool.for_chat() for tool in self.tools if isinstance(tool, AnthropicTool)],
            "chat_template_kwargs": self._template_variables(),
        }

    def _template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template. The variables in the body override `thinking`."""
        asked = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return asked | self.chat_template_kwargs

    @property
    def is_continued(self) -> bool:
        """Whether the last message is from the assistant, in which case the answer continues it."""
        return self.messages[-1].role == "assistant"

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        # Join consecutive messages of one role, as Anthropic does, because many templates refuse them.
        for role, turn in groupby(self.messages, key=lambda message: message.role):
            blocks = [block for message in turn for block in message.content]
            if role == "system":
                messages.append({"role": role, "content": _text_of(blocks) or ""})
            else:
                messages += [_answer(blocks)] if role == "assistant" else _results_and_question(blocks)
        return messages


def _text_of(blocks: Sequence[AnyBlock]) -> str | None:
    """Join the texts of blocks like the parts of a chat message. Returns None if no block has a text."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock)]
    return "\n".join(texts) if texts else None


def _results_and_question(blocks: Sequence[AnyBlock]) -> list[dict[str, Any]]:
    results = [block.for_chat() for block in blocks if isinstance(block, ToolResultBlock)]
    question = _text_of(blocks)
    return results if results and question is None else [*results, {"role": "user", "content": question or ""}]


def _answer(blocks: Sequence[AnyBlock]) -> dict[str, Any]:
    calls = [block.for_chat() for block in blocks if isinstance(block, ToolUseBlock)]
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    answer = {"role": "assistant", "content": _text_of(blocks), "reasoning_content": reasoning}
    return answer | ({"tool_calls": calls} if calls else {})


class _MessageFields:
    """The field names of this endpoint for errors of `GenerationRequest` and `ChatRequest`."""

    prompt_param: ClassVar[str] = "messages"
    format_param: ClassVar[str] = "output_config.format"
    stop_param: ClassVar[str] = "stop_sequences"
    budget_param: ClassVar[str] = "thinking.budget_tokens"
    effort_param: ClassVar[str] = "output_config.effort"


class CountTokensRequest(_MessageFields, AnthropicPrompt, GenerationRequest):
    """The body of POST /v1/messages/count_tokens: the body of a message whose prompt tokens are counted."""

    stop_sequences: ListOf[NonEmpty] = Field(default_factory=list)
    metadata: AnthropicMetadata = AnthropicMetadata()
    output_config: OutputConfig = OutputConfig()

    @property
    def question(self) -> str:
        for message in reversed(self.messages):
            text = _text_of(message.content) if message.role == "user" else None
            if text is not None:
                return text
        raise without_user("messages")

    @property
    def _chat_effort(self) -> ReasoningEffort | None:
        """The reasoning effort as a chat names it, or None if the body does not ask for reasoning."""
        effort = self.output_config.effort
        if self.thinking is None or self.thinking.type == "disabled":
            return None
        return "xhigh" if effort == "max" else effort

    @property
    def ignored_names(self) -> Iterator[str]:
        yield from (f"tools.{tool.type}" for tool in self.tools if isinstance(tool, VendorTool))
        edits = self.context_management.edits
        yield from (f"context_management.edits.{edit.type}" for edit in edits if not edit.asks_for_nothing)
        blocks = [block for message in self.messages for block in message.content]
        yield from (f"messages.{block.type}" for block in blocks if isinstance(block, VendorBlock))
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        yield from (f"messages.{each.type}" for block in results for each in block.content if each.type == "image")
        if self.output_config.effort is not None and self._chat_effort is None:
            yield self.effort_param

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat. Raises InvalidRequest if its fields or messages are inconsistent."""
        own = {
            **self.chat_fields(),
            "stop": self.stop_sequences,
            "tool_choice": self.tool_choice.for_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "continue_final_message": self.is_continued,
            "response_format": self.output_config.for_chat(),
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
            "reasoning_effort": self._chat_effort,
            "user": self.user or self.metadata.user_id,
        }
        return self.chat(_MessagesChat, own)


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: NumTokens


class _MessagesChat(_MessageFields, ChatRequest):
    """A chat whose errors use the field names of /v1/messages."""
