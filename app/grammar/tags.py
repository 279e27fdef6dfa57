"""Grammars of the kind TAGS: free text, in which each trigger begins a piece that must match a grammar.

The text of such a grammar is a JSON object of two lists. `schemas` has objects with a `schema` and `is_lenient`. `tags`
has objects with

    trigger     the text that begins the piece; once it is complete, the rest of the piece must follow. A grammar of one
                tag may have an empty trigger: then there is no free text
    is_opening  the piece may only begin the output; white space is allowed outside quotes
    content     what follows the trigger: a list of parts
    is_last     the output ends after the piece; otherwise free text and other pieces may follow

A part is a text, {"pattern": regular expression}, {"schema": number}, {"any": [content, …]}, or {"repeat": content}
(zero or more times). Where a text contains the text of a special token, the token or its text may be generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WriteSchema = Callable[[Json, bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """All pieces with one trigger; `lark` matches the content of any of them."""

    trigger: str
    is_opening: bool
    is_last: bool
    lark: str


def read_tags(text: str, special: Mapping[str, int], *, write_schema: WriteSchema, options: str) -> list[Tag]:
    """The tags of a grammar's text, one for each trigger.

    `special`: the special tokens by their texts. `write_schema` turns a schema, which may be lenient, into a Lark rule.
    `options` end each Lark grammar.
    """
    document = json.loads(text)
    groups: dict[tuple[str, bool], list[Json]] = {}
    for tag in document["tags"]:
        groups.setdefault((tag["trigger"], tag["is_opening"]), []).append(tag)
    return [
        Tag(
            trigger=trigger,
            is_opening=is_opening,
            is_last=any(tag["is_last"] for tag in tags),
            lark=_Lark(document["schemas"], special, write_schema).grammar([tag["content"] for tag in tags]) + options,
        )
        for (trigger, is_opening), tags in groups.items()
    ]


class _Lark:
    """Turns contents, and the schemas that they name, into Lark."""

    def __init__(self, schemas: list[Json], special: Mapping[str, int], write_schema: WriteSchema) -> None:
        self._schemas = schemas
        self._special = special
        self._specials = re.compile(f"({'|'.join(map(re.escape, special))})") if special else None
        self._write_schema = write_schema
        self._named: set[int] = set()

    def grammar(self, contents: list[list[Any]]) -> str:
        start = f"start: {self._any(contents)}"
        return "\n".join([start, *(f"schema_{number}: {self._schema(number)}" for number in sorted(self._named))])

    def _schema(self, number: int) -> str:
        given = self._schemas[number]
        return self._write_schema(given["schema"], given["is_lenient"])

    def _any(self, contents: list[list[Any]]) -> str:
        return " | ".join(self._content(content) for content in contents)

    def _content(self, content: list[Any]) -> str:
        return " ".join(self._part(part) for part in content) or '""'

    def _part(self, part: str | Json) -> str:
        if isinstance(part, str):
            return self._text(part)
        [(kind, value)] = part.items()
        match kind:
            case "pattern":
                return f"/{value.replace('/', '[/]')}/"
            case "schema":
                self._named.add(value)
                return f"schema_{value}"
            case "any":
                return f"({self._any(value)})"
            case _:
                return f"({self._content(value)})*"

    def _text(self, text: str) -> str:
        pieces = [text] if self._specials is None else self._specials.split(text)
        return " ".join(self._piece(piece) for piece in pieces if piece) or '""'

    def _piece(self, piece: str) -> str:
        token_id = self._special.get(piece)
        return json.dumps(piece) if token_id is None else f"({json.dumps(piece)} | <[{token_id}]>)"
