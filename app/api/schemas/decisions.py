"""The typed request of /v1/decisions: questions about one input, in the format of OpenAI's Decisions API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from app.api.schemas.fields import MAX_ID_LENGTH, MAX_MESSAGES, ListOf, NonEmpty, Schema, joined_text
from app.api.schemas.requests import QueuedRequest

MAX_QUESTIONS, MAX_CHOICES, MAX_LEVELS = 200, 255, 10

_REFUSING_OTHERS = ConfigDict(extra="forbid")  # an unknown field might be meant to change the answers


def _numbering(least: int, most: int) -> BeforeValidator:
    """Return a validator that refuses a list with too few or too many items before the items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and not least <= len(value) <= most:
            raise ValueError(f"has {len(value):,} items; {least} to {most} are accepted")
        return value

    return BeforeValidator(check)


class UserText(Schema):
    """A part of the user's text."""

    type: Literal["input_text"]
    text: str


TextOrParts = Annotated[
    NonEmpty,
    BeforeValidator(joined_text({"input_text": "text"}), json_schema_input_type=NonEmpty | list[UserText]),
]


class UserMessage(Schema):
    """A user message."""

    model_config = _REFUSING_OTHERS

    type: Literal["message"] = "message"
    role: Literal["user"]
    content: TextOrParts


def _input(value: Any) -> Any:
    """Join messages into one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise ValueError(f"should be a string or a list of at most {MAX_MESSAGES:,} user messages")
    messages = [UserMessage.checked(each, within=f"input[{number}]") for number, each in enumerate(value)]
    return "\n\n".join([message.content for message in messages])


class Question(Schema):
    """The fields that all kinds of questions share."""

    model_config = _REFUSING_OTHERS

    instructions: TextOrParts
    name: str | None = Field(None, max_length=MAX_ID_LENGTH)


class Predicate(Question):
    """Whether a statement about the input is true."""

    type: Literal["predicate"]


def _value(value: Any) -> Any:
    if not isinstance(value, str | bool) or value == "":
        raise ValueError("should be a boolean or a string that is not empty")
    return value


class Option(Schema):
    """A value that may be chosen."""

    model_config = _REFUSING_OTHERS

    value: Annotated[str | bool, BeforeValidator(_value, json_schema_input_type=NonEmpty | bool)]
    description: str | None = None


def _differ(choices: list[Option]) -> list[Option]:
    """Raise ValueError if two options have the same value. `true` and "true" are different values."""
    places: dict[tuple[type, str | bool], int] = {}
    for place, choice in enumerate(choices):
        first = places.setdefault((type(choice.value), choice.value), place)
        if first != place:
            raise ValueError(f"has the value {str(choice.value)[:60]!r} twice, at the indexes {first} and {place}")
    return choices


class Choice(Question):
    """Which of several values fits the input best."""

    type: Literal["choice"]
    choices: Annotated[
        ListOf[Option],
        Field(min_length=2, max_length=MAX_CHOICES),
        _numbering(2, MAX_CHOICES),
        AfterValidator(_differ),
    ]


class ScoreLevel(Schema):
    """A level of a scale."""

    model_config = _REFUSING_OTHERS

    label: NonEmpty
    description: str | None = None


class Score(Question):
    """Which level of a scale fits the input best. The levels start with the lowest."""

    type: Literal["score"]
    levels: Annotated[ListOf[ScoreLevel], Field(min_length=2, max_length=MAX_LEVELS), _numbering(2, MAX_LEVELS)]


def _has_kind(question: Any) -> Any:
    if not isinstance(question, dict) or question.get("type") not in ("predicate", "choice", "score"):
        raise ValueError('should be an object whose type is "predicate", "choice" or "score"')
    return question


AnyQuestion = Annotated[
    Annotated[Predicate, Tag("#predicate")] | Annotated[Choice, Tag("#choice")] | Annotated[Score, Tag("#score")],
    Discriminator(lambda question: f"#{question['type'] if isinstance(question, dict) else question.type}"),
    BeforeValidator(_has_kind),
]


class DecisionsRequest(QueuedRequest):
    """The body of POST /v1/decisions."""

    model_config = _REFUSING_OTHERS

    input: Annotated[NonEmpty, BeforeValidator(_input, json_schema_input_type=NonEmpty | list[UserMessage])]
    questions: Annotated[
        ListOf[AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS), _numbering(1, MAX_QUESTIONS)
    ]
    safety_identifier: str | None = Field(None, max_length=128)  # this field and the next have no effect
    prompt_cache_key: str | None = Field(None, max_length=MAX_ID_LENGTH)

    def encoded_size(self, size: int) -> int:
        """Return the number of characters to encode. The input is a part of every prompt."""
        return size + len(self.input) * len(self.questions)
