"""Fields that the schemas do not have: not supported here, without effect, or unknown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from app.api.schemas.fields import Schema, as_int, from_validation_error
from app.api.schemas.messages import MessagesRequest
from app.api.schemas.ranking import RerankRequest, ScoreRequest
from app.api.schemas.requests import ChatRequest, CompletionRequest, EmbeddingsRequest, ModelRequest
from app.api.schemas.responses import ResponsesRequest
from app.errors import InvalidRequest

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=ModelRequest)

# Fields that ask for something that this version does not do, with the values that do not ask for it, beside `null`.
_UNAVAILABLE_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
}
_UNAVAILABLE: dict[type[ModelRequest], dict[str, tuple[Any, ...]]] = {
    ChatRequest: _UNAVAILABLE_EVERYWHERE
    | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"], []),
        "audio": ({},),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "chat_template": (),
        "echo": (False,),
    },
    CompletionRequest: _UNAVAILABLE_EVERYWHERE | {"suffix": ("",), "prompt_embeds": ([],), "max_completion_tokens": ()},
    ResponsesRequest: _UNAVAILABLE_EVERYWHERE
    | {
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "n": (1,),
        "best_of": (1,),
        "context_management": ([],),
        "moderation": (),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": (),
    },
    MessagesRequest: _UNAVAILABLE_EVERYWHERE
    | {
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "n": (1,),
        "best_of": (1,),
        "stop": ([],),
        "stream_options": (),
        "response_format": (),
        "max_completion_tokens": (),
        "mcp_servers": ([],),
        "container": (),
        "context_management": (),
    },
    EmbeddingsRequest: {"truncate_prompt_tokens": (), "messages": ([],)},
    RerankRequest: {"truncate_prompt_tokens": (), "rank_fields": (["text"],), "max_chunks_per_doc": ()},
    ScoreRequest: {"truncate_prompt_tokens": ()},
}

# What to send in place of some of them.
_INSTEAD = {
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_choice": 'structured_outputs: {"choice": [...]}',
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
    "max_chunks_per_doc": "max_tokens_per_doc",
    "stop": "stop_sequences",
}

# These change no text at OpenAI, and none here.
_WITHOUT_EFFECT = frozenset(
    "metadata store safety_identifier prompt_cache_key prompt_cache_retention spaces_between_special_tokens".split()
)

MAX_REMEMBERED_NAMES = 1000
MAX_NAME_LENGTH = 100  # a longer name is cut: a thousand names as long as bodies would be gigabytes
STRICT_HEADER = "x-strict"


def unavailable(schema: type[ModelRequest]) -> Mapping[str, tuple[Any, ...]]:
    """The fields that ask for something that this version does not do, with the values that do not ask for it."""
    return _UNAVAILABLE.get(schema, {})


def refuse_unknown(body: Mapping[str, Any], schema: type[Schema]) -> None:
    """Raise InvalidRequest with the paths of all unknown fields, those inside other fields too."""
    known = unavailable(schema).keys() | _WITHOUT_EFFECT if issubclass(schema, ModelRequest) else frozenset()
    refuse_names([path for path in _unknown(body, schema) if path not in known])


def refuse_names(unknown: Sequence[str]) -> None:
    """Raise InvalidRequest with these paths of unknown fields, if there are any."""
    max_named = 20
    if unknown:
        shown = ", ".join(path[:100] for path in unknown[:max_named])
        more = f" and {len(unknown) - max_named:,} more" if len(unknown) > max_named else ""
        raise InvalidRequest(
            f"there is no field {shown}{more}; leave it out, or send no {STRICT_HEADER}", param=unknown[0][:100]
        )


def _unknown(value: Any, kind: Any, path: str = "") -> Iterator[str]:
    """The paths in `value` of what the schemas in the type `kind` do not have."""
    if isinstance(value, list):
        for inner in get_args(kind):
            for index, item in enumerate(value):
                yield from _unknown(item, inner, f"{path}[{index}]")
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Schema):
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        for name, item in value.items():
            field = fields.get(name)
            inside = f"{path}.{name}" if path else name
            if field is None:
                yield inside
            else:
                yield from _unknown(item, field.annotation, inside)
    elif isinstance(value, dict):  # of several schemas, the one with the fewest unknown fields counts
        choices = [list(_unknown(value, inner, path)) for inner in get_args(kind) if _has_schema(inner)]
        yield from min(choices, key=len, default=())


def _has_schema(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, Schema):
        return True
    return get_origin(kind) is not dict and any(_has_schema(inner) for inner in get_args(kind))


class UnknownFields:
    """Logs the name of each unknown field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, unknown: Iterable[str], schema: type[ModelRequest]) -> None:
        """Log those that were not logged before. Their values have no effect."""
        for name in {name[:MAX_NAME_LENGTH] for name in unknown} - self._seen:
            if len(self._seen) >= MAX_REMEMBERED_NAMES:
                return
            self._seen.add(name)
            logger.info("ignoring the unknown field %r of a %s", name, schema.__name__)


@cache
def _special_fields(schema: type[ModelRequest]) -> tuple[Mapping[str, tuple[Any, ...]], frozenset[str]]:
    """`unavailable`, and the names of all known fields."""
    return unavailable(schema), frozenset(schema.model_fields.keys() | unavailable(schema).keys() | _WITHOUT_EFFECT)


def parse(
    body: Mapping[str, Any], schema: type[RequestT], unknown_fields: UnknownFields, *, is_strict: bool = False
) -> RequestT:
    """The typed request. Raises InvalidRequest naming the first field at fault; `is_strict`: all unknown ones."""
    given = {name: value for name, value in body.items() if value is not None}
    not_served, known = _special_fields(schema)
    for name in not_served:
        if name in given:
            _refuse_unavailable(name, given[name], not_served[name])
    if is_strict:
        refuse_unknown(given, schema)
    if not given.keys() <= known:
        unknown_fields.note(given.keys() - known, schema)
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise from_validation_error(error) from None


def _refuse_unavailable(name: str, value: Any, harmless: tuple[Any, ...]) -> None:
    """Raise InvalidRequest when the value of a field asks for something that this version does not do."""
    value = as_int(value)
    if not any(type(value) is type(other) and value == other for other in harmless):
        instead = f"send {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
        raise InvalidRequest(f"{name} is not supported by this version; {instead}", param=name)
