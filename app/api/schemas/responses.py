"""The body of POST /v1/responses, and its conversion to a chat."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.api.schemas.conversation import UNSEEN_IMAGE, FunctionDefinition, FunctionName, VendorTool, by_type
from app.api.schemas.fields import (
    MAX_ID_LENGTH,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOOLS_SIZE,
    ListOf,
    Metadata,
    Natural,
    NonEmpty,
    NumSamples,
    NumTokens,
    ReasoningEffort,
    Schema,
    TemplateVariables,
    ToolChoice,
    joined_text,
    not_larger,
)
from app.api.schemas.requests import ChatRequest, GenerationRequest, OutputSchema, without_user
from app.errors import InvalidRequest

MAX_NAME_LENGTH = 128  # characters in the name of a tool


class InputText(Schema):
    """A text as a part of an item's content."""

    type: Literal["input_text", "output_text"]
    text: str


Content = Annotated[
    str,
    BeforeValidator(
        joined_text({"input_text": "text", "output_text": "text", "refusal": "refusal"}),
        json_schema_input_type=str | list[InputText],
    ),
]


def _without_images(value: Any) -> Any:
    """Replace each image in the result of a call with a text, because no model here can see images."""
    if not isinstance(value, list):
        return value
    unseen = {"type": "input_text", "text": UNSEEN_IMAGE}
    return [unseen if isinstance(part, dict) and part.get("type") == "input_image" else part for part in value]


class InputMessage(Schema):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name that a model uses to call a tool of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


class InputCall(Schema):
    """A function call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_ID_LENGTH)
    name: str = Field(max_length=MAX_ID_LENGTH)
    namespace: str | None = Field(None, max_length=MAX_ID_LENGTH)
    arguments: str

    def for_chat(self) -> dict[str, Any]:
        """Return the call as a part of an assistant message."""
        function = {"name": full_name(self.namespace, self.name), "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class InputCustomCall(Schema):
    """A call of a custom tool that the model made in an earlier turn."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(max_length=MAX_ID_LENGTH)
    name: str = Field(max_length=MAX_ID_LENGTH)
    namespace: str | None = Field(None, max_length=MAX_ID_LENGTH)
    input: str

    def for_chat(self) -> dict[str, Any]:
        """Return the call as a part of an assistant message."""
        custom = {"name": full_name(self.namespace, self.name), "input": self.input}
        return {"id": self.call_id, "type": "custom", "custom": custom}


class InputCallOutput(Schema):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(max_length=MAX_ID_LENGTH)
    output: Annotated[Content, BeforeValidator(_without_images, json_schema_input_type=str | list[InputText])]

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class InputReasoning(Schema):
    """The reasoning of an earlier turn. The prompt does not include it."""

    type: Literal["reasoning"]


class VendorItem(Schema):
    """A call, or its result, of a tool that only OpenAI's service or models can use. The prompt does not include it."""

    type: str


# Items of conversations that started at OpenAI.
_OF_VENDOR = frozenset({
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output",
    "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
    "tool_search_call", "tool_search_output",
    "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
})  # fmt: skip
_ITEM_TYPES = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip


