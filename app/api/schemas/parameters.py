"""Fields that are not in the schemas (unsupported, without effect, or unknown), and the list of ignored fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic import Discriminator, Tag, ValidationError

from app.api.schemas.fields import Schema, as_int, from_validation_error
from app.api.schemas.messages import MessagesRequest
from app.api.schemas.ranking import RerankRequest, ScoreRequest
from app.api.schemas.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingsRequest,
    GenerationRequest,
    ModelRequest,
    ReadoutRequest,
)
from app.api.schemas.responses import ResponsesRequest
from app.errors import InvalidRequest

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=ModelRequest)


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field for a feature that this version does not support, or that has another name here."""

    harmless: tuple[Any, ...] = ()  # values besides `null` that do not request the feature
    instead: str = "leave it out"


def _send(instead: str, *harmless: Any) -> RefusedField:
    return RefusedField(harmless, f"send {instead}")


def _off(*harmless: Any) -> RefusedField:
    return RefusedField(harmless)


_IN_THE_BODY = "its fields directly in the body"
_ADAPTER = "the adapter's name as `model`"
_TEMPLATE = "chat_template_kwargs, which the chat template reads"
_OUTPUT_SCHEMA = 'structured_outputs: {"json": ...}'

# Fields of vLLM, SGLang, llama.cpp, Ollama, TGI, OpenRouter and other servers that change the output. Without an error,
# clients would assume that these fields take effect. A schema may still define, and thus accept, one of these fields.
_UNAVAILABLE_EVERYWHERE: dict[str, RefusedField] = {
    # the form of the output
    "guided_json": _send(_OUTPUT_SCHEMA),
    "guided_regex": _send('structured_outputs: {"regex": ...}', ""),
    "guided_choice": _send('structured_outputs: {"choice": [...]}', []),
    "guided_grammar": _send('structured_outputs: {"grammar": ...}', ""),
    "guided_whitespace_pattern": _off(""),
    "structural_tag": _send('structured_outputs: {"structural_tag": ...}', ""),
    "format": _send(_OUTPUT_SCHEMA, ""),
    "output_format": _send(_OUTPUT_SCHEMA),
    "grammar_lazy": _off(False),
    "grammar_triggers": _off([]),
    # the end of the output
    "stop_regex": _send('`stop` with texts, or structured_outputs: {"regex": ...}', "", []),
    "max_new_tokens": _send("max_tokens"),
    "n_predict": _send("max_tokens"),
    "num_predict": _send("max_tokens"),
    "min_new_tokens": _send("min_tokens", 0),
    "repetition_detection": _off({}),
    "t_max_predict_ms": _off(0, -1),
    # how tokens are sampled
    "logits_processors": _off([]),
    "custom_logit_processor": _off("", []),
    "custom_params": _off({}),
    "vllm_xargs": _off({}),
    "use_beam_search": _off(False),
    "num_beams": _off(1),
    "length_penalty": _off(1),
    "early_stopping": _off(False),
    "do_sample": _send("temperature: 0", True),
    "sampling_seed": _send("seed"),
    "random_seed": _send("seed"),
    "repeat_penalty": _send("repetition_penalty", 1),
    "samplers": _off([]),
    "mirostat": _off(0),
    "typical_p": _off(1),
    "tfs_z": _off(1),
    "top_a": _off(0),
    "min_keep": _off(0),
    "dynatemp_range": _off(0),
    "dry_multiplier": _off(0),
    "xtc_probability": _off(0),
    "n_indent": _off(0),
    "watermark": _off(False),
    "watermarking": _off(False),
    # objects that contain sampling fields
    "options": _send(_IN_THE_BODY, {}),
    "parameters": _send(_IN_THE_BODY, {}),
    "sampling_params": _send(_IN_THE_BODY, {}),
    "extra_body": _send(_IN_THE_BODY, {}),
    # reasoning
    "enable_thinking": _send('chat_template_kwargs: {"enable_thinking": ...}'),
    "think": _send('reasoning_effort, or chat_template_kwargs: {"enable_thinking": ...}'),
    "thinking": _send('thinking_token_budget, or chat_template_kwargs: {"enable_thinking": ...}', {}),
    "thinking_budget": _send("thinking_token_budget"),
    "thinking_budget_tokens": _send("thinking_token_budget", -1),
    "reasoning": _send("reasoning_effort or thinking_token_budget", {}),
    # the prompt
    "chat_template": _off(""),
    "template": _off(""),
    "raw": _send("`prompt` to /v1/completions", False),
    "system": _send("a message with the role 'system'", ""),
    "context": _off([]),
    "images": _off([]),
    "input_ids": _send("them as `prompt` to /v1/completions", []),
    "session_params": _off({}),
    "tool_prompt": _send(_TEMPLATE, ""),
    "guideline": _send(_TEMPLATE, ""),
    "truncate": _send("truncate_prompt_tokens"),
    "plugins": _off([]),
    "preset": _off(""),
    "moderation": _off(),
    # the model, the number of choices
    "lora_path": _send(_ADAPTER, "", []),
    "lora": _send(_ADAPTER, []),
    "adapter_id": _send(_ADAPTER, ""),
    "n_cmpl": _send("`n`", 1),
}
_UNAVAILABLE: dict[type[ModelRequest], dict[str, RefusedField]] = {
    ChatRequest: {
        "functions": _send("`tools`", []),
        "function_call": _send("tool_choice", "none", "auto"),
        "modalities": _off(["text"], []),
        "audio": _off({}),
        "web_search_options": _off(),
        "echo": _off(False),
    },
    CompletionRequest: {
        "suffix": _send("a prompt with the model's own fill-in-the-middle tokens", ""),
        "prompt_embeds": _off([]),
        "raw": _off(True, False),
        "max_completion_tokens": _send("max_tokens"),
        "thinking_token_budget": _send("a chat to /v1/chat/completions"),
        "reasoning_effort": _send("a chat to /v1/chat/completions"),
    },
    ResponsesRequest: {
        "prompt_logprobs": _off(),
        "return_token_ids": _off(False),
        "return_tokens_as_token_ids": _off(False),
        "conversation": _off(),
        "prompt": _off(),
        "n": _off(1),
        "best_of": _off(1),
        "max_tokens": _send("max_output_tokens"),
        "max_completion_tokens": _send("max_output_tokens"),
        "response_format": _send("text.format"),
        "reasoning_effort": _send("reasoning.effort"),
    },
    MessagesRequest: {
        "prompt_logprobs": _off(),
        "return_token_ids": _off(False),
        "return_tokens_as_token_ids": _off(False),
        "n": _off(1),
        "best_of": _off(1),
        "stop": _send("stop_sequences", []),
        "stream_options": _off(),
        "response_format": _send("output_config.format"),
        "output_format": _send("output_config.format"),
        "max_completion_tokens": _send("max_tokens"),
        "reasoning_effort": _send("`thinking`"),
    },
    EmbeddingsRequest: {
        "embd_normalize": _send("`normalize`", 2),
        "embedding_type": _send("encoding_format", "float"),
        "embedding_types": _send("encoding_format", ["float"]),
        "output_dimension": _send("`dimensions`"),
        "output_dtype": _off("float"),
        "embed_dtype": _off("float32"),
        "endianness": _off("native", "little"),
        "late_chunking": _off(False),
        "return_multivector": _off(False),
    },
    ClassifyRequest: {"messages": _send("`input`", [])},
    RerankRequest: {
        "rank_fields": _off(["text"]),
        "max_chunks_per_doc": _send("max_tokens_per_doc"),
        "overlap_tokens": _off(),
        "texts": _send("`documents`", []),
        "top_k": _send("top_n"),
        "return_text": _send("return_documents", False),
        "truncation_side": _off("right"),
        "truncation_direction": _off("right", "Right"),
    },
    ScoreRequest: {"truncation_side": _off("right")},
}
_IN_THE_TEXTS = "the prefix that the model expects in front of the text, as a part of the text"
_CUT = "truncate_prompt_tokens, with -1 for all tokens that fit"
# Fields of vLLM, TEI, llama.cpp, Jina, Cohere and Voyage that change vectors or scores.
_UNAVAILABLE_TO_POOLING: dict[str, RefusedField] = {
    "task": _send(_IN_THE_TEXTS),
    "input_type": _send(_IN_THE_TEXTS),
    "prompt_name": _send(_IN_THE_TEXTS),
    "prompt": _send(_IN_THE_TEXTS),
    "instruction": _send(_IN_THE_TEXTS, ""),
    "instruct": _send(_IN_THE_TEXTS, ""),
    "chat_template": _off(""),
    "pooling": _off(),
    "pooling_type": _off(),
    "softmax": _send("use_activation", True),
    "truncate": _send(_CUT, False, "NONE"),
    "truncation": _send(_CUT, False),
    "lora": _send(_ADAPTER, []),
    "images": _off([]),
}

