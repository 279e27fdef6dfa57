"""The document at /openapi.json: bodies from the typed requests, limits from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from app.api.call import RequestLimits
from app.api.endpoints.batches import MAX_BATCHES_OF_PAGE, BatchRequest
from app.api.endpoints.files import MAX_FILES_OF_PAGE
from app.api.endpoints.prompt_list import PromptListRequest
from app.api.schemas.parameters import unavailable
from app.api.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ModelRequest,
    Schema,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.api.schemas.responses import ResponsesRequest
from app.config import ApiConfig
from app.jobs import JobState
from app.versions import versions

Json = dict[str, Any]

BODIES: tuple[type[ModelRequest], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    EmbeddingsRequest,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
BATCH_BODIES: tuple[type[Schema], ...] = (BatchRequest, PromptListRequest)

_REFUSALS = {
    "400": "something in the request is wrong; `param` says what",
    "401": "no API key, or none that is known",
    "403": "this API key is not for that model, or no admin's",
    "404": "there is no such model, file or batch",
    "408": "the body was too slow, or the deadline has passed or cannot be met",
    "413": "the body is too large",
    "429": "this API key's limit is reached, or the queues are full; try again after `Retry-After`",
    "500": "the server failed",
    "503": "no replica can serve now; try again after `Retry-After`",
}
_OF_A_KEY = ("401", "429")
_OF_AN_ADMIN = (*_OF_A_KEY, "403")
_OF_A_MODEL = (*_OF_A_KEY, "400", "403", "404")
_OF_A_BODY = (*_OF_A_MODEL, "408", "413")
_OF_GENERATION = (*_OF_A_BODY, "500", "503")
_OF_A_LIST = (*_OF_A_KEY, "400", "404", "503")
_OF_AN_UPLOAD = (*_OF_A_LIST, "413")

_TEXT, _WHOLE_NUMBER = {"type": "string"}, {"type": "integer"}
_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": _TEXT, "description": "may have slashes"}
_MODEL_QUERY = {"name": "model", "in": "query", "schema": _TEXT, "description": "required where there are several"}


def openapi_document(config: ApiConfig, limits: RequestLimits, *, has_batches: bool = False) -> Json:
    """The whole description, as OpenAPI 3.1; `has_batches`: files and batches are served too."""
    needs_key = bool(config.keys or config.keys_file)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Carousel", "version": versions()["carousel"] or "unknown"},
        "paths": _paths(config) | (_batch_paths() if has_batches else {}),
        "components": {"schemas": _schemas(limits, has_batches=has_batches), "securitySchemes": schemes},
        "security": [{"key": []}] if needs_key else [],
    }


def _paths(config: ApiConfig) -> Json:
    chat, complete = _body(ChatRequest), _body(CompletionRequest)
    events = {"text/event-stream": {"schema": _object(data=_TEXT)}}  # of each event
    open_get: Json = {"security": []}
    return {
        "/v1/chat/completions": {
            "post": _operation("Generate the next message", "ChatCompletion", _OF_GENERATION, chat, events)
        },
        "/v1/completions": {"post": _operation("Continue a text", "Completion", _OF_GENERATION, complete, events)},
        "/v1/responses": {
            "post": _operation("Generate a response", "Response", _OF_GENERATION, _body(ResponsesRequest), events)
        },
        "/v1/embeddings": {
            "post": _operation("Vectors for texts", "Embeddings", _OF_GENERATION, _body(EmbeddingsRequest))
        },
        "/v1/models": {"get": _operation("The models", "ModelList", _OF_A_KEY)},
        "/v1/models/{model_id}": {"get": _operation("One model", "Model", _OF_A_MODEL) | {"parameters": [_MODEL_ID]}},
        "/tokenize": {
            "post": _operation(
                "Words to token ids", "Tokens", _OF_A_BODY, _body(TokenizeTextRequest, TokenizeChatRequest)
            )
        },
        "/detokenize": {"post": _operation("Token ids to words", "Text", _OF_A_BODY, _body(DetokenizeRequest))},
        "/tokenizer_info": {
            "get": _operation("Special tokens, chat template", "TokenizerInfo", _OF_A_MODEL)
            | {"parameters": [_MODEL_QUERY]}
        },
        "/version": {"get": _operation("The version of the server", "Version", _OF_A_KEY)},
        "/openapi.json": {"get": _operation("This description", "Anything", _OF_A_KEY)},
        "/health": {"get": _operation("The process lives", "Anything", ()) | open_get},
        "/ready": {"get": _operation("A request could be served", "Anything", ("503",)) | open_get},
        "/metrics": {
            "get": {
                "summary": "What is measured, for Prometheus",
                "responses": {"200": {"description": "metrics", "content": {"text/plain": {"schema": _TEXT}}}}
                | _errors(_OF_AN_ADMIN if config.metrics_for == "admins" else _OF_A_KEY),
            }
            | (open_get if config.metrics_for == "public" else {})
        },
        "/admin/keys": {"get": _operation("What each API key has used", "AdminKeys", _OF_AN_ADMIN)},
        "/admin/fleet": {"get": _operation("The replicas as each process sees them", "AdminFleet", _OF_AN_ADMIN)},
    }


def _batch_paths() -> Json:
    file_id, batch_id = (
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in ("file_id", "batch_id")
    )
    of_file, of_batch = {"parameters": [file_id]}, {"parameters": [batch_id]}
    after = [
        {"name": "after", "in": "query", "schema": _TEXT, "description": "the id behind which the page begins"},
    ]
    file_page = [*after, _limit(MAX_FILES_OF_PAGE)]
    batch_page = [*after, _limit(MAX_BATCHES_OF_PAGE)]
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
    purpose = {"name": "purpose", "in": "query", "schema": _TEXT}
    form = _object(file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
    upload = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    content = {"application/jsonl": {"schema": _TEXT}}
    return {
        "/v1/files": {
            "post": _operation("Upload a file", "File", _OF_AN_UPLOAD, upload),
            "get": _operation("The files", "FileList", _OF_A_LIST) | {"parameters": [*file_page, order, purpose]},
        },
        "/v1/files/{file_id}": {
            "get": _operation("One file", "File", _OF_A_LIST) | of_file,
            "delete": _operation("Delete a file", "Anything", _OF_A_LIST) | of_file,
        },
        "/v1/files/{file_id}/content": {
            "get": {
                "summary": "What is in a file",
                "responses": {"200": {"description": "its bytes", "content": content}} | _errors(_OF_A_LIST),
            }
            | of_file
        },
        "/v1/batches": {
            "post": _operation("Begin a batch over a file", "Batch", _OF_GENERATION, _body(BatchRequest)),
            "get": _operation("The batches", "BatchList", _OF_A_LIST) | {"parameters": [*batch_page, order]},
        },
        "/v1/batches/{batch_id}": {"get": _operation("One batch", "Batch", _OF_A_LIST) | of_batch},
        "/v1/batches/{batch_id}/cancel": {"post": _operation("Stop a batch", "Batch", _OF_A_LIST) | of_batch},
        "/v1/batch": {
            "post": _operation(
                "Answer many prompts, at once or as a job", "BatchResults", _OF_GENERATION, _body(PromptListRequest)
            )
        },
        "/v1/batch/{batch_id}": {"get": _operation("A batch and its results", "BatchResults", _OF_A_LIST) | of_batch},
        "/v1/batch/stats": {"get": _operation("What batches have to do and have done", "BatchStats", _OF_A_LIST)},
    }


def _limit(most: int) -> Json:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}


def _operation(
    summary: str, answer: str, refusals: tuple[str, ...], body: Json | None = None, other_content: Json | None = None
) -> Json:
    """`answer` names the schema of a 200, `refusals` are the other statuses."""
    content = {"application/json": {"schema": _reference(answer)}} | (other_content or {})
    operation: Json = {
        "summary": summary,
        "responses": {"200": {"description": "done", "content": content}} | _errors(refusals),
    }
    return operation if body is None else operation | {"requestBody": body}


def _body(*schemas: type[Schema]) -> Json:
    references = [_reference(schema.__name__) for schema in schemas]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _errors(statuses: tuple[str, ...]) -> Json:
    content = {"application/json": {"schema": _reference("Error")}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in sorted(statuses)}


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
    for generation in (ChatRequest, CompletionRequest, ResponsesRequest):
        limited = schemas[generation.__name__]["properties"]
        for name in ("n", "best_of"):
            _restrict(limited[name], "integer", maximum=limits.max_choices)
        for name in ("top_logprobs", "logprobs", "prompt_logprobs"):
            if name in limited:
                _restrict(limited[name], "integer", maximum=limits.max_logprobs)
        _restrict(limited["stop"], "string", maxLength=limits.max_stop_length)
        _restrict(limited["stop"], "array", maxItems=limits.max_stop_strings)
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


def _restrict(field: Json, kind: str, **limits: int) -> None:
    """Add limits that depend on the settings to those options of a field that are of this kind."""
    for option in field["anyOf"]:
        if option.get("type") == kind:
            option.update(limits)


def _answers() -> Json:
    """The schemas of responses, with the fields that clients may rely on."""
    usage = _object(prompt_tokens=_WHOLE_NUMBER, completion_tokens=_WHOLE_NUMBER, total_tokens=_WHOLE_NUMBER)
    reason = {"enum": ["stop", "length", "tool_calls"]}
    or_nothing = {"type": ["string", "null"]}
    message = _object(role={"const": "assistant"}, content=or_nothing)
    function = _object(name=_TEXT, arguments=_TEXT)
    message["properties"]["tool_calls"] = _list(_object(id=_TEXT, type={"const": "function"}, function=function))
    call = {"id": _TEXT, "created": _WHOLE_NUMBER, "model": _TEXT, "usage": usage}
    chat_choice = _object(index=_WHOLE_NUMBER, message=message, finish_reason=reason)
    choice = _object(index=_WHOLE_NUMBER, text=_TEXT, finish_reason=reason)
    model = _object(id=_TEXT, object={"const": "model"}, created=_WHOLE_NUMBER, max_model_len=_WHOLE_NUMBER)
    return {
        "Anything": {"type": "object"},
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=or_nothing, code=or_nothing)),
        "ChatCompletion": _object(**call, object={"const": "chat.completion"}, choices=_list(chat_choice)),
        "Completion": _object(**call, object={"const": "text_completion"}, choices=_list(choice)),
        "Response": _object(
            id=_TEXT,
            object={"const": "response"},
            created_at=_WHOLE_NUMBER,
            model=_TEXT,
            status={"enum": ["completed", "incomplete", "failed"]},
            output=_list(_object(id=_TEXT, type={"enum": ["message", "function_call"]}, status=_TEXT)),
            usage=_object(input_tokens=_WHOLE_NUMBER, output_tokens=_WHOLE_NUMBER, total_tokens=_WHOLE_NUMBER),
        ),
        "Embeddings": _object(
            object={"const": "list"},
            data=_list(
                _object(
                    object={"const": "embedding"},
                    index=_WHOLE_NUMBER,
                    embedding={"anyOf": [_list({"type": "number"}), _TEXT]},
                )
            ),
            model=_TEXT,
            usage=_object(prompt_tokens=_WHOLE_NUMBER, total_tokens=_WHOLE_NUMBER),
        ),
        "Model": model,
        "ModelList": _object(object={"const": "list"}, data=_list(_reference("Model"))),
        "Tokens": _object(count=_WHOLE_NUMBER, max_model_len=_WHOLE_NUMBER, tokens=_list(_WHOLE_NUMBER)),
        "Text": _object(prompt=_TEXT),
        "TokenizerInfo": _object(tokenizer_class=_TEXT, eos_token=or_nothing, chat_template=or_nothing),
        "Version": _object(version=or_nothing),
        "AdminKeys": _object(object={"const": "list"}, data=_list(_object(name=_TEXT, requests=_WHOLE_NUMBER))),
        "AdminFleet": _object(object={"const": "list"}, data=_list(_object(process=_TEXT, model=_TEXT))),
    }


def _batch_answers() -> Json:
    counts = _object(total=_WHOLE_NUMBER, completed=_WHOLE_NUMBER, failed=_WHOLE_NUMBER)
    status = {"enum": [status.value for status in JobState]}
    or_nothing = {"type": ["string", "null"]}
    either: Json = {"type": ["object", "null"]}
    file = _object(id=_TEXT, object={"const": "file"}, bytes=_WHOLE_NUMBER, filename=_TEXT, purpose=_TEXT)
    batch: Json = {
        "object": {"const": "batch"}, "endpoint": _TEXT, "status": status, "request_counts": counts,
        "usage": {"type": "object"},
    }  # fmt: skip
    outcome = _object(
        index=_WHOLE_NUMBER,
        custom_id=_TEXT,
        status_code={"type": ["integer", "null"]},
        response=either,
        error=either,
    )
    results = {"anyOf": [_list(outcome), {"type": "null"}]}
    return {
        "File": file,
        "FileList": _object(object={"const": "list"}, data=_list(_reference("File"))),
        "Batch": _object(id=_TEXT, **batch, input_file_id=_TEXT, output_file_id=or_nothing, error_file_id=or_nothing),
        "BatchList": _object(object={"const": "list"}, data=_list(_reference("Batch"))),
        "BatchResults": _object(id=or_nothing, **batch, progress={"type": "number"}, results=results),
        "BatchStats": _object(
            object={"const": "batch.stats"},
            batches=_object(**{status.value: _WHOLE_NUMBER for status in JobState}),
            requests=_object(
                queued=_WHOLE_NUMBER, running=_WHOLE_NUMBER, completed=_WHOLE_NUMBER, failed=_WHOLE_NUMBER
            ),
            tokens=_object(input=_WHOLE_NUMBER, output=_WHOLE_NUMBER),
            output_tokens_per_second={"type": "number"},
        ),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
