"""The types of request fields, their validators, and validation errors.

No validator here depends on a model or a configured limit. If a validator accepts more values than its type, the
parameter `json_schema_input_type` or `WithJsonSchema` describes these values in the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from app.api.json_structure import is_longer
from app.config import shown
from app.errors import InvalidRequest

MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STRUCTURES, MAX_MARKER_LENGTH = 128, 1024
MAX_TRIGGERS, MAX_TRIGGER_LENGTH = 16, 128
MAX_ID_LENGTH = 256
# These limits are far above normal use. Without them, validating one body could block all other requests.
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 10_000
MAX_TOOLS = 128
MAX_TOOLS_SIZE = 524_288
MAX_DETOKENIZED = 1_000_000
MAX_METADATA, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
TOOL_CHOICES = ("none", "auto", "required")


def as_int(value: Any) -> Any:
    """Convert `1.0` to 1, even in lists: JSON does not distinguish them, and some languages write only `1.0`."""
    if type(value) is float and value.is_integer():
        return int(value)
    return [as_int(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


def _unless_false(value: Any) -> Any:
    """Convert `logprobs` of a completion. As in a chat, false means "not given"."""
    return None if value is False else as_int(value)


def _unless_unlimited(value: Any) -> Any:
    """Convert `max_tokens` of a chat. -1 requests all tokens that fit, which is the default."""
    return None if as_int(value) == -1 else value


def _some_are_kept(value: int | None) -> int | None:
    """Check `truncate_prompt_tokens`."""
    if value == 0:
        raise ValueError("is 0, which leaves no prompt; it must be at least 1, or -1 for all tokens that fit")
    return value


def _texts(value: Any) -> Any:
    """Check `stop`, and convert a string to a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("should be a string or a list of strings")
    if "" in texts:
        raise ValueError("should not contain an empty string")
    return texts