# These fields do not change outputs at OpenAI, and they have no effect here.
_WITHOUT_EFFECT = frozenset(
    "metadata store safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "spaces_between_special_tokens".split()
)

MAX_REMEMBERED_NAMES = 1000
MAX_NAME_LENGTH = 100  # longer names are truncated, because a thousand names as long as a body would take gigabytes
STRICT_HEADER = "x-strict"
IGNORED_HEADER = "x-carousel-ignored"
_CONVERSATIONS = frozenset({"messages", "input", "prompt"})
_INDEX = re.compile(r"\[[0-9]+\]")
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_.$-]")


@cache
def unavailable(schema: type[ModelRequest]) -> Mapping[str, RefusedField]:
    """Return the fields of a body that this version does not support."""
    others = {GenerationRequest: _UNAVAILABLE_EVERYWHERE, ReadoutRequest: _UNAVAILABLE_TO_POOLING}
    everywhere = next((fields for kind, fields in others.items() if issubclass(schema, kind)), {})
    of_others = {name: field for name, field in everywhere.items() if name not in schema.model_fields}
    return of_others | _UNAVAILABLE.get(schema, {})


def refuse_unknown(body: Mapping[str, Any], schema: type[Schema]) -> None:
    """Raise InvalidRequest with the paths of all unknown fields, including nested fields."""
    known = unavailable(schema).keys() | _WITHOUT_EFFECT if issubclass(schema, ModelRequest) else frozenset()
    refuse_names([path for path in _unknown(body, schema) if path not in known])


