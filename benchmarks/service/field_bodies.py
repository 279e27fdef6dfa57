"""One body for every field of every JSON endpoint, with the field filled to the limit in the OpenAPI document.

A field without a limit is filled to the size of a whole body. A value with more items than the service parses comes
a second time with the number of items that the service does parse ("within"). No network here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from app.api.http.openapi import openapi_document
from app.api.json_structure import MAX_STRINGS, MAX_STRUCTURE, MAX_VALUES
from app.api.prepared_request import RequestLimits
from app.config import ApiConfig
from app.engine.request import FILTERS

Json = dict[str, Any]

LARGEST_ANSWER = "the largest answer"
DEPTH = 180  # the JSON parser of the service accepts a depth of about 200
_LENGTH_FIELDS = {
    "/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/batch": "max_tokens",
    "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens",
}  # fmt: skip
_INPUTS, MAX_INPUTS = ("input", "documents", "text_2"), 2048  # the service accepts fewer items than it describes
_NUM_PROMPTS = 128  # prompts of a batch while another field is filled
_REPEATED = 128  # items of a list if every item is filled
_ASKED_TOKENS = 16  # output tokens while another field is filled
_TEXTS = {"words": "many words of text ", "letter": "a", "spaces": " ", "signs": '\\"<{\u00e9\U0001f9ff'}
# Fields that must accompany a filled field: without them the body is refused early. Some select one of several types.
_NEEDED: dict[str, Json] = {
    "json_schema": {"type": "json_schema"},
    "structures": {"type": "structural_tag", "triggers": ["w"]},
    "triggers": {"type": "structural_tag", "structures": [{"begin": "w", "schema": {}, "end": "x"}]},
    "schema": {"type": "json_schema", "name": "s"},
    "tool_calls": {"role": "assistant"},
    "tool_call_id": {"role": "tool"},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "name": "w0", "function": {"name": "w0"}}]},
    "prompt_logprobs": {"stream": False},
}
# The most work that a short body can ask for.
_LARGE_ANSWER: Json = {
    "n": 128, "logprobs": 20, "top_logprobs": 20, "prompt_logprobs": 20, "echo": True, "return_token_ids": True,
    "ignore_eos": True, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0, **FILTERS,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldBody:
    """A request body, made on demand."""

    path: str  # of the endpoint
    name: str  # path, filled field (or two, joined by `+`) and filling
    make: Callable[[], Json]
    is_full: bool = False  # a list or a text is filled

    @property
    def value(self) -> Json:
        """The body, made anew on each access: all bodies of a sweep together are gigabytes."""
        return self.make()

    def data(self) -> bytes:
        return json.dumps(self.value, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class _Filled:
    """A value of a schema in which the field at `place` is filled."""

    place: str
    filling: str
    make: Callable[[], Any]

    @property
    def is_list(self) -> bool:
        return self.filling in ("most", "within")

    @property
    def is_full(self) -> bool:
        """Whether the filling is a list or text, where number fields beside it may change the amount of work."""
        return self.is_list or self.filling.startswith("words")


def field_bodies(
    document: Mapping[str, Any], *, size: int, max_model_len: int, with_pairs: bool = True
) -> Iterator[FieldBody]:
    """Yield, for each endpoint of an OpenAPI document, a body for each field and one that asks for the largest answer.

    `with_pairs` adds a body for each pair of lists, and each list and text beside the endpoint's least numbers. `size`
    is the approximate size of a body in bytes. The bodies are deterministic.
    """
    filler = _Filler(document["components"]["schemas"], max_model_len, size)
    for path, schema in endpoint_schemas(document):
        least = _least_numbers(schema) if with_pairs else {}
        for filled in filler.fields(schema, size):
            if filled.place:  # an empty place is the whole body
                name, is_full = f"{filled.place} {filled.filling}", filled.is_full
                yield _body(path, name, filled.make, is_full=is_full)
                if least and is_full:
                    yield _body(path, f"{name} + least numbers", partial(_beside, least, filled.make), is_full=True)
        lists = _lists(filler.fields(schema, size // 2)) if with_pairs else []
        for first, second in combinations(lists, 2):
            yield _body(path, f"{first.place} + {second.place}", partial(_both, first.make, second.make))
        if "temperature" in schema["properties"]:
            largest = filler.minimal(schema) | _large_answer(schema, max_model_len // 2)
            yield _body(path, LARGEST_ANSWER, partial(dict, largest))


def endpoint_schemas(document: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """Yield the path and the schema of each JSON body."""
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        body = content.get("application/json", {}).get("schema", {})
        for option in body.get("anyOf", [body] if body else []):
            schema = schemas[option["$ref"].rpartition("/")[2]]
            if schema.get("additionalProperties") is True and "CompletionRequest" in schemas:
                # The additional properties of this body are the fields of a completion request.
                shared = schemas["CompletionRequest"]["properties"]
                shared = {name: each for name, each in shared.items() if name != "prompt"}
                schema = schema | {"properties": shared | schema["properties"]}
            yield path, schema


def minimal_bodies() -> dict[str, Json]:
    """Return the smallest body for each endpoint with a JSON body, as far as `required` names the fields it needs."""
    document = openapi_document(ApiConfig(), RequestLimits(), has_batches=True)
    filler = _Filler(document["components"]["schemas"], max_model_len=1, size=1)
    return {path: filler.minimal(schema) for path, schema in endpoint_schemas(document) if "required" in schema}


def _body(path: str, name: str, make: Callable[[], Json], *, is_full: bool = False) -> FieldBody:
    def body() -> Json:
        value, limit = make(), _LENGTH_FIELDS.get(path)
        if value.get("prompts") == ["w0"]:
            value = value | {"prompts": [f"w{number}" for number in range(_NUM_PROMPTS)]}
        return {limit: _ASKED_TOKENS} | value if limit else value

    return FieldBody(path, f"{path} {name}", body, is_full)


def _beside(value: Json, make: Callable[[], Json]) -> Json:
    return value | make()


def _both(first: Callable[[], Json], second: Callable[[], Json]) -> Json:
    both: Json = merged(first(), second())
    return both


def _large_answer(schema: Json, num_tokens: int) -> Json:
    """Return the fields of `_LARGE_ANSWER` that the schema permits, with `num_tokens` as the output length."""
    wanted = _LARGE_ANSWER | dict.fromkeys(_LENGTH_FIELDS.values(), num_tokens)
    return {
        name: value
        for name, value in wanted.items()
        for option in _options(schema["properties"].get(name, {}))
        if option.get("type") in _TYPE_NAMES[type(value)]
    }


_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    int: ("integer", "number"), float: ("number",), bool: ("boolean",), list: ("array",),
}  # fmt: skip


def _least_numbers(schema: Json) -> Json:
    """Return 1 for each integer field that accepts 1, except log-probabilities, which would limit all other fields."""
    return {
        name: 1
        for name, field in schema["properties"].items()
        for option in _options(field)
        if option.get("type") == "integer" and "logprobs" not in name and option.get("minimum", 1) <= 1
    }


def _options(schema: Json) -> list[Json]:
    """Return the alternatives of a schema without null."""
    if "properties" in schema:  # `anyOf` beside `properties` holds rules between the fields, not alternatives
        return [schema]
    options = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [option for option in options if option.get("type") != "null"]


def _lists(filled: Iterator[_Filled]) -> list[_Filled]:
    """Return one filled list for each place: the last one, which is the largest that the service parses."""
    return list({each.place: each for each in filled if each.is_list}.values())


def merged(first: Any, second: Any) -> Any:
    """Merge two objects by key. Two lists give the longer list, all other pairs give the first value."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            key: merged(first[key], second[key]) if key in first and key in second else first.get(key, second.get(key))
            for key in first | second
        }
    if isinstance(first, list) and isinstance(second, list):
        return max(first, second, key=len)
    return first


