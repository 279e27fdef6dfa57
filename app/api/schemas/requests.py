"""The typed requests. Shapes and ranges that depend on no model and no limit are checked here.

`null` is "not given" everywhere. Fields that are not supported are in `parameters.py`. `openapi.py` publishes
these classes as JSON schemas; where a validator accepts more than the type behind it, its `json_schema_input_type` or
`WithJsonSchema` says what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from app.api.json_structure import is_longer
from app.engine.request import MAX_DEADLINE_S, MAX_PRIORITY, MAX_TENANT_LENGTH
from app.errors import InvalidRequest

MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_OUTPUT_CHOICES = 4096
MAX_STRUCTURES, MAX_MARKER_LENGTH = 128, 1024
MAX_TRIGGERS, MAX_TRIGGER_LENGTH = 16, 128
MAX_ID_LENGTH = 256
# More than any model reads. Without these limits the validation of one body could stop all other requests.
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 10_000
MAX_TOOLS = 128
MAX_TOOLS_SIZE = 524_288
MAX_TOOL_CALLS = 128
MAX_DETOKENIZED = 1_000_000
TOOL_CHOICES = ("none", "auto", "required")


def as_int(value: Any) -> Any:
    """`1.0` as 1: in JSON they are the same number, and some languages write only the first. Lists item by item."""
    if type(value) is float and value.is_integer():
        return int(value)
    return [as_int(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


def _unless_false(value: Any) -> Any:
    """`logprobs` of a completion: false, as in a chat, is not given."""
    return None if value is False else as_int(value)


def _texts(value: Any) -> Any:
    """`stop`: one string stands for a list of one."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("should be a string or a list of strings")
    if "" in texts:
        raise ValueError("should not contain an empty string")
    return texts