def _items(value: Any) -> Any:
    """Check `input`, and convert a string to a user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("should be a text or a list of items")
    for number, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "item_reference":
            raise ValueError(
                f"has an item_reference at index {number}, but this server does not store items; send the item itself"
            )
        if kind not in _ITEM_TYPES and kind not in _OF_VENDOR:
            raise ValueError(f"has an item at index {number} whose type is not one of {', '.join(_ITEM_TYPES)}")
    return value


def _item_tag(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else item.type
    if kind in _OF_VENDOR:
        return "#vendor"
    return "#call_output" if kind.endswith("_output") else f"#{kind}"


InputItem = Annotated[
    Annotated[InputMessage, Tag("#message")]
    | Annotated[InputCall, Tag("#function_call")]
    | Annotated[InputCustomCall, Tag("#custom_tool_call")]
    | Annotated[InputCallOutput, Tag("#call_output")]
    | Annotated[InputReasoning, Tag("#reasoning")]
    | Annotated[VendorItem, Tag("#vendor")],
    Discriminator(_item_tag),
]


class InputFormat(Schema):
    """The inputs that a custom tool accepts: any text, or texts that match a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, validate_default=True)
    definition: NonEmpty | None = Field(None, validate_default=True)

    @field_validator("syntax", "definition")
    @classmethod
    def _grammar_is_given(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") == "grammar":
            raise ValueError("is required with the type grammar")
        return value

    def for_chat(self) -> dict[str, Any]:
        if self.type == "text":
            return {"type": "text"}
        return {"type": "grammar", "grammar": {"syntax": self.syntax, "definition": self.definition}}


class _Typed(Schema):
    type: Literal["function", "custom"]  # checked first, so that the error for another type of tool names the type


class ResponsesTool(FunctionDefinition, _Typed):
    """A function that the model may call, or a custom tool."""

    format: InputFormat | None = None  # the input of a custom tool

    def for_chat(self) -> dict[str, Any]:
        tool = self.uncopied()
        kind = tool.pop("type")
        if self.format is not None:
            tool["format"] = self.format.for_chat()
        return {"type": kind, kind: tool}

    def as_json(self) -> dict[str, Any]:
        """Return the tool as responses repeat it."""
        shown = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == "custom":
            form = {"type": "text"} if self.format is None else self.format.model_dump(exclude_none=True)
            return shown | {"format": form}
        return shown | {"parameters": self.parameters, "strict": self.strict}


class NamespaceTool(Schema):
    """Several tools under one name. For the model, the name of each tool starts with this name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: ListOf[ResponsesTool] = Field(max_length=MAX_TOOLS)

    def offered(self) -> Iterator[ResponsesTool]:
        """Yield the tools as the model sees them. The first tool's description starts with the namespace's."""
        described = self.description
        for tool in self.tools:
            text = "\n\n".join(filter(None, (described, tool.description))) or None
            yield tool.model_copy(update={"name": full_name(self.name, tool.name), "description": text})
            described = None

    def as_json(self) -> dict[str, Any]:
        """Return the namespace as responses repeat it."""
        tools = [tool.as_json() for tool in self.tools]
        return {"type": self.type, "name": self.name, "description": self.description or "", "tools": tools}


def _tool_tag(tool: Any) -> str:
    """Return the tag of a tool. A tool without a name whose type is not function or custom is OpenAI's own."""
    if not isinstance(tool, dict):
        kinds = {ResponsesTool: "#function", NamespaceTool: "#namespace"}
        return next((tag for kind, tag in kinds.items() if isinstance(tool, kind)), "#vendor")
    kind = tool.get("type")
    if kind == "namespace":
        return "#namespace"
    is_vendors = isinstance(kind, str) and kind not in ("function", "custom") and tool.get("name") is None
    return "#vendor" if is_vendors else "#function"


AnyResponsesTool = Annotated[
    Annotated[ResponsesTool, Tag("#function")]
    | Annotated[NamespaceTool, Tag("#namespace")]
    | Annotated[VendorTool, Tag("#vendor")],
    Discriminator(_tool_tag),
]


class NamedResponsesTool(_Typed):
    name: FunctionName

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"name": self.name}}


