"""The document at /openapi.json: operations come from routes, bodies from schemas, and limits from settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from app.api.endpoints.adapters import AdapterRoutes
from app.api.endpoints.admin import AdminRoutes
from app.api.endpoints.batches import BatchRoutes
from app.api.endpoints.cancellation import CancelRoutes
from app.api.endpoints.files import FileRoutes
from app.api.endpoints.live import LiveRoutes
from app.api.endpoints.page import PageRoutes
from app.api.endpoints.scheduler import SchedulerRoutes
from app.api.endpoints.service import HealthRoutes, MetricsRoutes, ServiceRoutes
from app.api.endpoints.short_batches import ShortBatchRoutes
from app.api.endpoints.stored_responses import StoredResponseRoutes
from app.api.endpoints.table import ENDPOINTS
from app.api.endpoints.tokenization import TokenizationRoutes
from app.api.endpoints.usage import UsageRoutes
from app.api.http.errors import is_anthropic
from app.api.http.operations import EVENTS, GENERATION_REFUSALS, TEXT, Operation, RouteGroup
from app.api.prepared_request import RequestLimits
from app.api.schemas.fields import Schema
from app.api.schemas.parameters import RefusedField, unavailable
from app.api.schemas.requests import GenerationRequest, ModelRequest
from app.batches import JobState
from app.config import ApiConfig
from app.json_pieces import Json
from app.versions import versions

_REFUSALS = {
    "400": "the request is invalid; `param` names the invalid field",
    "401": "the request has no API key, or an unknown one",
    "402": "this API key's monthly budget for costs is spent",
    "403": "this API key may not use that model, or is not an admin key",
    "404": "there is no such model, file or batch",
    "408": "the body arrived too slowly, or the deadline has passed or cannot be met",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "429": "a limit of this API key is reached, or the queues are full; try again after `Retry-After`",
    "500": "the server failed",
    "503": "no replica can serve this request now; try again after `Retry-After`",
}

_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", dict: "object"}
_REFERENCE = "#/components/schemas/{model}"
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: type | Json) -> Json:
    """Return the schema of an object that requires all of these properties."""
    schemas = {name: {"type": _TYPES[each]} if isinstance(each, type) else each for name, each in properties.items()}
    return {"type": "object", "properties": schemas, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _page(items: Json, **more: type | Json) -> Json:
    return _object(object={"const": "list"}, data=_list(items), **more)


def _reference(name: str) -> Json:
    return {"$ref": _REFERENCE.format(model=name)}


def _computed() -> Iterator[Operation]:
    """Yield the operations of `ENDPOINTS`."""
    for each in ENDPOINTS.values():
        media = (EVENTS,) if each.generates else ()
        for path in (each.path, *each.aliases):
            yield Operation(
                "post", path, each.summary, each.response.__name__, GENERATION_REFUSALS, (each.schema,), media
            )


def _of(*groups: type[RouteGroup]) -> tuple[Operation, ...]:
    return tuple(each for group in groups for each in group.operations().values())


_OPEN = _of(HealthRoutes, PageRoutes)
_FOR_KEYS = (*_computed(), *_of(TokenizationRoutes, ServiceRoutes, CancelRoutes))
_OF_BATCHES = _of(FileRoutes, BatchRoutes, ShortBatchRoutes, StoredResponseRoutes)
_FOR_ADMINS = _of(AdminRoutes, UsageRoutes, SchedulerRoutes, AdapterRoutes, LiveRoutes)


def _bodies(operations: Sequence[Operation]) -> tuple[type[Schema], ...]:
    return tuple(dict.fromkeys(body for each in operations for body in each.body))


BODIES, BATCH_BODIES = _bodies(_FOR_KEYS), _bodies(_OF_BATCHES)


def openapi_document(
    config: ApiConfig, limits: RequestLimits, *, needs_key: bool = False, has_batches: bool = False
) -> Json:
    """Return the OpenAPI 3.1 document, including files, batches and stored responses if `has_batches` is true."""
    metrics, batches = _of(MetricsRoutes), _OF_BATCHES if has_batches else ()
    paths: dict[str, Json] = {}
    for caller, operations, of_key in (
        ("public", _OPEN, ()),
        ("keys", (*_FOR_KEYS, *batches), ("401", "429")),
        ("admins", _FOR_ADMINS, ("401", "403", "429")),
    ):
        for each in (*operations, *(metrics if config.metrics_for == caller else ())):
            path = each.path.replace(":path}", "}")  # Starlette's marker for names with slashes
            paths.setdefault(path, {})[each.method] = _written(each, path, of_key)
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


def _written(operation: Operation, path: str, of_key: tuple[str, ...]) -> Json:
    """Return an operation in OpenAPI's form. `of_key` lists the refusals for its key, or () if it needs no key."""
    as_json = {"application/json": {"schema": _reference(operation.response)}} if operation.response else {}
    texts = {kind: {"schema": _object(data=str) if kind == EVENTS else TEXT} for kind in operation.media}
    errors = {"application/json": {"schema": _reference("AnthropicError" if is_anthropic(path) else "Error")}}
    statuses = sorted({*of_key, *operation.refusals})
    written: Json = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "done", "content": as_json | texts},
            **{status: {"description": _REFUSALS[status], "content": errors} for status in statuses},
        },
    }
    if operation.body:
        references = [_reference(schema.__name__) for schema in operation.body]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        written["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", **described} for name, described in operation.query.items()]
    if parameters:
        written["parameters"] = parameters
    if not of_key:
        written["security"] = []
    return written


