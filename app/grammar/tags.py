"""Grammars of the kind TAGS: free text in which each trigger starts a piece that must match a grammar.

The text of the grammar is a JSON object with three lists. Each entry of `schemas` has the fields `schema` and
`is_lenient`, and each entry of `larks` has a grammar as `lark`. Both also have a `name`, such as a tool's name. Each
entry of `tags` has the fields

    trigger     the text that starts the piece. Once it is complete, the content must follow. If the grammar has only
                one tag, the trigger may be empty, and no free text is allowed
    is_opening  whether the piece must start the output, which may then add white space outside the trigger's quotes
    content     a list of parts that follow the trigger
    is_last     whether the output ends after the piece. Otherwise, free text and other pieces may follow

A part is a text, {"pattern": regular expression}, {"schema": number}, {"lark": number}, {"any": [content, …]}, or
{"repeat": content} (zero or more times). If a text contains the text of a special token, the model may generate either
the token or its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WriteRule = Callable[[Json], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """All pieces with one trigger. Each piece matches one of the contents."""

    trigger: str
    is_opening: bool
    is_last: bool
    contents: list[list[Any]]


def read_tags(text: str) -> list[Tag]:
    """Parse a grammar's text. Returns one tag per trigger."""
    groups: dict[tuple[str, bool], list[Json]] = {}
    for tag in json.loads(text)["tags"]:
        groups.setdefault((tag["trigger"], tag["is_opening"]), []).append(tag)
    return [
        Tag(
            trigger=trigger,
            is_opening=is_opening,
            is_last=any(tag["is_last"] for tag in tags),
            contents=[tag["content"] for tag in tags],
        )
        for (trigger, is_opening), tags in groups.items()
    ]


def larks_of_tags(
    text: str, special: Mapping[str, int], writers: Mapping[str, WriteRule], *, options: str
) -> list[str]:
    """Return a Lark grammar for the content after each trigger.

    `special` maps the texts of special tokens to their ids. `writers` maps `"schema"` and `"lark"` to functions that
    return the rule for an entry of `schemas` or `larks`. `options` is appended to each grammar.
    """
    forms = json.loads(text)
    return [_Lark(forms, special, writers).grammar(tag.contents) + options for tag in read_tags(text)]


class _Lark:
    """Converts contents, and the schemas and grammars to which they refer, to Lark."""

    def __init__(self, forms: Json, special: Mapping[str, int], writers: Mapping[str, WriteRule]) -> None:
        self._forms = forms
        self._special = special
        self._specials = re.compile(f"({'|'.join(map(re.escape, special))})") if special else None
        self._writers = writers
        self._named: set[tuple[str, int]] = set()

    def grammar(self, contents: list[list[Any]]) -> str:
        start = f"start: {self._any(contents)}"
        return "\n".join([start, *(self._rule(kind, number) for kind, number in sorted(self._named))])

    def _rule(self, kind: str, number: int) -> str:
        return f"{kind}_{number}: {self._writers[kind](self._forms[f'{kind}s'][number])}"

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
            case "schema" | "lark":
                self._named.add((kind, value))
                return f"{kind}_{value}"
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