def refuse_names(unknown: Sequence[str]) -> None:
    """Raise InvalidRequest that lists these unknown fields, if there are any."""
    max_named = 20
    if unknown:
        shown = ", ".join(path[:100] for path in unknown[:max_named])
        more = f" and {len(unknown) - max_named:,} more" if len(unknown) > max_named else ""
        raise InvalidRequest(
            f"there is no field {shown}{more}; leave it out, or do not send {STRICT_HEADER}", param=unknown[0][:100]
        )


def refuse_ignored(names: Sequence[str]) -> None:
    """Raise InvalidRequest for the first of these fields without effect, if there are any."""
    if names:
        name = names[0][:MAX_NAME_LENGTH]
        raise InvalidRequest(f"`{name}` has no effect here; leave it out, or do not send {STRICT_HEADER}", param=name)


def _unknown(value: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields in `value` that the schemas in the type `kind` do not define."""
    if isinstance(value, list):
        for inner in filter(_has_schema, get_args(kind)):
            for index, item in enumerate(value):
                yield from _unknown(item, inner, f"{path}[{index}]")
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Schema):
        if kind.model_config.get("extra") == "allow":
            return
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        for name, item in value.items():
            field = fields.get(name)
            inside = f"{path}.{name}" if path else name
            if field is None and item is not None:
                yield inside
            elif field is not None:
                yield from _unknown(item, field.annotation, inside)
    elif isinstance(value, dict) and (chosen := _chosen(value, kind)) is not None:
        yield from _unknown(value, chosen, path)
    elif isinstance(value, dict):  # in a union, the schema with the fewest unknown fields counts
        choices = [list(_unknown(value, inner, path)) for inner in get_args(kind) if _has_schema(inner)]
        yield from min(choices, key=len, default=())


def _chosen(value: Any, kind: Any) -> Any:
    """Return the member of a union that its discriminator chooses for a value, or None without a discriminator."""
    rules = [each.discriminator for each in getattr(kind, "__metadata__", ()) if isinstance(each, Discriminator)]
    tags = [Tag(str(rule(value))) for rule in rules if callable(rule)]
    parts = get_args(get_args(kind)[0]) if tags else ()
    return next((part for part in parts if tags[0] in get_args(part)), None)


def _has_schema(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, Schema):
        return True
    return get_origin(kind) is not dict and any(_has_schema(inner) for inner in get_args(kind))


class UnknownFields:
    """Logs the name of each unknown field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, unknown: Iterable[str], schema: type[ModelRequest]) -> None:
        """Log the unknown fields that were not logged before."""
        for name in {name[:MAX_NAME_LENGTH] for name in unknown} - self._seen:
            if len(self._seen) >= MAX_REMEMBERED_NAMES:
                return
            self._seen.add(name)
            logger.info("ignoring the unknown field %r in a %s", name, schema.__name__)