def _prompts(value: Any) -> Any:
    """The four forms of `prompt` as one: a list of strings or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    value = as_int(value)
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string, a list of strings, a list of token ids, or a list of such lists")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are accepted")
    value = [as_int(item) if isinstance(item, list) else item for item in value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise ValueError("should hold only strings, or only token ids, or only lists of token ids")
    return value


def check_number(texts: list[Any]) -> None:
    """Raise ValueError for more texts than anything reads."""
    if len(texts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(texts):,} texts; at most {MAX_PROMPTS:,} are accepted")


def _document_texts(value: Any) -> Any:
    """Strings and `{"text": ...}` as strings. A list is not looked at when it is too long."""
    if not isinstance(value, list):
        raise ValueError('should be a list of strings or of objects like {"text": "..."}')
    check_number(value)
    texts = [each.get("text") if isinstance(each, dict) else each for each in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('should hold only strings or objects like {"text": "..."}')
    return texts


def joined_text(fields: Mapping[str, str]) -> Callable[[Any], Any]:
    """Makes one text of a string or of parts, joined by newlines. `fields` names the field of each type's text."""

    def text_of(part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(fields[kind]) if isinstance(kind, str) and kind in fields else None
        if not isinstance(text, str):
            example = f'{{"type": "{next(iter(fields))}", "text": "..."}}'
            raise ValueError(f"should hold only parts like {example}; other parts are not supported")
        return text

    def join(value: Any) -> Any:
        if isinstance(value, str) or value is None:
            return value
        if not isinstance(value, list):
            raise ValueError("should be a string or a list of text parts")
        if len(value) > MAX_PARTS:
            raise ValueError(f"has {len(value):,} parts; at most {MAX_PARTS:,} are accepted")
        return "\n".join([text_of(part) for part in value])

    return join


def _bias(value: Any) -> Any:
    """`logit_bias` as OpenAI has it: keys are token ids in strings, values are clamped to ±100."""
    if not isinstance(value, dict):
        raise ValueError("should be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"has {len(value):,} entries; at most {MAX_LOGIT_BIAS_ENTRIES:,} are accepted")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"has the key {key[:40]!r}, which is not a token id")
        if type(bias) not in (int, float) or bias != bias:
            raise ValueError(f"has no number for token {key}")
    return {int(key): float(min(100, max(-100, bias))) for key, bias in value.items()}


def _tool_choice(value: Any) -> Any:
    """Checks before the union does: the union's own error would name all of its parts."""
    if isinstance(value, str) and value not in TOOL_CHOICES:
        raise ValueError(f"should be {', '.join(TOOL_CHOICES)} or an object that names a function; got {value[:40]!r}")
    if not isinstance(value, str | dict):
        raise ValueError(f"should be {', '.join(TOOL_CHOICES)} or an object that names a function")
    return value


T = TypeVar("T")


class _FirstError(FailFast):
    """Hashable, as parts of unions have to be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list that ends its validation at the first mistake: to build an error for each of a million items takes seconds.
ListOf = Annotated[list[T], _FirstError()]
NonEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
AsInt = BeforeValidator(as_int)
Natural = Annotated[int, Field(ge=0), AsInt]
NumSamples = Annotated[int, Field(ge=1), AsInt]
NumTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), AsInt]
TokenBudget = Annotated[int, Field(ge=0, le=MAX_TOKENS), AsInt]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]  # as OpenAI names them
ToolChoice = Annotated[Literal["none", "auto", "required"] | T, BeforeValidator(_tool_choice)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]


class TextObject(BaseModel):
    """A document as Cohere's v1 and Jina write it."""

    text: str


Documents = Annotated[ListOf[str], BeforeValidator(_document_texts, json_schema_input_type=list[str | TextObject])]


def not_larger(max_size: int) -> BeforeValidator:
    """Refuses a value with more characters and values."""

    def check(value: Any) -> Any:
        if is_longer(value, max_size):
            raise ValueError(f"has more than {max_size:,} characters and values, which is the most that is accepted")
        return value

    return BeforeValidator(check)


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Schema(BaseModel):
    """Base of all bodies: no coercion (`"5"` is no number), unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value


class StreamOptions(Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OutputSchema(Schema):
    """`response_format.json_schema`, as at OpenAI."""

    name: str = Field("", max_length=MAX_ID_LENGTH)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Structure(Schema):
    """A document of a schema between two texts."""

    begin: str = Field(min_length=1, max_length=MAX_MARKER_LENGTH)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    end: str = Field("", max_length=MAX_MARKER_LENGTH)


Structures = Annotated[ListOf[Structure], Field(min_length=1, max_length=MAX_STRUCTURES)]
Triggers = Annotated[
    ListOf[Annotated[str, Field(min_length=1, max_length=MAX_TRIGGER_LENGTH)]],
    Field(min_length=1, max_length=MAX_TRIGGERS),
]


class StructuralTag(Schema):
    """Free text in which what begins with a trigger is one of the structures, as vLLM writes it."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Structures
    triggers: Triggers


class ResponseFormat(Schema):
    """The form of the output, as OpenAI writes it, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: OutputSchema | None = None
    structures: Structures | None = None  # this and the next: of a structural tag
    triggers: Triggers | None = None


class StructuredOutputs(Schema):
    """The form of the output as vLLM writes it: one of these fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: NonEmpty | None = None
    choice: Annotated[ListOf[NonEmpty], Field(min_length=1, max_length=MAX_OUTPUT_CHOICES)] | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | NonEmpty | None = None  # a StructuralTag, also as JSON in a string


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
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
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
    tool_calls: ListOf[MessageToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
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

    @property
    def num_characters(self) -> int:
        """The length of all that a template may write of it."""
        calls = self.tool_calls or ()
        texts = (self.content, self.reasoning_content or self.reasoning, self.name, self.tool_call_id)
        return sum(len(text) for text in texts if text) + sum(
            len(call.id) + len(call.function.name) + len(call.function.arguments) for call in calls
        )

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect: only keys that have a value, and `content` always."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it. Some need the function's name in the result of a call."""
    names: dict[str, str] = {}
    written = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        one = message.for_template()
        if message.role == "tool" and message.tool_call_id in names:
            one = {"name": names[message.tool_call_id]} | one
        written.append(one)
    return written


class ModelRequest(Schema):
    """A request to a model."""

    model: str | None = None


class QueuedRequest(ModelRequest):
    """The fields of all requests that are computed on replicas: tenant, priority, deadline."""

    cache_salt: str = Field("", max_length=MAX_ID_LENGTH)
    user: str = Field("", max_length=MAX_TENANT_LENGTH)  # the tenant under the policy `fair`
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), AsInt] = 0  # lower goes first
    service_tier: str = Field("auto", max_length=MAX_ID_LENGTH)  # "flex": background work, as at OpenAI
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)  # seconds from the arrival of the request
    request_id: str | None = Field(None, max_length=MAX_ID_LENGTH, pattern=r"^[\x21-\x7e]+$")

    @property
    def wants_stream(self) -> bool:
        """Whether the response is streamed."""
        return False

    def encoded_size(self, size: int) -> int:
        """How many characters are made tokens of; `size`: of the body."""
        return size

    @property
    def length_param(self) -> str:
        """The field that says how many tokens may be generated."""
        return "max_tokens"

    @property
    def asked_tokens(self) -> int | None:
        """The output length in the body, if any."""
        return None


