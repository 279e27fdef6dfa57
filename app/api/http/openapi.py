"""The document at /openapi.json: endpoints from their table, bodies from typed requests, limits from settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from app.api.endpoints.adapters import AdapterToLoad
from app.api.endpoints.batches import MAX_BATCHES_OF_PAGE, BatchRequest
from app.api.endpoints.files import MAX_FILES_OF_PAGE
from app.api.endpoints.scheduler import SchedulerChange
from app.api.endpoints.short_batches import PromptListRequest
from app.api.endpoints.table import ENDPOINTS
from app.api.http.errors import MESSAGES_PATH, is_anthropic
from app.api.prepared_request import RequestLimits
from app.api.schemas.fields import Schema
from app.api.schemas.messages import CountTokensRequest
from app.api.schemas.parameters import unavailable
from app.api.schemas.requests import (
    DetokenizeRequest,
    GenerationRequest,
    ModelRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.batches import JobState
from app.config import ApiConfig
from app.json_pieces import Json
from app.versions import versions

BODIES: tuple[type[ModelRequest], ...] = (
    *(endpoint.schema for endpoint in ENDPOINTS.values()),
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    CountTokensRequest,
)
BATCH_BODIES: tuple[type[Schema], ...] = (BatchRequest, PromptListRequest)

_REFUSALS = {
    "400": "something in the request is wrong; `param` says what",
    "401": "no API key, or none that is known",
    "403": "this API key is not for that model, or no admin's",
    "404": "there is no such model, file or batch",
    "408": "the body was too slow, or the deadline has passed or cannot be met",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "429": "this API key's limit is reached, or the queues are full; try again after `Retry-After`",
    "500": "the server failed",
    "503": "no replica can serve now; try again after `Retry-After`",
}
_OF_A_KEY = ("401", "429")
_OF_AN_ADMIN = (*_OF_A_KEY, "403")
_OF_A_MODEL = (*_OF_A_KEY, "400", "403", "404")
_OF_A_BODY = (*_OF_A_MODEL, "408", "413", "415")
_OF_GENERATION = (*_OF_A_BODY, "500", "503")
_OF_A_LIST = (*_OF_A_KEY, "400", "404", "503")

_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", dict: "object"}
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def _object(**properties: type | Json) -> Json:
    """An object that has all of these properties."""
    schemas = {name: {"type": _TYPES[each]} if isinstance(each, type) else each for name, each in properties.items()}
    return {"type": "object", "properties": schemas, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _page(items: Json, **more: type | Json) -> Json:
    return _object(object={"const": "list"}, data=_list(items), **more)


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    response: str | None  # the schema of a JSON response
    refusals: tuple[str, ...]  # other statuses
    body: tuple[type[Schema], ...] = ()  # one of these
    media: tuple[str, ...] = ()  # other types of the response, each a text
    query: Json = field(default_factory=dict)  # parameters by name
    is_open: bool = False  # without a key

    def as_json(self) -> Json:
        """As OpenAPI has it."""
        as_json = {"application/json": {"schema": _reference(self.response)}} if self.response else {}
        texts = {kind: {"schema": _object(data=str) if kind == _EVENTS else _TEXT} for kind in self.media}
        error = "AnthropicError" if is_anthropic(self.path) else "Error"
        errors = {"application/json": {"schema": _reference(error)}}
        operation: Json = {
            "summary": self.summary,
            "responses": {
                "200": {"description": "done", "content": as_json | texts},
                **{status: {"description": _REFUSALS[status], "content": errors} for status in sorted(self.refusals)},
            },
        }
        if self.body:
            references = [_reference(schema.__name__) for schema in self.body]
            schema = references[0] if len(references) == 1 else {"anyOf": references}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        in_path = [{"name": name, "in": "path", "required": True} for name in re.findall(r"{(\w+)}", self.path)]
        parameters = [each | {"schema": _TEXT} for each in in_path]
        parameters += [{"name": name, "in": "query", **described} for name, described in self.query.items()]
        if parameters:
            operation["parameters"] = parameters
        if self.is_open:
            operation["security"] = []
        return operation


def openapi_document(
    config: ApiConfig, limits: RequestLimits, *, needs_key: bool = False, has_batches: bool = False
) -> Json:
    """The whole description, as OpenAPI 3.1; `has_batches`: files and batches are served too."""
    metrics = _Operation(
        "get", "/metrics", "What is measured, for Prometheus", None,
        _OF_AN_ADMIN if config.metrics_for == "admins" else _OF_A_KEY,
        media=("text/plain",), is_open=config.metrics_for == "public",
    )  # fmt: skip
    paths: dict[str, Json] = {}
    for each in (*_computed(), *_OPERATIONS, metrics, *(_BATCH_OPERATIONS if has_batches else ())):
        paths.setdefault(each.path, {})[each.method] = each.as_json()
    if has_batches:
        form = _object(file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
        upload = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
        paths["/v1/files"]["post"]["requestBody"] = upload
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Carousel", "version": versions()["carousel"] or "unknown"},
        "paths": paths,
        "components": {"schemas": _schemas(limits, has_batches=has_batches), "securitySchemes": schemes},
        "security": [{"key": []}] if needs_key else [],
    }


def _computed() -> Iterator[_Operation]:
    """Those of the table of endpoints."""
    for each in ENDPOINTS.values():
        media = (_EVENTS,) if issubclass(each.schema, GenerationRequest) else ()
        for path in (each.path, *each.aliases):
            yield _Operation("post", path, each.summary, each.response, _OF_GENERATION, (each.schema,), media)


_EVENTS = "text/event-stream"
_MODEL = {"model": {"schema": _TEXT, "description": "required where there are several"}}
_OPERATIONS = (
    _Operation("get", "/v1/models", "The models", "ModelList", _OF_A_KEY),
    _Operation("get", "/v1/models/{model_id}", "One model", "Model", _OF_A_MODEL),
    _Operation(
        "post", "/tokenize", "Words to token ids", "Tokens", _OF_A_BODY, (TokenizeTextRequest, TokenizeChatRequest)
    ),
    _Operation("post", "/detokenize", "Token ids to words", "Text", _OF_A_BODY, (DetokenizeRequest,)),
    _Operation(
        "post", f"{MESSAGES_PATH}/count_tokens", "The number of tokens of a prompt", "TokenCount", _OF_A_BODY,
        (CountTokensRequest,),
    ),
    _Operation("get", "/tokenizer_info", "Special tokens, chat template", "TokenizerInfo", _OF_A_MODEL, query=_MODEL),
    _Operation(
        "post", "/v1/requests/{request_id}/cancel", "End a request that runs", "Cancelled", (*_OF_A_KEY, "404")
    ),
    _Operation("get", "/version", "The version of the server", "Version", _OF_A_KEY),
    _Operation("get", "/openapi.json", "This description", "Anything", _OF_A_KEY),
    _Operation("get", "/health", "The process lives", "Anything", (), is_open=True),
    _Operation("get", "/ready", "A request could be served", "Anything", ("503",), is_open=True),
    _Operation("get", "/", "The live page", None, (), media=("text/html",), is_open=True),
    _Operation(
        "get", "/page/{name}", "A file of the live page", None, ("404",),
        media=("text/html", "text/css", "text/javascript", "image/svg+xml"), is_open=True,
    ),
    _Operation(
        "get", "/admin/live", "What all engines do now", None, (*_OF_AN_ADMIN, "400"), media=(_EVENTS,),
        query={"after": {"schema": _TEXT, "description": "the `at` of the last event that came"}},
    ),
    _Operation("get", "/admin/keys", "What each API key has used", "AdminKeys", _OF_AN_ADMIN),
    _Operation("get", "/admin/fleet", "The replicas as each process sees them", "AdminFleet", _OF_AN_ADMIN),
    _Operation("get", "/admin/adapters", "The LoRA adapters, and which replicas have them", "AdapterList",
        _OF_AN_ADMIN,),
    _Operation("post", "/admin/adapters", "Load an adapter", "Adapter", (*_OF_A_BODY, "503"), (AdapterToLoad,)),
    _Operation(
        "delete", "/admin/adapters/{name}", "Serve an adapter no longer", "Anything", (*_OF_AN_ADMIN, "404")
    ),
    _Operation(
        "get", "/admin/scheduler", "The strategy and policy of each replica", "SchedulerList", _OF_AN_ADMIN
    ),
    _Operation(
        "post", "/admin/scheduler", "Switch the strategy and policy of a model's replicas", "Scheduler",
        (*_OF_A_BODY, "503"), (SchedulerChange,),
    ),
)  # fmt: skip


def _page_of(most: int) -> Json:
    """The parameters of a list."""
    return {
        "after": {"schema": _TEXT, "description": "the id behind which the page begins"},
        "limit": {"schema": {"type": "integer", "minimum": 1, "maximum": most}},
        "order": {"schema": {"enum": ["asc", "desc"]}},
    }


_BATCH_OPERATIONS = (
    _Operation("post", "/v1/files", "Upload a file", "File", (*_OF_A_LIST, "413")),
    _Operation(
        "get", "/v1/files", "The files", "FileList", _OF_A_LIST,
        query=_page_of(MAX_FILES_OF_PAGE) | {"purpose": {"schema": _TEXT}},
    ),
    _Operation("get", "/v1/files/{file_id}", "One file", "File", _OF_A_LIST),
    _Operation("delete", "/v1/files/{file_id}", "Delete a file", "Anything", _OF_A_LIST),
    _Operation(
        "get", "/v1/files/{file_id}/content", "What is in a file", None, _OF_A_LIST, media=("application/jsonl",)
    ),
    _Operation("post", "/v1/batches", "Begin a batch over a file", "Batch", _OF_GENERATION, (BatchRequest,)),
    _Operation("get", "/v1/batches", "The batches", "BatchList", _OF_A_LIST, query=_page_of(MAX_BATCHES_OF_PAGE)),
    _Operation("get", "/v1/batches/{batch_id}", "One batch", "Batch", _OF_A_LIST),
    _Operation("post", "/v1/batches/{batch_id}/cancel", "Stop a batch", "Batch", _OF_A_LIST),
    _Operation(
        "post", "/v1/batch", "Answer many prompts, at once or as a job", "BatchResults", _OF_GENERATION,
        (PromptListRequest,), (_EVENTS,),
    ),
    _Operation("get", "/v1/batch/{batch_id}", "A batch and its results", "BatchResults", _OF_A_LIST),
    _Operation("get", "/v1/batch/stats", "What batches have to do and have done", "BatchStats", _OF_A_LIST),
)  # fmt: skip


@cache  # it takes 60 ms, and is the same for all applications of a process with these limits
def _schemas(limits: RequestLimits, *, has_batches: bool) -> Json:
    bodies: tuple[type[Schema], ...] = (*BODIES, AdapterToLoad, SchedulerChange, *(BATCH_BODIES if has_batches else ()))
    _, document = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template="#/components/schemas/{model}",
    )
    schemas: Json = document["$defs"]
    for schema in schemas.values():
        _accept_null(schema)
    for body in BODIES:
        _leave_out(schemas[body.__name__]["properties"], unavailable(body))
        if issubclass(body, GenerationRequest):
            _publish_limits(schemas[body.__name__]["properties"], limits)
    return schemas | _answers() | (_batch_answers() if has_batches else {})


def _accept_null(schema: Json) -> None:
    """`null` is "not given" wherever a field may be left out."""
    notes = ("title", "default", "description")
    for name, value in schema.get("properties", {}).items():
        if name not in schema.get("required", ()):
            options = value.pop("anyOf", None) or [{key: value.pop(key) for key in list(value) if key not in notes}]
            value["anyOf"] = [*(option for option in options if option != {"type": "null"}), {"type": "null"}]


def _leave_out(properties: Json, unavailable: Mapping[str, tuple[Any, ...]]) -> None:
    """Fields that a schema shares with others but that its endpoint takes only where they ask for nothing."""
    for name in properties.keys() & unavailable.keys():
        harmless = list(unavailable[name])
        properties[name]["anyOf"] = [*([{"enum": harmless}] if harmless else []), {"type": "null"}]


def _publish_limits(properties: Json, limits: RequestLimits) -> None:
    for name in ("n", "best_of"):
        _restrict(properties[name], "integer", maximum=limits.max_choices)
    for name in ("top_logprobs", "logprobs", "prompt_logprobs"):
        if name in properties:
            _restrict(properties[name], "integer", maximum=limits.max_logprobs)
    _restrict(properties["stop"], "string", maxLength=limits.max_stop_length)
    _restrict(properties["stop"], "array", maxItems=limits.max_stop_strings)


def _restrict(field: Json, kind: str, **limits: int) -> None:
    """Add limits that depend on the settings to those options of a field that are of this kind."""
    for option in field["anyOf"]:
        if option.get("type") == kind:
            option.update(limits)


def _answers() -> Json:
    """The schemas of responses, with the fields that clients may rely on."""
    usage = _object(prompt_tokens=int, completion_tokens=int, total_tokens=int)
    of_prompts = _object(prompt_tokens=int, total_tokens=int)
    reason = {"enum": ["stop", "length", "tool_calls"]}
    message = _object(role={"const": "assistant"}, content=_TEXT_OR_NULL)
    call = _object(id=str, type={"const": "function"}, function=_object(name=str, arguments=str))
    message["properties"]["tool_calls"] = _list(call)
    completion: dict[str, type | Json] = {"id": str, "created": int, "model": str, "usage": usage}
    chat_choice = _object(index=int, message=message, finish_reason=reason)
    choice = _object(index=int, text=str, finish_reason=reason)
    item = _object(id=str, type={"enum": ["reasoning", "message", "function_call"]}, status=str)
    vector = {"anyOf": [_list({"type": "number"}), _TEXT]}
    scheduler = _object(model=str, replicas=_list(_object(replica=str, strategy=dict, policy=dict)))
    adapter = _object(name=str, object={"const": "adapter"}, model=str, path=str, digest=str, loaded_on=_list(_TEXT))
    embedding = _object(object={"const": "embedding"}, index=int, embedding=vector)
    return {
        "Anything": {"type": "object"},
        "Error": _object(error=_object(message=str, type=str, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
        "ChatCompletion": _object(**completion, object={"const": "chat.completion"}, choices=_list(chat_choice)),
        "Completion": _object(**completion, object={"const": "text_completion"}, choices=_list(choice)),
        "Response": _object(
            id=str,
            object={"const": "response"},
            created_at=int,
            model=str,
            status={"enum": ["completed", "incomplete", "failed"]},
            output=_list(item),
            usage=_object(input_tokens=int, output_tokens=int, total_tokens=int),
        ),
        "Embeddings": _page(embedding, model=str, usage=of_prompts),
        "Rerank": _object(
            id=str, model=str, results=_list(_object(index=int, relevance_score=float)), meta=dict, usage=of_prompts
        ),
        "Scores": _page(_object(index=int, score=float), id=str, model=str, usage=of_prompts),
        "CreatedMessage": _object(
            id=str,
            type={"const": "message"},
            role={"const": "assistant"},
            model=str,
            content=_list(_object(type={"enum": ["thinking", "text", "tool_use"]})),
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            stop_sequence=_TEXT_OR_NULL,
            usage=_object(input_tokens=int, output_tokens=int),
        ),
        "AnthropicError": _object(type={"const": "error"}, error=_object(type=str, message=str), request_id=str),
        "TokenCount": _object(input_tokens=int),
        "Model": _object(id=str, object={"const": "model"}, created=int, created_at=str, max_model_len=int),
        "ModelList": _page(_reference("Model"), has_more={"const": False}),
        "Tokens": _object(count=int, max_model_len=int, tokens=_list({"type": "integer"})),
        "Text": _object(prompt=str),
        "TokenizerInfo": _object(tokenizer_class=str, eos_token=_TEXT_OR_NULL, chat_template=_TEXT_OR_NULL),
        "Cancelled": _object(id=str, object={"const": "request"}, status={"const": "cancelled"}),
        "Version": _object(version=_TEXT_OR_NULL),
        "AdminKeys": _page(_object(name=str, requests=int)),
        "Adapter": adapter,
        "AdapterList": _page(_reference("Adapter"), missing=int),
        "AdminFleet": _page(_object(process=str, model=str)),
        "Scheduler": scheduler,
        "SchedulerList": _page(_reference("Scheduler"), strategies=_list(_TEXT), policies=_list(_TEXT)),
    }


def _batch_answers() -> Json:
    statuses = [status.value for status in JobState]
    batch: dict[str, type | Json] = {
        "object": {"const": "batch"},
        "endpoint": str,
        "status": {"enum": statuses},
        "request_counts": _object(total=int, completed=int, failed=int),
        "usage": dict,
    }
    either: Json = {"type": ["object", "null"]}
    status_code: Json = {"type": ["integer", "null"]}
    outcome = _object(index=int, custom_id=str, status_code=status_code, response=either, error=either)
    results = {"anyOf": [_list(outcome), {"type": "null"}]}
    return {
        "File": _object(id=str, object={"const": "file"}, bytes=int, filename=str, purpose=str),
        "FileList": _page(_reference("File")),
        "Batch": _object(**batch, id=str, input_file_id=str, output_file_id=_TEXT_OR_NULL, error_file_id=_TEXT_OR_NULL),
        "BatchList": _page(_reference("Batch")),
        "BatchResults": _object(**batch, id=_TEXT_OR_NULL, progress=float, results=results),
        "BatchStats": _object(
            object={"const": "batch.stats"},
            batches=_object(**dict.fromkeys(statuses, int)),
            requests=_object(queued=int, running=int, completed=int, failed=int),
            tokens=_object(input=int, output=int),
            output_tokens_per_second=float,
        ),
    }
