"""Grammars of outputs, as the engine is given them: bounded in length, with the field that they came in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.engine.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from app.errors import InvalidRequest

Json = dict[str, Any]
Content = list[Any]


def schema_grammar(schema: dict[str, Any], *, param: str, is_lenient: bool = False) -> Grammar:
    """JSON documents of a schema. `param` is the field it came in; `is_lenient`: what cannot be kept is passed over.

    Raises InvalidRequest when it is too long.
    """
    return checked_grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), param=param, is_lenient=is_lenient)


def tag(trigger: str, content: Content, *, is_opening: bool = False, is_last: bool = False) -> Json:
    """What follows a trigger in a text that is free else; its parts are described in `app/grammar/tags.py`."""
    return {"trigger": trigger, "is_opening": is_opening, "content": content, "is_last": is_last}


def tags_grammar(tags: Sequence[Json], schemas: Sequence[tuple[Json, bool]], *, param: str) -> Grammar:
    """Such a text. `schemas` are those that contents name by number, with whether they are lenient.

    Raises InvalidRequest when it is too long.
    """
    written = [{"schema": schema, "is_lenient": is_lenient} for schema, is_lenient in schemas]
    return checked_grammar(GrammarKind.TAGS, json.dumps({"schemas": written, "tags": list(tags)}), param=param)


def checked_grammar(kind: GrammarKind, text: str, *, param: str, is_lenient: bool = False) -> Grammar:
    """A grammar that came in the field `param`. Raises InvalidRequest when it is too long."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{param} has {len(text):,} characters; at most {MAX_GRAMMAR_CHARACTERS:,} are accepted", param=param
        )
    return Grammar(kind, text, is_lenient=is_lenient, param=param)