class GenerationRequest(QueuedRequest):
    """The fields of all endpoints that generate text."""

    prompt_param: ClassVar[str] = "prompt"  # the field that the prompt comes from
    format_param: ClassVar[str] = "response_format"  # the field for the form of the output
    stop_param: ClassVar[str] = "stop"  # the field for the texts that end the output
    budget_param: ClassVar[str] = "thinking_token_budget"  # the field for the limit of reasoning
    effort_param: ClassVar[str] = "reasoning_effort"  # the field for its effort

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AsInt] = 0
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[
        dict[int, float],
        BeforeValidator(_bias),
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": {"type": "number"},
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
            }
        ),
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), AsInt] | None = None
    n: NumSamples = 1
    best_of: NumSamples | None = None  # the number of samples; the response has the `n` likeliest
    max_tokens: NumTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), AsInt] = 0
    stop: Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=NonEmpty | list[NonEmpty])] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[ListOf[int], Field(max_length=MAX_STOP_TOKEN_IDS), AsInt] = Field(default_factory=list)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[ListOf[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS), AsInt] = Field(
        default_factory=list
    )
    bad_words: ListOf[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # Keep this many at the end; -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AsInt] | None = Field(
        None, json_schema_extra={"not": {"const": 0}}
    )
    prompt_logprobs: Natural | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    documents: Documents = Field(default_factory=list)  # texts that are written into the prompt, or first ranked

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true; send both or neither", param="stream_options")
        if self.num_samples < self.n:
            raise InvalidRequest(f"best_of is {self.best_of} and n is {self.n}; it cannot be less", param="best_of")
        if self.num_samples > self.n and self.stream:
            raise InvalidRequest(
                f"best_of is {self.best_of} and n is {self.n}: which are the best is known at the end, so they cannot "
                f"be streamed; leave out stream or best_of",
                param="best_of",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; leave out stream, or use echo with logprobs of /v1/completions",
                param="prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, which leaves no prompt; it must be at least 1, or -1 for as many as fit",
                param="truncate_prompt_tokens",
            )
        return self

    @property
    def question(self) -> str:
        """The last text of the user, which documents are ranked for. Raises InvalidRequest where there is none."""
        raise NotImplementedError

    def generation_fields(self) -> dict[str, Any]:
        """The fields of all endpoints that generate, as they were given."""
        given = {name: getattr(self, name) for name in GenerationRequest.model_fields if name in self.model_fields_set}
        return given | {"logit_bias": {str(token_id): bias for token_id, bias in self.logit_bias.items()}}

    @property
    def wants_stream(self) -> bool:
        return self.stream

    @property
    def num_samples(self) -> int:
        """The number of samples for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and how many of the likeliest tokens it asks for."""
        return "logprobs", None

    @property
    def asks_for_echo(self) -> bool:
        return False

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens


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


def without_user(param: str) -> InvalidRequest:
    """The error of a conversation that gives documents nothing to be about."""
    return InvalidRequest(f"documents are for a message of the user, and {param} has none; add one", param="documents")


def documents_text(documents: Sequence[str]) -> str:
    """Documents as they stand in a prompt, before the text that asks about them."""
    numbered = "".join(f"[{number}] {text}\n\n" for number, text in enumerate(documents, start=1))
    return f"Use these documents:\n\n{numbered}"