def _prompts(value: Any) -> Any:
    """Convert the four forms of `prompt` to a list of strings or lists of token ids."""
    if isinstance(value, str):
        return [value]
    value = as_int(value)
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"contains {len(value):,} prompts; at most {MAX_PROMPTS:,} are accepted")
    value = [as_int(item) if isinstance(item, list) else item for item in value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise ValueError("should contain only strings, or only token ids, or only lists of token ids")
    return value


def check_number(texts: list[Any]) -> None:
    """Raise ValueError for more than `MAX_PROMPTS` texts."""
    if len(texts) > MAX_PROMPTS:
        raise ValueError(f"contains {len(texts):,} texts; at most {MAX_PROMPTS:,} are accepted")


def _one_or_many(value: Any) -> Any:
    """Check a list of strings, and convert a string to a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string or a list of strings")
    check_number(value)
    if not all(isinstance(text, str) for text in value):
        raise ValueError("should contain only strings")
    return value


def _document_texts(value: Any) -> Any:
    """Convert strings and `{"text": ...}` to strings. The length of the list is checked before its items."""
    if not isinstance(value, list):
        raise ValueError('should be a list of strings or of objects like {"text": "..."}')
    check_number(value)
    texts = [each.get("text") if isinstance(each, dict) else each for each in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('should contain only strings or objects like {"text": "..."}')
    return texts


# Maps a word in a part's type to the content of the part. For example, `image_url` and `input_image` contain `image`.
_NO_TEXT = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}


def refuse_media(kind: str, number: int) -> None:
    """Raise ValueError if parts of type `kind` contain images, audio, videos or files, which no model here can read.

    `number` is the index of the part in its list.
    """
    for word in kind[:60].split("_"):
        if word in _NO_TEXT:
            raise ValueError(
                f"has {_NO_TEXT[word]} in the part with index {number}, of type {kind[:60]!r}; this service supports "
                "only text; leave the part out, or send its text"
            )


def joined_text(fields: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a validator that joins text parts by newlines. `fields` maps each part type to its text field."""

    def text_of(number: int, part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(fields[kind]) if isinstance(kind, str) and kind in fields else None
        if not isinstance(text, str):
            refuse_media(str(kind), number)
            example = f'{{"type": "{next(iter(fields))}", "text": "..."}}'
            raise ValueError(f"should contain only parts like {example}; other types of parts are not supported")
        return text

    def join(value: Any) -> Any:
        if isinstance(value, str) or value is None:
            return value
        if not isinstance(value, list):
            raise ValueError("should be a string or a list of text parts")
        if len(value) > MAX_PARTS:
            raise ValueError(f"has {len(value):,} parts; at most {MAX_PARTS:,} are accepted")
        return "\n".join([text_of(number, part) for number, part in enumerate(value)])

    return join


def _bias(value: Any) -> Any:
    """Check OpenAI's `logit_bias`: keys are token ids as strings, and values are clamped to ±100."""
    if not isinstance(value, dict):
        raise ValueError("should be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"has {len(value):,} entries; at most {MAX_LOGIT_BIAS_ENTRIES:,} are accepted")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"has the key {key[:40]!r}, which is not a token id")
        if type(bias) not in (int, float) or bias != bias:
            raise ValueError(f"has a bias for token {key} that is not a number")
    return {int(key): float(min(100, max(-100, bias))) for key, bias in value.items()}


def _tool_choice(value: Any) -> Any:
    """Check a value before its union does, because the union's error would list all members."""
    if isinstance(value, str) and value not in TOOL_CHOICES:
        raise ValueError(f"should be {', '.join(TOOL_CHOICES)} or an object that names a function; got {value[:40]!r}")
    if not isinstance(value, str | dict):
        raise ValueError(f"should be {', '.join(TOOL_CHOICES)} or an object that names a function")
    return value


T = TypeVar("T")


class _FirstError(FailFast):
    """A hashable FailFast, because members of unions must be hashable."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list whose validation stops at the first mistake. Building an error for each of a million items would take seconds.
ListOf = Annotated[list[T], _FirstError()]
NonEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
AsInt = BeforeValidator(as_int)
OrOff = AfterValidator(lambda value: max(0, value))  # -1 and 0 both turn a filter off
Natural = Annotated[int, Field(ge=0), AsInt]
NumSamples = Annotated[int, Field(ge=1), AsInt]
NumTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), AsInt]
KeptTokens = Annotated[
    Annotated[int, Field(ge=-1, le=MAX_TOKENS), AsInt] | None,
    AfterValidator(_some_are_kept),
    Field(json_schema_extra={"not": {"const": 0}}),
]
LengthOfChat = Annotated[
    NumTokens | None, BeforeValidator(_unless_unlimited, json_schema_input_type=NumTokens | Literal[-1] | None)
]
TokenBudget = Annotated[int, Field(ge=0, le=MAX_TOKENS), AsInt]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]  # OpenAI's names
ToolChoice = Annotated[Literal["none", "auto", "required"] | T, BeforeValidator(_tool_choice)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]


def _short_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if len(key) > MAX_KEY_LENGTH or len(value) > MAX_VALUE_LENGTH:
            raise ValueError(
                f"has the key {key[:40]!r} with {len(key):,} characters and a value with {len(value):,}; "
                f"keys may have at most {MAX_KEY_LENGTH} characters, and values at most {MAX_VALUE_LENGTH}"
            )
    return metadata


Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), AfterValidator(_short_metadata)]


class TextObject(BaseModel):
    """A document as an object, as in the APIs of Cohere (v1) and Jina."""

    text: str


Documents = Annotated[ListOf[str], BeforeValidator(_document_texts, json_schema_input_type=list[str | TextObject])]
Texts = Annotated[
    ListOf[str],
    BeforeValidator(_one_or_many, json_schema_input_type=NonEmpty | Annotated[list[str], Field(min_length=1)]),
]


def not_larger(max_size: int) -> BeforeValidator:
    """Return a validator that refuses a value if its characters plus its JSON values number more than `max_size`."""

    def check(value: Any) -> Any:
        if is_longer(value, max_size):
            raise ValueError(f"is too large: its characters and JSON values together exceed {max_size:,}")
        return value

    return BeforeValidator(check)


class TextPart(BaseModel):
    """A text as a part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A refusal as a part of an assistant message."""

    type: Literal["refusal"]
    refusal: str


JoinedText = Annotated[str, BeforeValidator(joined_text({"text": "text"}), json_schema_input_type=str | list[TextPart])]


class Schema(BaseModel):
    """Base of all bodies. Values are not coerced (`"5"` is not a number), and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value

    def uncopied(self) -> dict[str, Any]:
        """Return the fields that are not None, by their JSON names, without copying the values.

        Copying a large schema with Pydantic would hold the GIL for a long time.
        """
        fields = type(self).model_fields.items()
        return {field.alias or name: value for name, field in fields if (value := getattr(self, name)) is not None}

    @classmethod
    def checked(cls, value: Any, *, within: str | None = None) -> Self:
        """Return the typed value. Raises InvalidRequest for the first mistake. `within` is the enclosing field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise from_validation_error(error, within=within) from None


def from_validation_error(error: ValidationError, *, within: str | None = None) -> InvalidRequest:
    """Describe the first mistake in a sentence that starts with the field's name. `within` is the enclosing field."""
    first, message = _first_mistake(error)
    location = first["loc"]
    # `_field_path` could mistake this name for a member type and drop it, because the client chose it.
    if first["type"] == "extra_forbidden":
        param = ".".join(filter(None, (_field_path(location[:-1], within), str(location[-1]))))[:100]
        return InvalidRequest(f"there is no field {param}; leave it out", param=param)
    param = _field_path(location, within)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = _OBJECT.sub("an object", message.removeprefix("Value error, ").removeprefix("Input "))
    got = "" if first["type"] == "value_error" else f"; got {_short(first['input'])}"
    return InvalidRequest(f"{param} {message[0].lower()}{message[1:]}{got}", param=param)


_OBJECT = re.compile(r"a valid dictionary( or instance of \w+)?")


def _first_mistake(error: ValidationError) -> tuple[ErrorDetails, str]:
    """Return the first error and its message. Pydantic reports an error for each member type of a union."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    at = next((index for index, part in enumerate(first["loc"]) if _is_kind(part)), None)
    if at is None:
        return first, first["msg"]
    of_value = [each for each in errors if each["loc"][:at] == first["loc"][:at]]
    inside = max(of_value, key=lambda each: len(each["loc"]))
    if len(inside["loc"]) > at + 1:  # an error inside a member type is more helpful than a list of types
        return inside, inside["msg"]
    kinds = [each["msg"].removeprefix("Input should be ") for each in of_value]
    return first, f"Input should be {' or '.join(dict.fromkeys(kinds))}"


def _is_kind(part: int | str) -> bool:
    """Return whether a part of a Pydantic location is a member type of a union rather than a field or an index."""
    return isinstance(part, str) and _KIND.fullmatch(part) is not None


_KIND = re.compile(r"str|bool|int|float|constrained-str|[A-Z]\w*|.*\[.*", re.DOTALL)


def _field_path(location: tuple[int | str, ...], within: str | None = None) -> str:
    """Convert `("messages", 0, "role")` to `messages[0].role`, without the member types of unions (`#…`)."""
    path = within or ""
    for part in location:
        if not (str(part).startswith("#") or _is_kind(part)):
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:100]


def _short(value: Any) -> str:
    if isinstance(value, str):
        value = value[:60]
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    return shown(value)