class AllowedResponsesTools(Schema):
    """`tool_choice` as an object: only these tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[NamedResponsesTool] = Field(min_length=1, max_length=MAX_TOOLS)

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"mode": self.mode, "tools": [each.for_chat() for each in self.tools]}}


ResponsesToolChoice = Annotated[
    Annotated[NamedResponsesTool, Tag("#function")] | Annotated[AllowedResponsesTools, Tag("#allowed_tools")],
    Discriminator(lambda value: by_type(value).replace("custom", "function")),
]


class TextFormat(OutputSchema):
    """The form of the text: the `response_format` of a chat, but without the nested `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def for_chat(self) -> dict[str, Any]:
        schema = self.as_json()
        if self.type != "json_schema":
            return schema
        return {"type": schema.pop("type"), "json_schema": schema}

    def as_json(self) -> dict[str, Any]:
        """Return the format as responses repeat it."""
        return self.uncopied() if self.type == "json_schema" else {"type": self.type}


class TextOptions(Schema):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect, because no model here supports it


class ReasoningOptions(Schema):
    """The effort of reasoning. The response contains the full reasoning rather than a summary, as `auto` permits."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


LOGPROBS = "message.output_text.logprobs"
Includable = Annotated[str, Field(max_length=MAX_ID_LENGTH)]  # values other than LOGPROBS have no effect


class _FieldNames:
    """The field names of this endpoint for errors of `GenerationRequest` and `ChatRequest`."""

    prompt_param: ClassVar[str] = "input"
    format_param: ClassVar[str] = "text.format"
    effort_param: ClassVar[str] = "reasoning.effort"

    @property
    def length_param(self) -> str:
        return "max_output_tokens"


class ResponsesRequest(_FieldNames, GenerationRequest):
    """The body of POST /v1/responses."""

    input: Annotated[ListOf[InputItem], BeforeValidator(_items, json_schema_input_type=NonEmpty | list[InputItem])] = (
        Field(min_length=1, max_length=MAX_MESSAGES)
    )
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    tools: Annotated[ListOf[AnyResponsesTool], not_larger(MAX_TOOLS_SIZE)] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice[ResponsesToolChoice] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: NumSamples | None = None  # without effect, because the server itself runs no tools
    text: TextOptions = TextOptions()
    truncation: Literal["auto", "disabled"] = "disabled"  # auto leaves out the oldest turns that do not fit
    reasoning: ReasoningOptions = ReasoningOptions()
    include: ListOf[Includable] = Field(default_factory=list, max_length=16)
    top_logprobs: Natural | None = None
    metadata: Metadata = Field(default_factory=dict)  # returned unchanged
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    previous_response_id: str | None = Field(None, max_length=MAX_ID_LENGTH)
    background: bool = False  # return immediately, and generate the stored response afterwards

    @model_validator(mode="after")
    def _logprobs_are_included(self) -> ResponsesRequest:
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f'top_logprobs requires `include: ["{LOGPROBS}"]`; send both', param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _background_is_stored(self) -> ResponsesRequest:
        if self.background and not self.store:
            raise InvalidRequest("`background: true` requires `store: true`; send both", param="background")
        return self

    @model_validator(mode="after")
    def _tools_have_names_of_their_own(self) -> ResponsesRequest:
        names = [tool.name for tool in self.offered]
        if len(names) > MAX_TOOLS:
            raise InvalidRequest(
                f"`tools` contains {len(names):,} tools, including tools in namespaces; at most {MAX_TOOLS} are "
                f"accepted; send fewer",
                param="tools",
            )
        in_namespaces = {tool.name for each in self.tools if isinstance(each, NamespaceTool) for tool in each.offered()}
        for name in in_namespaces:
            if names.count(name) > 1 or len(name) > MAX_NAME_LENGTH:
                raise InvalidRequest(
                    f"the full name {name[:200]!r} of a tool in a namespace is already in use or exceeds "
                    f"{MAX_NAME_LENGTH} characters; rename the tool",
                    param="tools",
                )
        return self

    @cached_property
    def offered(self) -> list[ResponsesTool]:
        """The tools as the model sees them, without namespaces."""
        offered: list[ResponsesTool] = []
        for tool in self.tools:
            if not isinstance(tool, VendorTool):
                offered += [tool] if isinstance(tool, ResponsesTool) else tool.offered()
        return offered

    @property
    def ignored_names(self) -> Iterator[str]:
        yield from (f"tools.{tool.type}" for tool in self.tools if isinstance(tool, VendorTool))
        yield from (f"input.{item.type}" for item in self.input if isinstance(item, VendorItem))
        outputs = [item.output for item in self.input if isinstance(item, InputCallOutput)]
        yield from ("input.input_image" for output in outputs if UNSEEN_IMAGE in output)
        yield from (f"include.{name}" for name in self.include if name != LOGPROBS)
        if self.text.verbosity not in (None, "medium"):
            yield "text.verbosity"
        if self.reasoning.summary in ("concise", "detailed"):
            yield "reasoning.summary"

    @property
    def storing_param(self) -> str | None:
        """The name of the first given field that requires stored responses, or None."""
        names = ("store", "previous_response_id", "background")
        return next((name for name in names if getattr(self, name)), None)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response includes log-probabilities of its text's tokens."""
        return LOGPROBS in self.include

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def question(self) -> str:
        for item in reversed(self.input):
            if isinstance(item, InputMessage) and item.role == "user":
                return item.content
        raise without_user("input")

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat. Raises InvalidRequest if its fields or items are inconsistent."""
        choice = self.tool_choice
        own = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.for_chat() for tool in self.offered],
            "tool_choice": choice if isinstance(choice, str) else choice.for_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
        }
        # `within` is for errors about several items of a turn, such as too many calls.
        return self.chat(_ResponsesChat, own, within="input")

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, InputReasoning | VendorItem):
                continue
            if not isinstance(item, InputCall | InputCustomCall):
                messages.append(item.for_chat())
            elif messages and messages[-1]["role"] == "assistant":  # join the text and calls of a turn
                messages[-1].setdefault("tool_calls", []).append(item.for_chat())
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [item.for_chat()]})
        return messages


class _ResponsesChat(_FieldNames, ChatRequest):
    """A chat whose errors use the field names of /v1/responses."""