@cache  # building the schemas takes 60 ms, and all applications with these limits have the same schemas
def _schemas(limits: RequestLimits, *, has_batches: bool) -> Json:
    bodies = (*BODIES, *_bodies(_FOR_ADMINS), *(BATCH_BODIES if has_batches else ()))
    _, document = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    schemas: Json = document["$defs"]
    for schema in schemas.values():
        _accept_null(schema)
    for body in BODIES:
        assert issubclass(body, ModelRequest), "every body for a key names a model"
        _leave_out(schemas[body.__name__]["properties"], unavailable(body))
        if issubclass(body, GenerationRequest):
            _publish_limits(schemas[body.__name__]["properties"], limits)
    others = _answers() | (_batch_answers() if has_batches else {})
    _, document = TypeAdapter.json_schemas(
        [(path, "serialization", TypeAdapter(each.response)) for path, each in ENDPOINTS.items()],
        ref_template=_REFERENCE,
    )
    others |= document["$defs"]
    assert schemas.keys().isdisjoint(others), f"two schemas are named {schemas.keys() & others.keys()}"
    return schemas | others


def _accept_null(schema: Json) -> None:
    """Allow `null`, which means "not given", for every optional field."""
    notes = ("title", "default", "description")
    for name, value in schema.get("properties", {}).items():
        if name not in schema.get("required", ()):
            options = value.pop("anyOf", None) or [{key: value.pop(key) for key in list(value) if key not in notes}]
            value["anyOf"] = [*(option for option in options if option != {"type": "null"}), {"type": "null"}]


def _leave_out(properties: Json, unavailable: Mapping[str, RefusedField]) -> None:
    """Restrict shared fields that this endpoint does not support to the values that have no effect."""
    for name in properties.keys() & unavailable.keys():
        harmless = list(unavailable[name].harmless)
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
    """Add limits that depend on settings to a field's options of this type."""
    for option in field["anyOf"]:
        if option.get("type") == kind:
            option.update(limits)


def _answers() -> Json:
    """Return the schemas of the other responses, with the fields that clients may rely on."""
    scheduler = _object(model=str, replicas=_list(_object(replica=str, strategy=dict, policy=dict)))
    adapter = _object(name=str, object={"const": "adapter"}, model=str, path=str, digest=str, loaded_on=_list(TEXT))
    return {
        "Anything": {"type": "object"},
        "Error": _object(error=_object(message=str, type=str, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
        "AnthropicError": _object(type={"const": "error"}, error=_object(type=str, message=str), request_id=str),
        "TokenCount": _object(input_tokens=int),
        "Model": _object(id=str, object={"const": "model"}, created=int, created_at=str, max_model_len=int),
        "ModelList": _page(_reference("Model"), has_more={"const": False}),
        "Tokens": _object(count=int, max_model_len=int, tokens=_list({"type": "integer"})),
        "Text": _object(prompt=str),
        "TokenizerInfo": _object(tokenizer_class=str, eos_token=_TEXT_OR_NULL, chat_template=_TEXT_OR_NULL),
        "Cancelled": _object(id=str, object={"const": "request"}, status={"const": "cancelled"}),
        "Version": _object(version=_TEXT_OR_NULL),
        "Load": _object(server_load=int),
        "AdminKeys": _page(_object(name=str, requests=int)),
        "Adapter": adapter,
        "AdapterList": _page(_reference("Adapter"), missing=int),
        "AdminUsage": _page(
            _object(requests=int, prompt_tokens=int, output_tokens=int, cost=float), group_by=_list(TEXT)
        ),
        "AdminFleet": _page(_object(process=str, model=str)),
        "Scheduler": scheduler,
        "SchedulerList": _page(_reference("Scheduler"), strategies=_list(TEXT), policies=_list(TEXT)),
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
        "Batch": _object(
            **batch,
            id=str,
            input_file_id=str,
            output_file_id=_TEXT_OR_NULL,
            error_file_id=_TEXT_OR_NULL,
            model=_TEXT_OR_NULL,
            paused=either,
            webhook=either,
        ),
        "BatchList": _page(_reference("Batch")),
        "BatchResults": _object(**batch, id=_TEXT_OR_NULL, progress=float, results=results),
        "DeletedResponse": _object(id=str, object={"const": "response"}, deleted={"const": True}),
        "DeletedChat": _object(id=str, object={"const": "chat.completion.deleted"}, deleted={"const": True}),
        "DeletedCompletion": _object(id=str, object={"const": "text_completion.deleted"}, deleted={"const": True}),
        "ResponseItems": _page(_object(id=str, type=str)),
        "BatchStats": _object(
            object={"const": "batch.stats"},
            batches=_object(**dict.fromkeys(statuses, int)),
            requests=_object(queued=int, running=int, completed=int, failed=int),
            tokens=_object(input=int, output=int),
            output_tokens_per_second=float,
        ),
    }