class _Filler:
    """Makes values that match JSON schemas."""

    def __init__(self, schemas: Mapping[str, Json], max_model_len: int, size: int) -> None:
        """`size` is the size of a whole body in bytes."""
        self._schemas = schemas
        self._max_model_len = max_model_len
        self._size = size

    def minimal(self, schema: Json, number: int = 0) -> Any:
        """Return the smallest value of a schema. Strings and integers differ by `number`."""
        return self._maker(schema)(number)

    def _maker(self, schema: Json) -> Callable[[int], Any]:
        """Return a function from a number to the smallest value of the schema, see `minimal`."""
        while len(_options(schema)) > 1:
            schema = _options(schema)[0]
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            value = schema.get("const", next(iter(schema.get("enum", [None]))))
            return lambda _: value
        kind = schema.get("type")
        if kind == "object":
            known = schema.get("properties", {})
            # A message needs content, but the schema states that as a rule between fields, not in `required`.
            required = [*schema.get("required", ()), *({"role", "content"} & known.keys())]
            makers = {name: self._maker(known[name]) for name in required if name in known}
            return lambda number: {name: make(number) for name, make in makers.items()}
        if kind == "array":
            if not (length := schema.get("minItems", 0)):
                return lambda _: []
            make_item = self._maker(schema.get("items", {}))
            return lambda _: [make_item(each) for each in range(length)]
        if kind in ("integer", "number"):
            least, most = schema.get("minimum", 0), schema.get("maximum", 700)
            return lambda number: max(least, min(most, number % 700))
        return (lambda number: f"w{number}") if kind == "string" else lambda _: True if kind == "boolean" else {}

    def fields(self, schema: Json, size: int) -> Iterator[_Filled]:
        """Yield values of a schema; in each value one field, at any depth, is filled to `size` bytes."""
        for option in _options(schema):
            option = self._resolved(option)
            if len(_options(option)) > 1:
                yield from self.fields(option, size)
                continue
            fill = _FILLS.get(option.get("type", ""))
            if fill is not None and "const" not in option:
                yield from fill(self, option, size)

    def _objects(self, schema: Json, size: int) -> Iterator[_Filled]:
        minimal = self.minimal(schema)
        for name, field in schema.get("properties", {}).items():
            for filled in self.fields(field, size):
                place = f"{name}.{filled.place}" if filled.place else name
                needed = {key: each for key, each in _NEEDED.get(name, {}).items() if key in schema["properties"]}
                make = partial(_with, minimal | needed, name, filled.make)
                yield _Filled(place.replace(".[", "["), filled.filling, make)
                if name in _INPUTS and filled.is_list:
                    made = filled.make()
                    if isinstance(made, list) and len(made) > MAX_INPUTS:
                        few = partial(_same, made[:MAX_INPUTS])
                        yield _Filled(name, "within", partial(_with, minimal | needed, name, few))
        if schema.get("additionalProperties") and "properties" not in schema:
            yield from self._free_objects(schema, size)

    def _free_objects(self, schema: Json, size: int) -> Iterator[_Filled]:
        most = min(schema.get("maxProperties", size), size // 12)
        of_numbers = "pattern" in schema.get("propertyNames", {})
        if isinstance(schema["additionalProperties"], dict):
            value = self.minimal(schema["additionalProperties"], 1)
            yield from self._several(
                "most",
                lambda number: {str(key) if of_numbers else f"k{key}": value for key in range(number)},
                most,
                size,
            )
            return
        yield from self._several("most", lambda number: {f"k{key}": 1 for key in range(number)}, most, size)
        yield _Filled("", "text", lambda: {"k": _text("words", size)})
        yield from self._several("list", lambda number: {"k": [1] * number}, size // 3, size)
        nested = _nested(DEPTH)
        yield from self._several("deep", lambda number: {"k": [nested] * number}, size // (2 * DEPTH + 2), size)
        if "maxProperties" not in schema:
            yield from self._several("schema", _object_schema, size // 30, size)
            yield from self._several(
                "enum", lambda number: {"enum": [f"w{at}" for at in range(number)]}, size // 11, size
            )
            yield _Filled("", "pattern", lambda: {"type": "string", "pattern": "(a|b)" * (size // 6)})
            yield _Filled("", "counted", lambda: {"type": "string", "minLength": size, "maxLength": 2 * size})

    def _arrays(self, schema: Json, size: int) -> Iterator[_Filled]:
        item = self._resolved(schema.get("items", {}))
        most = schema.get("maxItems", size)
        make = self._maker(item)
        length = len(json.dumps(make(10**5))) + 2
        yield from self._several("most", lambda number: [*map(make, range(number))], min(most, size // length), size)
        wrong: Any = -1 if item.get("type") == "integer" else None
        yield _Filled("", "wrong", lambda: [wrong] * (size // (len(json.dumps(wrong)) + 2)))
        if item.get("type") not in ("integer", "number"):
            for several in sorted({1, max(1, min(most, _REPEATED, size // 64))}):
                for filled in self.fields(item, size // several):
                    times = f" x{several}" if several > 1 else ""
                    place = f"[].{filled.place}".rstrip(".")
                    yield _Filled(place, filled.filling + times, partial(_repeated, filled.make, several))

    def _several(self, filling: str, make: Callable[[int], Any], most: int, size: int) -> Iterator[_Filled]:
        """Yield a value with `most` items, and a value with the number of items that the service parses, if smaller."""
        yield _Filled("", filling, partial(make, most))
        few = 64
        text = json.dumps(make(few))
        share = 0.9 * size / self._size  # of the body's limits; the rest is for the fields around the value
        permitted = most
        for num, limit in (
            (sum(map(text.count, "[{:")), MAX_STRUCTURE),
            (text.count('"') // 2, MAX_STRINGS),
            (text.count(",") + 1, MAX_VALUES),
        ):
            if num > 4:  # up to 4 do not belong to the items
                permitted = min(permitted, int(share * limit * few / num))
        if permitted < most:
            yield _Filled("", "within" if filling == "most" else f"{filling} within", partial(make, permitted))

    def _strings(self, schema: Json, size: int) -> Iterator[_Filled]:
        if "enum" in schema:
            yield from (_Filled("", str(value), partial(_same, value)) for value in schema["enum"])
        elif "pattern" in schema:
            yield _Filled("", "longest", lambda: "1" * min(size, schema.get("maxLength", 128)))
        else:
            kinds = _TEXTS if schema.get("maxLength", size) > 4096 else ("words",)
            most = min(size, schema.get("maxLength", size))
            yield from (_Filled("", kind, partial(_text, kind, most)) for kind in kinds)

    def _numbers(self, schema: Json, size: int) -> Iterator[_Filled]:
        least, most = schema.get("minimum", 0), schema.get("maximum", 2**31)
        half = self._max_model_len // 2
        yield _Filled("", "highest", partial(_same, most))
        if least < half < most:
            yield _Filled("", "half a context", partial(_same, half))

    def _booleans(self, schema: Json, size: int) -> Iterator[_Filled]:
        yield _Filled("", "true", partial(_same, True))

    def _resolved(self, schema: Json) -> Json:
        while True:
            [option, *_] = _options(schema) or [{}]
            if len(_options(schema)) == 1 and option is not schema:
                schema = option
            elif "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            else:
                return schema


_FILLS: dict[str, Callable[[_Filler, Json, int], Iterator[_Filled]]] = {
    "object": _Filler._objects,
    "array": _Filler._arrays,
    "string": _Filler._strings,
    "integer": _Filler._numbers,
    "number": _Filler._numbers,
    "boolean": _Filler._booleans,
}


def _same(value: Any) -> Any:
    return value


def _with(value: Json, name: str, make: Callable[[], Any]) -> Json:
    return value | {name: make()}


def _repeated(make: Callable[[], Any], times: int) -> list[Any]:
    return [make()] * times


def _text(kind: str, size: int) -> str:
    unit = _TEXTS[kind]
    length = len(json.dumps(unit, ensure_ascii=False).encode()) - 2
    return (unit * (size // length + 1))[: size * len(unit) // length]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _object_schema(num_properties: int) -> Json:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(num_properties)}}