class ChatRequest(Conversation, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    prompt_param = "messages"

    tool_choice: ToolChoice[NamedTool] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: Natural | None = None
    continue_final_message: bool = False
    thinking_token_budget: TokenBudget | None = None  # tokens of reasoning, after which its end is forced
    reasoning_effort: ReasoningEffort | None = None  # the same as a part of the output's length

    @property
    def template_variables(self) -> dict[str, Any]:
        """Those of the body go before what `reasoning_effort` says."""
        effort = self.reasoning_effort
        asked = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
        return asked | self.chat_template_kwargs

    @model_validator(mode="after")
    def _choice_is_among_tools(self) -> ChatRequest:
        choice = self.tool_choice
        if not self.tools and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice needs tools; send them too", param="tool_choice")
        names = [tool.function.name for tool in self.tools]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names {choice.function.name!r}; tools has {', '.join(names)[:200]}", param="tool_choice"
            )
        return self

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true; send both or neither", param="top_logprobs")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true; the last message goes on, or a new "
                "one begins: leave one out",
                param="continue_final_message",
            )
        return self

    @property
    def question(self) -> str:
        return self.messages[self._asked_at()].content or ""

    def with_documents_written(self) -> ChatRequest:
        """The same chat with its documents in the last message of the user, before its text."""
        at, messages = self._asked_at(), list(self.messages)
        content = documents_text(self.documents) + (messages[at].content or "")
        messages[at] = messages[at].model_copy(update={"content": content})
        return self.model_copy(update={"messages": messages, "documents": []})

    def _asked_at(self) -> int:
        """The place of the last message of the user."""
        for at in reversed(range(len(self.messages))):
            if self.messages[at].role == "user":
                return at
        raise without_user(self.prompt_param)

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    @property
    def length_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Prompts = Annotated[
    ListOf[str | ListOf[int]],
    BeforeValidator(
        _prompts,
        json_schema_input_type=NonEmpty
        | TokenIds
        | Annotated[list[NonEmpty], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)],
    ),
]


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompts
    # 0: only the prompt, which is echoed or scored
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), AsInt] | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0)] | None,
        BeforeValidator(_unless_false, json_schema_input_type=TokenId | Literal[False] | None),
    ] = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens is 0, which generates nothing; it must be at least 1, or come with echo or prompt_logprobs",
                param="max_tokens",
            )
        return self

    @property
    def question(self) -> str:
        [prompt, *others] = self.prompt
        if others or not isinstance(prompt, str):
            raise InvalidRequest(
                "documents are for one prompt that is a text; send one, and not as token ids", param="prompt"
            )
        return prompt

    def with_documents_written(self) -> CompletionRequest:
        """The same request with its documents before the prompt."""
        prompt = documents_text(self.documents) + self.question
        return self.model_copy(update={"prompt": [prompt], "documents": []})

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    @property
    def asks_for_echo(self) -> bool:
        return self.echo


class EmbeddingsRequest(QueuedRequest):
    """The body of POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: NumTokens | None = None  # keep this many numbers at the start, normalised again
    add_special_tokens: bool = True


class TokenizeTextRequest(ModelRequest):
    """The body of POST /tokenize for a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Conversation, ModelRequest):
    """The body of POST /tokenize for a conversation."""

    return_token_strs: bool = False


class DetokenizeRequest(ModelRequest):
    """The body of POST /detokenize."""

    tokens: ListOf[TokenId] = Field(max_length=MAX_DETOKENIZED)

    @field_validator("tokens", mode="before")
    @classmethod
    def _integers(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_DETOKENIZED:  # before it looks at each of them
            raise ValueError(f"has {len(value):,} ids; at most {MAX_DETOKENIZED:,} are accepted")
        return as_int(value)


def from_validation_error(error: ValidationError, *, within: str | None = None) -> InvalidRequest:
    """The first mistake, as one sentence that starts with the field's name; `within` is the field around it."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _field_path(first["loc"] if within is None else (within, *first["loc"]))
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    got = "" if first["type"] == "value_error" else f"; got {_short(first['input'])}"
    return InvalidRequest(f"{param} {message[0].lower()}{message[1:]}{got}", param=param)


def _field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`, without the schema that was tried of several (`#…`)."""
    path = ""
    for part in location:
        if not str(part).startswith("#"):
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:100]


def _short(value: Any) -> str:
    if isinstance(value, str):
        value = value[:60]
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
