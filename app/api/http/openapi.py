"""The document at /openapi.json: endpoints from their table, bodies from typed requests, limits from settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from app.api.endpoints.adapters import AdapterToLoad
from app.api.endpoints.batches import MAX_BATCHES_OF_PAGE, BatchRequest
from app.api.endpoints.files import MAX_FILES_OF_PAGE
from app.api.endpoints.prompt_list import PromptListRequest
from app.api.endpoints.scheduler import CHOICES
from app.api.endpoints.table import ENDPOINTS
from app.api.http.errors import MESSAGES_PATH, is_anthropic
from app.api.prepared_request import RequestLimits
from app.api.schemas.messages import CountTokensRequest
from app.api.schemas.parameters import unavailable
from app.api.schemas.requests import (
    DetokenizeRequest,
    GenerationRequest,
    ModelRequest,
    Schema,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.config import ApiConfig
from app.jobs import JobState
from app.versions import versions

Json = dict[str, Any]

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
_OF_AN_UPLOAD = (*_OF_A_LIST, "413")

_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", dict: "object"}
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def openapi_document(
    config: ApiConfig, limits: RequestLimits, *, needs_key: bool = False, has_batches: bool = False
) -> Json:
    """The whole description, as OpenAPI 3.1; `has_batches`: files and batches are served too."""
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Carousel", "version": versions()["carousel"] or "unknown"},
        "paths": _computed_paths() | _paths(config) | (_batch_paths() if has_batches else {}),
        "components": {"schemas": _schemas(limits, has_batches=has_batches), "securitySchemes": schemes},
        "security": [{"key": []}] if needs_key else [],
    }


def _computed_paths() -> Json:
    """Those of the table of endpoints."""
    events = {"text/event-stream": {"schema": _object(data=str)}}  # of each event
    return {
        path: {
            "post": _operation(
                endpoint.summary,
                endpoint.response,
                _OF_GENERATION,
                body=_body(endpoint.schema),
                content=events if issubclass(endpoint.schema, GenerationRequest) else {},
                error="AnthropicError" if is_anthropic(endpoint.path) else "Error",
            )
        }
        for endpoint in ENDPOINTS.values()
        for path in (endpoint.path, *endpoint.aliases)
    }


def _paths(config: ApiConfig) -> Json:
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": _TEXT, "description": "may have slashes"}
    model = {"name": "model", "in": "query", "schema": _TEXT, "description": "required where there are several"}
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": _TEXT}
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    after = {"name": "after", "in": "query", "schema": _TEXT, "description": "the `at` of the last event that came"}
    page, events = {"text/html": {"schema": _TEXT}}, {"text/event-stream": {"schema": _object(data=str)}}
    files = {kind: {"schema": _TEXT} for kind in ("text/html", "text/css", "text/javascript", "image/svg+xml")}
    name_of_adapter = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    tokenized, detokenized = _body(TokenizeTextRequest, TokenizeChatRequest), _body(DetokenizeRequest)
    metrics = _operation(
        "What is measured, for Prometheus",
        None,
        _OF_AN_ADMIN if config.metrics_for == "admins" else _OF_A_KEY,
        content={"text/plain": {"schema": _TEXT}},
        is_open=config.metrics_for == "public",
    )
    return {
        "/v1/models": {"get": _operation("The models", "ModelList", _OF_A_KEY)},
        "/v1/models/{model_id}": {"get": _operation("One model", "Model", _OF_A_MODEL, parameters=[model_id])},
        "/tokenize": {"post": _operation("Words to token ids", "Tokens", _OF_A_BODY, body=tokenized)},
        "/detokenize": {"post": _operation("Token ids to words", "Text", _OF_A_BODY, body=detokenized)},
        f"{MESSAGES_PATH}/count_tokens": {
            "post": _operation(
                "The number of tokens of a prompt",
                "TokenCount",
                _OF_A_BODY,
                body=_body(CountTokensRequest),
                error="AnthropicError",
            )
        },
        "/tokenizer_info": {
            "get": _operation("Special tokens, chat template", "TokenizerInfo", _OF_A_MODEL, parameters=[model])
        },
        "/v1/requests/{request_id}/cancel": {
            "post": _operation("End a request that runs", "Cancelled", (*_OF_A_KEY, "404"), parameters=[request_id])
        },
        "/version": {"get": _operation("The version of the server", "Version", _OF_A_KEY)},
        "/openapi.json": {"get": _operation("This description", "Anything", _OF_A_KEY)},
        "/health": {"get": _operation("The process lives", "Anything", (), is_open=True)},
        "/ready": {"get": _operation("A request could be served", "Anything", ("503",), is_open=True)},
        "/metrics": {"get": metrics},
        "/": {"get": _operation("The live page", None, (), content=page, is_open=True)},
        "/page/{name}": {
            "get": _operation("A file of the live page", None, ("404",), content=files, is_open=True, parameters=[name])
        },
        "/admin/live": {
            "get": _operation(
                "What all engines do now", None, (*_OF_AN_ADMIN, "400"), content=events, parameters=[after]
            )
        },
        "/admin/keys": {"get": _operation("What each API key has used", "AdminKeys", _OF_AN_ADMIN)},
        "/admin/fleet": {"get": _operation("The replicas as each process sees them", "AdminFleet", _OF_AN_ADMIN)},
        "/admin/adapters": {
            "get": _operation("The LoRA adapters, and which replicas have them", "AdapterList", _OF_AN_ADMIN),
            "post": _operation(
                "Load an adapter", "Adapter", (*_OF_A_BODY, "503"), body=_body_of(_reference("AdapterToLoad"))
            ),
        },
        "/admin/adapters/{name}": {
            "delete": _operation(
                "Serve an adapter no longer", "Anything", (*_OF_AN_ADMIN, "404"), parameters=[name_of_adapter]
            )
        },
        "/admin/scheduler": {
            "get": _operation("The strategy and policy of each replica", "SchedulerList", _OF_AN_ADMIN),
            "post": _operation(
                "Switch the strategy and policy of a model's replicas",
                "Scheduler",
                (*_OF_A_BODY, "503"),
                body=_body_of(_reference("SchedulerChange")),
            ),
        },
    }


def _adapter_to_load() -> Json:
    """The body of POST /admin/adapters."""
    required = [name for name, field in AdapterToLoad.model_fields.items() if field.is_required()]
    return _object(name=str, path=str, model={"anyOf": [_TEXT, {"type": "null"}]}) | {"required": required}


def _scheduler_change() -> Json:
    """A strategy or policy is a name, or an object with a name and parameters."""
    named = {
        name: {"anyOf": [{"enum": kinds}, _object(name={"enum": kinds}), {"type": "null"}]}
        for name, kinds in (("strategy", list(CHOICES["strategies"])), ("policy", list(CHOICES["policies"])))
    }
    properties = {"model": {"anyOf": [_TEXT, {"type": "null"}]}, **named}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _batch_paths() -> Json:
    of_file, of_batch = (
        [{"name": name, "in": "path", "required": True, "schema": _TEXT}] for name in ("file_id", "batch_id")
    )
    after = {"name": "after", "in": "query", "schema": _TEXT, "description": "the id behind which the page begins"}
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
    purpose = {"name": "purpose", "in": "query", "schema": _TEXT}
    of_files = [after, _limit(MAX_FILES_OF_PAGE), order, purpose]
    of_batches = [after, _limit(MAX_BATCHES_OF_PAGE), order]
    form = _object(file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
    upload = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    lines = {"application/jsonl": {"schema": _TEXT}}
    batch, prompts = _body(BatchRequest), _body(PromptListRequest)
    return {
        "/v1/files": {
            "post": _operation("Upload a file", "File", _OF_AN_UPLOAD, body=upload),
            "get": _operation("The files", "FileList", _OF_A_LIST, parameters=of_files),
        },
        "/v1/files/{file_id}": {
            "get": _operation("One file", "File", _OF_A_LIST, parameters=of_file),
            "delete": _operation("Delete a file", "Anything", _OF_A_LIST, parameters=of_file),
        },
        "/v1/files/{file_id}/content": {
            "get": _operation("What is in a file", None, _OF_A_LIST, content=lines, parameters=of_file)
        },
        "/v1/batches": {
            "post": _operation("Begin a batch over a file", "Batch", _OF_GENERATION, body=batch),
            "get": _operation("The batches", "BatchList", _OF_A_LIST, parameters=of_batches),
        },
        "/v1/batches/{batch_id}": {"get": _operation("One batch", "Batch", _OF_A_LIST, parameters=of_batch)},
        "/v1/batches/{batch_id}/cancel": {"post": _operation("Stop a batch", "Batch", _OF_A_LIST, parameters=of_batch)},
        "/v1/batch": {
            "post": _operation(
                "Answer many prompts, at once or as a job",
                "BatchResults",
                _OF_GENERATION,
                body=prompts,
                content={"text/event-stream": {"schema": _object(data=str)}},
            )
        },
        "/v1/batch/{batch_id}": {
            "get": _operation("A batch and its results", "BatchResults", _OF_A_LIST, parameters=of_batch)
        },
        "/v1/batch/stats": {"get": _operation("What batches have to do and have done", "BatchStats", _OF_A_LIST)},
    }


def _limit(most: int) -> Json:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}


def _operation(
    summary: str,
    response: str | None,
    refusals: tuple[str, ...],
    *,
    body: Json | None = None,
    content: Json | None = None,
    parameters: Sequence[Json] = (),
    is_open: bool = False,
    error: str = "Error",
) -> Json:
    """`response` names the schema of a JSON response, `content` has other types of it, `refusals` other statuses.

    `error` names the schema of these.
    """
    as_json = {} if response is None else {"application/json": {"schema": _reference(response)}}
    errors = {"application/json": {"schema": _reference(error)}}
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "done", "content": as_json | (content or {})},
            **{status: {"description": _REFUSALS[status], "content": errors} for status in sorted(refusals)},
        },
    }
    if body is not None:
        operation["requestBody"] = body
    if parameters:
        operation["parameters"] = list(parameters)
    if is_open:
        operation["security"] = []
    return operation


def _body(*schemas: type[Schema]) -> Json:
    references = [_reference(schema.__name__) for schema in schemas]
    return _body_of(references[0] if len(references) == 1 else {"anyOf": references})


def _body_of(schema: Json) -> Json:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


@cache  # it takes 60 ms, and is the same for all applications of a process with these limits
def _schemas(limits: RequestLimits, *, has_batches: bool) -> Json:
    _, document = models_json_schema(
        [(schema, "validation") for schema in BODIES + (BATCH_BODIES if has_batches else ())],
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
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()):
            options = field.pop("anyOf", None) or [{key: field.pop(key) for key in list(field) if key not in _NOTES}]
            field["anyOf"] = [*(option for option in options if option != {"type": "null"}), {"type": "null"}]


def _leave_out(properties: Json, unavailable: Mapping[str, tuple[Any, ...]]) -> None:
    """Fields that a schema shares with others but that its endpoint takes only where they ask for nothing."""
    for name in properties.keys() & unavailable.keys():
        harmless = list(unavailable[name])
        properties[name]["anyOf"] = [*([{"enum": harmless}] if harmless else []), {"type": "null"}]


_NOTES = ("title", "default", "description")


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
        "AdapterToLoad": _adapter_to_load(),
        "AdapterList": _page(_reference("Adapter"), missing=int),
        "AdminFleet": _page(_object(process=str, model=str)),
        "Scheduler": scheduler,
        "SchedulerChange": _scheduler_change(),
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
