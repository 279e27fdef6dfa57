"""Rewrites JSON schemas for the compiler without changing their meaning, and drops unsupported keywords.

Dropped keywords are reported by their paths, such as `properties.to.pattern`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

from app.json_schema import NAMED_SCHEMAS, SCHEMA_KEYWORDS, Json, Place, changed

ErrorOf = Callable[[Json], str | None]  # returns the compiler's error for a schema, or None if it compiles
Drops = dict[Place, str]  # maps the path of each dropped keyword to the reason, or to "" if it is unknown

_COUNTS = frozenset("maxItems maxLength maxProperties minItems minLength minProperties".split())
_EXACT = frozenset("const enum exclusiveMaximum exclusiveMinimum maximum minimum multipleOf".split())
_ASKING = _COUNTS | _EXACT | SCHEMA_KEYWORDS | NAMED_SCHEMAS | {"$ref", "format", "pattern", "required", "type"}
_MAY_BE_NULL = frozenset(("$defs", "const", "definitions"))
_TYPES = frozenset("array boolean integer null number object string".split())
# A trial compilation takes at least a millisecond of CPU time. Keywords undecided after this many trials are dropped.
_MAX_TRIALS = 256
_FLOAT_BITS = 63  # the compiler writes integers with up to 63 bits exactly, if a float can represent them
# The characters of a pointer that are not encoded in a reference (RFC 3986, section 3.5).
_PLAIN_CHARACTERS = "/~!$&'()*+,;=:@-._?"


def exact(schema: Json) -> tuple[Json, Drops]:
    """Rewrite a schema without the keywords that the compiler would misinterpret or only enforce partially.

    Drops keywords with the value null, and keywords with integers that no float can represent, because the compiler
    calculates with floats. Counts such as `1.0` are converted to integers, types such as `STRING` to lower case, and
    references are encoded.
    """
    dropped: Drops = {}

    def written(one: Json, place: Place) -> Json:
        kept: Json = {}
        for name, value in one.items():
            why = _why_not_exact(name, value)
            if why is not None:
                dropped[(*place, name)] = why
            elif not (name == "uniqueItems" and value is False):  # `uniqueItems: false` has no effect
                kept[name] = _rewritten(name, value, schema)
            if name in NAMED_SCHEMAS and isinstance(value, dict):
                wrong = [key for key, inner in value.items() if not isinstance(inner, dict | bool | list)]
                dropped.update(((*place, name, key), "it must be a schema") for key in wrong)
                kept[name] = value | dict.fromkeys(wrong, True)
        return kept

    return changed(schema, written), dropped


def _why_not_exact(name: str, value: Any) -> str | None:
    if value is None and name in _ASKING - _MAY_BE_NULL:
        return "it is null"
    if name in _EXACT and (number := next(_inexact(value), None)) is not None:
        return f"the number {str(number)[:40]} cannot be represented exactly"
    return None


def _inexact(value: Any) -> Iterator[int]:
    """Yield the integers in a value that the compiler would not write exactly."""
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inexact(inner)
    elif type(value) is int and (value.bit_length() > _FLOAT_BITS or int(float(value)) != value):
        yield value


def _rewritten(name: str, value: Any, root: Json) -> Any:
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "type" and isinstance(value, str) and value.lower() in _TYPES:
        return value.lower()
    if name == "$ref" and isinstance(value, str) and value.startswith("#/"):
        return "#" + quote(_pointer(value, root), safe=_PLAIN_CHARACTERS)
    return value


def _pointer(ref: str, root: Json) -> str:
    """Return the decoded JSON pointer of a reference to its own schema. Some clients send the pointer unencoded."""
    decoded, plain = unquote(ref[1:]), ref[1:]
    return plain if not _has(root, decoded) and _has(root, plain) else decoded


def _has(root: Any, pointer: str) -> bool:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and len(name) < 10 and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, dict) and name in root:
            root = root[name]
        else:
            return False
    return True


def shown(place: Place, name: str = "") -> str:
    """Return a path as text for responses and errors. The start of a long path is cut off."""
    text = ".".join(filter(None, (name, *place)))
    max_length = 75
    return text if len(text) <= max_length else f"...{text[3 - max_length :]}"


class SchemaReducer:
    """Finds the keywords in a grammar's schemas that the compiler does not support, by compiling parts of them."""

    def __init__(self, error_of: ErrorOf) -> None:
        self._error_of = error_of
        self._num_trials = 0
        self._is_refused: dict[str, bool] = {}  # results of trials, by the compiled part's JSON text

    def kept(self, schema: Json) -> tuple[Json, Drops]:
        """Return the schema without the keywords that do not compile. The result may still match no document.

        First, each keyword is compiled separately. If this is not enough, the keywords of each schema are compiled
        together, but without inner schemas. The last candidate is `oneOf`, which a lenient compiler treats as `anyOf`.
        """
        dropped: Drops = {}
        schema = self._without(schema, self._keywords_alone(schema), dropped)
        if self._error_of(schema) is not None:
            schema = self._without(schema, self._keywords_together(schema), dropped)
        if self._error_of(schema) is not None:
            dropped |= self._alternatives(schema)
        return schema, dropped

    def _without(self, schema: Json, drops: Drops, dropped: Drops) -> Json:
        dropped |= drops

        def left(one: Json, place: Place) -> Json:
            kept = {name: value for name, value in one.items() if (*place, name) not in drops}
            if isinstance(patterns := kept.get("patternProperties"), dict):
                at = (*place, "patternProperties")
                kept["patternProperties"] = {
                    each: value for each, value in patterns.items() if (*at, each) not in drops
                }
            return kept

        return changed(schema, left) if drops else schema

    # ------------------------------------------------------------------ candidates

    def _keywords_alone(self, schema: Json) -> Drops:
        units: dict[Place, Json] = {}
        drops: Drops = {}
        has_ids = '"$id"' in json.dumps(schema)

        def note(one: Json, place: Place) -> Json:
            of_type = {"type": one["type"]} if _is_type(one.get("type")) else {}
            for name, value in one.items():
                at = (*place, name)
                if name == "$ref" and isinstance(value, str):
                    if not has_ids and not _leads_somewhere(value, schema):
                        drops[at] = "it points to nothing in this schema"
                elif name == "patternProperties" and isinstance(value, dict):
                    units.update({(*at, each): {name: {each: True}} for each in value})
                elif name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):  # draft 4
                    units[at] = {name: value, name[9:].lower(): one.get(name[9:].lower()), **of_type}
                elif name not in ("oneOf", "$defs", "definitions"):
                    units[at] = of_type | {name: _outline(name, value)}
            return one

        changed(schema, note)
        return drops | self._refused(units)

    def _keywords_together(self, schema: Json) -> Drops:
        """Return keywords to drop (the last ones first) from each schema whose keywords do not compile together."""
        outlines: dict[Place, Json] = {}

        def note(one: Json, place: Place) -> Json:
            outlines[place] = {
                name: _outline(name, value) if name not in NAMED_SCHEMAS else dict.fromkeys(value, True)
                for name, value in one.items()
                if name not in ("$ref", "$schema", "$defs", "definitions", "anyOf", "allOf", "oneOf")
            }
            return one

        changed(schema, note)
        refused = self._refused(outlines).items()
        return {(*place, *each): why for place, why in refused for each in self._too_many_in(outlines[place])}

    def _too_many_in(self, outline: Json) -> list[Place]:
        patterns = outline.get("patternProperties", {})
        some: Json = {}
        too_many: list[Place] = []
        for pattern in patterns:
            if self._compiles({"patternProperties": {**some, pattern: True}}):
                some[pattern] = True
            else:
                too_many.append(("patternProperties", pattern))
        left = outline | ({"patternProperties": some} if patterns else {})
        for name in [name for name in reversed(outline) if name not in ("type", "properties", "patternProperties")]:
            if self._compiles(left):
                break
            del left[name]
            too_many.append((name,))
        return too_many

    def _alternatives(self, schema: Json) -> Drops:
        """Return the paths of each `oneOf` whose schemas the compiler cannot show to be mutually exclusive."""
        definitions: Json = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
        drops: Drops = {}

        def note(one: Json, place: Place) -> Json:
            if "oneOf" in one:
                self._num_trials += 1
                is_asked = self._num_trials < _MAX_TRIALS
                why = self._error_of({**definitions, "oneOf": one["oneOf"]}) if is_asked else "oneOf was not tried"
                if why is not None and "oneOf" in why:
                    drops[(*place, "oneOf")] = why
            return one

        changed(schema, note)
        return drops

    # ------------------------------------------------------------------ trials

    def _refused(self, units: dict[Place, Json]) -> Drops:
        """Return the paths of the units that do not compile. Only the first path has a reason."""
        written = {place: json.dumps(unit, sort_keys=True) for place, unit in units.items()}
        unknown: dict[str, dict[str, None]] = {}  # distinct units without a result, grouped by keyword
        for place, unit in written.items():
            if unit not in self._is_refused:
                unknown.setdefault(_keyword_of(place), {})[unit] = None
        everything = [unit for group in unknown.values() for unit in group]
        if everything and self._are_kept(everything):
            unknown = {}
        for group in unknown.values():
            self._find_refused([*group])
        refused = [place for place, unit in written.items() if self._is_refused.get(unit)]
        drops: Drops = dict.fromkeys(refused, "")
        if refused:
            drops[refused[0]] = self._error_of(units[refused[0]]) or ""
        return drops

    def _find_refused(self, units: Sequence[str]) -> None:
        """Determine for each unit whether it compiles, by bisection: all units of a half are compiled together."""
        if self._are_kept(units):
            return
        if len(units) == 1 or self._num_trials >= _MAX_TRIALS:
            self._is_refused.update(dict.fromkeys(units, True))
            return
        half = len(units) // 2
        self._find_refused(units[:half])
        self._find_refused(units[half:])

    def _compiles(self, unit: Json) -> bool:
        """Return whether a unit compiles, or False if no trials are left."""
        return self._num_trials < _MAX_TRIALS and self._are_kept([json.dumps(unit, sort_keys=True)])

    def _are_kept(self, units: Sequence[str]) -> bool:
        self._num_trials += 1
        are_kept = self._error_of(_all_of([json.loads(unit) for unit in units])) is None
        if are_kept:
            self._is_refused.update(dict.fromkeys(units, False))
        return are_kept


def _keyword_of(place: Place) -> str:
    return "patternProperties" if place[-2:-1] == ("patternProperties",) else place[-1] if place else ""


def _all_of(units: Sequence[Json]) -> Json:
    """Return a schema that compiles if all units compile, even if no document matches one of them."""
    return {"type": "object", "properties": {str(number): unit for number, unit in enumerate(units)}}


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(each, str) and each in _TYPES for each in types)


def _outline(name: str, value: Any) -> Any:
    """Return a keyword's value with inner schemas replaced with True, because these are compiled separately."""
    if name in SCHEMA_KEYWORDS and isinstance(value, list):
        return [True if isinstance(inner, dict) else inner for inner in value]
    if name in SCHEMA_KEYWORDS and isinstance(value, dict):
        return True
    if name in NAMED_SCHEMAS and isinstance(value, dict):
        return {}
    return value


_ANCHOR = re.compile(r"#[A-Za-z_][\w.-]*")


def _leads_somewhere(ref: str, root: Json) -> bool:
    if _ANCHOR.fullmatch(ref):
        return f'"$anchor": {json.dumps(ref[1:])}' in json.dumps(root)
    return ref.startswith("#") and _has(root, unquote(ref[1:]))
