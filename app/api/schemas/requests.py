"""The typed requests, which check types and ranges that do not depend on a model or a configured limit.

`null` always means "not given". `parameters.py` lists the fields that are not supported. `openapi.py` publishes these
classes as JSON schemas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from app.api.schemas.conversation import Conversation, Messages, ToolChoiceObject
from app.api.schemas.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_DETOKENIZED,
    MAX_ID_LENGTH,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_MARKER_LENGTH,
    MAX_STRUCTURES,
    MAX_TOKENS,
    MAX_TRIGGER_LENGTH,
    MAX_TRIGGERS,
    AsInt,
    Documents,
    JoinedText,
    KeptTokens,
    LengthOfChat,
    ListOf,
    Natural,
    NonEmpty,
    NumSamples,
    NumTokens,
    OrOff,
    ReasoningEffort,
    Schema,
    TemplateVariables,
    Texts,
    TokenBudget,
    TokenId,
    TokenIds,
    ToolChoice,
    _bias,
    _prompts,
    _texts,
    _unless_false,
    as_int,
)
from app.engine.request import MAX_DEADLINE_S, MAX_PRIORITY, MAX_TENANT_LENGTH, MIN_REPETITION_PENALTY
from app.errors import InvalidRequest

ChatT = TypeVar("ChatT", bound="ChatRequest")


class StreamOptions(Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OutputSchema(Schema):
    """`response_format.json_schema`, as in OpenAI's API."""

    name: str = Field("", max_length=MAX_ID_LENGTH)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Structure(Schema):
    """A document that matches a schema, between a begin text and an end text."""

    begin: str = Field(min_length=1, max_length=MAX_MARKER_LENGTH)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    end: str = Field("", max_length=MAX_MARKER_LENGTH)


Structures = Annotated[ListOf[Structure], Field(min_length=1, max_length=MAX_STRUCTURES)]
Triggers = Annotated[
    ListOf[Annotated[str, Field(min_length=1, max_length=MAX_TRIGGER_LENGTH)]],
    Field(min_length=1, max_length=MAX_TRIGGERS),
]


class StructuralTag(Schema):
    """vLLM's structural tag: free text in which each trigger starts one of the structures."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Structures
    triggers: Triggers


def _describe_false(described: dict[str, Any]) -> None:
    """Add `false`, which means "not given", to the schema of each optional field of an object."""
    for name, field in described["properties"].items():
        if name in described.get("required", ()):
            continue
        if "anyOf" not in field:
            field["anyOf"] = [{key: field.pop(key) for key in [*field] if key not in ("title", "default")}]
        field["anyOf"].append({"type": "boolean", "const": False})


class OutputFormatBase(Schema):
    """Base of the objects that define the form of the output, which refuse unknown fields."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_describe_false)

    @model_validator(mode="before")
    @classmethod
    def _false_is_not_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and False in value.values():
            return {name: item for name, item in value.items() if item is not False}
        return value


class ResponseFormat(OutputFormatBase):
    """The form of the output, in OpenAI's format, with vLLM's structural tags and with llama.cpp's `schema`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: OutputSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # for both JSON types, as in llama.cpp
    structures: Structures | None = None  # this field and the next define a structural tag
    triggers: Triggers | None = None


class StructuredOutputs(OutputFormatBase):
    """The form of the output in vLLM's format. Send exactly one of these fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: NonEmpty | None = None
    choice: Annotated[ListOf[NonEmpty], Field(min_length=1, max_length=4096)] | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | NonEmpty | None = None  # a StructuralTag, as an object or as JSON in a string


class ModelRequest(Schema):
    """A request to a model."""

    model: str | None = None

    @property
    def ignored_names(self) -> Iterable[str]:
        """The names of known fields and values in the body that have no effect on any model here."""
        return ()


class QueuedRequest(ModelRequest):
    """The fields of all requests that run on replicas: tenant, priority and deadline."""

    cache_salt: str = Field("", max_length=MAX_ID_LENGTH)
    user: str = Field("", max_length=MAX_TENANT_LENGTH)  # the tenant under the policy `fair`
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), AsInt] = 0  # lower values run first
    service_tier: str = Field("auto", max_length=MAX_ID_LENGTH)  # "flex" means background work, as in OpenAI's API
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)  # seconds from the arrival of the request
    request_id: str | None = Field(None, max_length=MAX_ID_LENGTH, pattern=r"^[\x21-\x7e]+$")

    def encoded_size(self, size: int) -> int:
        """Return the number of characters to encode. `size` is the size of the body."""
        return size

    @property
    def length_param(self) -> str:
        """The name of the field that limits the number of generated tokens."""
        return "max_tokens"

    @property
    def asked_tokens(self) -> int | None:
        """The output length that the body requests, if any."""
        return None