@cache
def _known(schema: type[Schema]) -> frozenset[str]:
    """Return the names of all known fields."""
    if not issubclass(schema, ModelRequest):
        return frozenset(field.alias or name for name, field in schema.model_fields.items())
    return frozenset(schema.model_fields.keys() | unavailable(schema).keys() | _WITHOUT_EFFECT)


def ignored_fields(body: Mapping[str, Any], parsed: Schema) -> tuple[str, ...]:
    """Return the names of all fields and values in a body that have no effect on any model here, without duplicates.

    The names include nested unknown fields, and values that `parsed` ignores. Long names are truncated for the header.
    Conversations are not searched, because searching a long one would take as long as the answer.
    """
    schema, max_length = type(parsed), 64
    known = _known(schema)
    names: list[str] = []
    for name, value in body.items():
        if value is not None and name not in known:
            names.append(name)
        elif isinstance(value, dict | list) and name in schema.model_fields and name not in _CONVERSATIONS:
            names += (_INDEX.sub("", path) for path in _unknown(value, schema.model_fields[name].annotation, name))
    if isinstance(parsed, ModelRequest):
        names += parsed.ignored_names
    return tuple(dict.fromkeys(name[:max_length] for name in names))


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header with the names of ignored fields and the paths of ignored keywords, or {} if there are none."""
    max_named = 20
    shown = [_NOT_OF_NAMES.sub("?", name[:MAX_NAME_LENGTH]) for name in names[:max_named]]
    return {IGNORED_HEADER: ", ".join(shown + ["..."] * (len(names) > max_named))} if shown else {}


def parse(
    body: Mapping[str, Any], schema: type[RequestT], unknown_fields: UnknownFields, *, is_strict: bool = False
) -> RequestT:
    """Return the typed request. Raises InvalidRequest for the first invalid field.

    If `is_strict` is true, fields that are unknown or have no effect also raise InvalidRequest.
    """
    given = {name: value for name, value in body.items() if value is not None}
    not_served, known = unavailable(schema), _known(schema)
    for name in sorted(given.keys() & not_served.keys()):
        _refuse_unavailable(name, given[name], not_served[name])
    if is_strict:
        refuse_unknown(given, schema)
    if not given.keys() <= known:
        unknown_fields.note(given.keys() - known, schema)
    try:
        parsed = schema.model_validate(given)
    except ValidationError as error:
        raise from_validation_error(error) from None
    if is_strict:
        refuse_ignored(tuple(parsed.ignored_names))
    return parsed


def _refuse_unavailable(name: str, value: Any, field: RefusedField) -> None:
    """Raise InvalidRequest if the value of a field requests a feature that this version does not support."""
    value = as_int(value)
    if not any(type(value) is type(other) and value == other for other in field.harmless):
        raise InvalidRequest(f"`{name}` is not supported by this version; {field.instead}", param=name)