class GenerationRequest(QueuedRequest):
    """The fields of all endpoints that generate text."""

    # The names of fields in error messages.
    prompt_param: ClassVar[str] = "prompt"
    format_param: ClassVar[str] = "response_format"
    stop_param: ClassVar[str] = "stop"
    budget_param: ClassVar[str] = "thinking_token_budget"
    effort_param: ClassVar[str] = "reasoning_effort"

    # A field with the name of a `SamplingParams` field sets that field (see `shared_fields`).
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)  # 0 allows only the likeliest token
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AsInt, OrOff] = 0
    min_p: float = Field(0.0, ge=0, le=1)
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000), OrOff] = 0.0
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=10)
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
    best_of: Natural | None = None  # the number of samples, or 0 for `n`; the response contains the `n` likeliest
    max_tokens: NumTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), AsInt] = 0
    stop: Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=NonEmpty | list[NonEmpty])] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[ListOf[int], Field(max_length=128), AsInt] = Field(default_factory=list)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Parts of `structured_outputs` under their names in SGLang and llama.cpp. An empty string means "not given".
    regex: str = ""
    ebnf: str = ""
    grammar: str = ""
    json_schema: dict[str, Any] | str = ""
    allowed_token_ids: Annotated[ListOf[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS), AsInt] = Field(
        default_factory=list
    )
    bad_words: ListOf[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name for `include_stop_str_in_output`
    truncate_prompt_tokens: KeptTokens = None  # the number of tokens to keep, or -1 for all tokens that fit
    truncation_side: Literal["left", "right"] = "left"  # the side that `truncate_prompt_tokens` cuts off
    prompt_logprobs: Natural | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    documents: Documents = Field(default_factory=list)  # texts for the prompt, which a pipeline may rank first
    store: bool = False  # store the response, if the service stores responses

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options requires `stream: true`; send both or neither", param="stream_options")
        num_samples = self.num_samples
        if num_samples < self.n:
            raise InvalidRequest(
                f"best_of is {self.best_of}, which is less than `n`, {self.n}; raise it", param="best_of"
            )
        if num_samples > self.n and self.stream:
            raise InvalidRequest(
                f"best_of is {self.best_of} and `n` is {self.n}: the best choices are only known at the end, so they "
                f"cannot be streamed; leave out `stream` or best_of",
                param="best_of",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; leave out `stream`, or send `echo` and `logprobs` to "
                "/v1/completions",
                param="prompt_logprobs",
            )
        return self

    @property
    def question(self) -> str:
        """The user's last text, used to rank documents. Raises InvalidRequest if there is none."""
        raise NotImplementedError

    def chat(self, kind: type[ChatT], own: Mapping[str, Any], *, within: str | None = None) -> ChatT:
        """Return a chat with the shared fields, which were already checked, and with `own`, which is checked here.

        Raises InvalidRequest. `within` is the enclosing field in the error.
        """
        shared = GenerationRequest.model_fields.keys()
        names = [name for name in self.model_fields_set if name in shared and name not in own]
        return kind.checked(own, within=within).model_copy(update={name: getattr(self, name) for name in names})

    @property
    def num_samples(self) -> int:
        """The number of samples for each prompt."""
        return self.best_of or self.n

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The name of the field that asks for log-probabilities, and the number of likeliest tokens to return."""
        return "logprobs", None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens


def without_user(param: str) -> InvalidRequest:
    """Return the error for documents in a conversation without a user message."""
    return InvalidRequest(
        f"`documents` requires a user message, but `{param}` contains none; add one", param="documents"
    )


def documents_text(documents: Sequence[str]) -> str:
    """Return documents as text for a prompt. The user's question follows this text."""
    numbered = "".join(f"[{number}] {text}\n\n" for number, text in enumerate(documents, start=1))
    return f"Use these documents:\n\n{numbered}"


class PredictedOutput(Schema):
    """OpenAI's predicted output: a text that is probably similar to the output, such as a file to edit."""

    type: Literal["content"]
    content: JoinedText


class ChatRequest(Conversation, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    prompt_param = "messages"

    tool_choice: ToolChoice[ToolChoiceObject] = "auto"
    parallel_tool_calls: bool = True
    max_tokens: LengthOfChat = None
    max_completion_tokens: LengthOfChat = None
    logprobs: bool = False
    top_logprobs: Natural | None = None
    continue_final_message: bool = False
    prediction: PredictedOutput | None = None
    thinking_token_budget: TokenBudget | None = None  # the end of reasoning is forced after this number of tokens
    reasoning_effort: ReasoningEffort | None = None  # a budget as a fraction of the maximum output length

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> ChatRequest:
        choice = self.tool_choice
        if not self.tools and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice requires `tools`; send both", param="tool_choice")
        kinds = {tool.definition.name: tool.type for tool in self.tools}
        if any(kinds[tool.definition.name] != tool.type for tool in self.tools):
            raise InvalidRequest(
                "`tools` contains a function and a custom tool with the same name; rename one", param="tools"
            )
        for named in () if isinstance(choice, str) else choice.named:
            names = [tool.definition.name for tool in self.tools if tool.type == named.type]
            if named.name not in names:
                raise InvalidRequest(
                    f"tool_choice names the {named.type} {named.name!r}, which is not in `tools` (tools of that type: "
                    f"{', '.join(names)[:200] or 'none'})",
                    param="tool_choice",
                )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs requires `logprobs: true`; send both or neither", param="top_logprobs")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true, but the output either continues the "
                "last message or starts a new one; leave one out",
                param="continue_final_message",
            )
        return self

    @property
    def question(self) -> str:
        return self.messages[self._asked_at()].content or ""

    def with_documents_written(self) -> ChatRequest:
        """Return this chat with its documents written into the last user message, before the message's text."""
        at, messages = self._asked_at(), list(self.messages)
        content = documents_text(self.documents) + (messages[at].content or "")
        messages[at] = messages[at].model_copy(update={"content": content})
        return self.model_copy(update={"messages": messages, "documents": []})

    def _asked_at(self) -> int:
        """Return the index of the last user message. Raises InvalidRequest."""
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
    # 0 generates nothing: the prompt is only echoed or scored.
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
                "max_tokens is 0, which generates nothing; send at least 1, or send `echo` or prompt_logprobs",
                param="max_tokens",
            )
        return self

    @property
    def question(self) -> str:
        [prompt, *others] = self.prompt
        if others or not isinstance(prompt, str):
            raise InvalidRequest(
                "`documents` requires a single prompt that is a text, not token ids; send one text", param="prompt"
            )
        return prompt

    def with_documents_written(self) -> CompletionRequest:
        """Return this request with its documents written into the prompt, before the text."""
        prompt = documents_text(self.documents) + self.question
        return self.model_copy(update={"prompt": [prompt], "documents": []})

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs


class ReadoutRequest(QueuedRequest):
    """The fields of the endpoints that compute vectors or scores of texts."""

    # The number of tokens to keep per text, including tokens that the tokenizer adds, or -1 for the model's context.
    truncate_prompt_tokens: KeptTokens = None
    use_activation: bool = True  # false returns the values before the activation function, as in vLLM
    activation: bool = True  # an older name for `use_activation`

    @property
    def is_activated(self) -> bool:
        """Whether to normalise vectors and to apply the model's activation function to scores."""
        return self.use_activation and self.activation


class TextsRequest(ReadoutRequest):
    """The fields of the endpoints that compute vectors or scores of single texts."""

    truncation_side: Literal["left", "right"] = "right"  # the side that `truncate_prompt_tokens` cuts off
    add_special_tokens: bool = True


class EmbeddingsRequest(TextsRequest):
    """The body of POST /v1/embeddings: texts, or a conversation that becomes one vector."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["input"]}, {"required": ["messages"]}]})

    input: Prompts | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: NumTokens | None = None  # shorten vectors to their first values and normalise them again
    normalize: bool = True  # another name for `use_activation`

    @model_validator(mode="after")
    def _has_one_input(self) -> EmbeddingsRequest:
        if self.input is None and self.messages is None:
            raise InvalidRequest("input is required", param="input")
        if self.input is not None and self.messages is not None:
            raise InvalidRequest("`input` and `messages` are both given; send only one of them", param="messages")
        return self

    @property
    def is_activated(self) -> bool:
        return super().is_activated and self.normalize

    def as_chat(self) -> ChatRequest:
        """Return the chat whose prompt becomes the vector. Raises InvalidRequest."""
        shared = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        given = {name: getattr(self, name) for name in shared}
        if "add_special_tokens" in self.model_fields_set:  # by default, the chat template adds them
            given["add_special_tokens"] = self.add_special_tokens
        return ChatRequest.checked(given)


class ClassifyRequest(TextsRequest):
    """The body of POST /v1/classify."""

    input: Texts


class TokenizeTextRequest(ModelRequest):
    """The body of POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatRequest):
    """The body of POST /tokenize with a conversation: the body of a chat whose prompt is tokenized."""

    return_token_strs: bool = False


class DetokenizeRequest(ModelRequest):
    """The body of POST /detokenize."""

    tokens: ListOf[TokenId] = Field(max_length=MAX_DETOKENIZED)

    @field_validator("tokens", mode="before")
    @classmethod
    def _integers(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_DETOKENIZED:  # checked before the ids
            raise ValueError(f"has {len(value):,} ids; at most {MAX_DETOKENIZED:,} are accepted")
        return as_int(value)
