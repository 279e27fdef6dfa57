"""The tools of a request, and the extraction of tool calls from the model's text."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.api.output.structured_output import grammar_of
from app.api.output.tool_grammars import (
    arguments_grammar,
    calls_grammar,
    document_or_calls_grammar,
    parameters_of,
    strict_calls_grammar,
)
from app.api.schemas.conversation import CustomDefinition, Definition
from app.api.schemas.requests import ChatRequest
from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest
from app.json_pieces import Json
from app.text import Tokenizer
from app.text.tool_calls import LIST, ArgumentsParser, CallParser, InputParser, ToolFormat, ToolParser


class ToolCallDelta(NamedTuple):
    """A new part of one tool call. The first delta carries the id and the name, and later deltas add arguments."""

    number: int  # the index of the call in its choice
    call_id: str
    name: str | None
    arguments: str  # or the input of a custom tool
    is_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The parser and the grammar for the tool calls of one request."""

    make_parser: Callable[[], CallParser]
    form: ToolFormat
    token_ids: frozenset[int] = frozenset()  # special tokens of the format, whose text the parser needs
    grammar: Grammar | None = None  # for an output with forced or strict calls

    def read(self, parser: CallParser, text: str, *, is_last: bool) -> list[tuple[str, tuple[ToolCallDelta, ...]]]:
        """Parse more text of a choice. Returns parts in order, each with text outside calls and the calls after it."""
        parsed = parser.push(text)
        if is_last and not parser.is_done:
            parsed += parser.flush()
        return [
            (
                part.text,
                tuple(
                    ToolCallDelta(
                        call.number, self._new_id() if call.name else "", call.name, call.arguments, call.is_custom
                    )
                    for call in part.calls
                ),
            )
            for part in parsed
        ]

    def _new_id(self) -> str:
        characters = [secrets.choice(string.ascii_letters + string.digits) for _ in range(self.form.id_length)]
        return self.form.id_prefix + "".join(characters)


def tool_use(body: ChatRequest, tokenizer: Tokenizer, form: ToolFormat | None) -> ToolUse | None:
    """Return the parser and grammar for a chat's tools, or None if `tool_choice` is none. Raises InvalidRequest.

    `form` is the model's own format of calls. Forced calls have the same format for all models.
    """
    if body.tool_choice == "none":
        return None
    offered = {tool.definition.name: tool.definition for tool in body.tools}
    choice = body.tool_choice
    mode = choice if isinstance(choice, str) else choice.mode
    allowed = offered if isinstance(choice, str) else {named.name: offered[named.name] for named in choice.named}
    customs = {name for name, each in allowed.items() if isinstance(each, CustomDefinition)}
    raw_names = {name for name, each in allowed.items() if each.lark is not None}
    only_first = not body.parallel_tool_calls
    if mode == "named":
        [chosen] = allowed.values()
        return ToolUse(
            make_parser=lambda: ArgumentsParser(chosen.name, is_custom=bool(customs)),
            form=form or LIST,
            grammar=arguments_grammar(chosen),
        )

    def reading_inputs(parser: CallParser) -> CallParser:
        return InputParser(parser, customs - raw_names) if customs > raw_names else parser

    if mode == "required":
        grammar = calls_grammar(list(allowed.values()), only_one=only_first)
        return ToolUse(
            make_parser=lambda: reading_inputs(ToolParser(LIST, allowed, raw_names=raw_names)),
            form=form or LIST,
            grammar=grammar,
        )
    if form is None:
        raise InvalidRequest(
            "the format of this model's tool calls is unknown; ask the operator to set models[].tool_parser, or send "
            'tool_choice: "none"',
            param="tools",
        )
    texts = {name: texts_of(parameters_of(each)) for name, each in allowed.items()}
    # If only some of the tools are allowed, the model needs a grammar that excludes calls of the other tools.
    is_strict = len(allowed) < len(offered) or any(each.strict for each in allowed.values())
    return ToolUse(
        make_parser=lambda: reading_inputs(
            ToolParser(form, allowed, only_first=only_first, is_strict=is_strict, raw_names=raw_names, texts=texts)
        ),
        form=form,
        token_ids=tokenizer.special_ids(form.special_texts),
        grammar=_free_calls_grammar(list(allowed.values()), form, grammar_of(body), is_strict=is_strict),
    )


def texts_of(parameters: Json) -> frozenset[str]:
    """Return the names of the arguments that the schema of the parameters limits to strings or null."""
    properties = parameters.get("properties")
    kinds = (
        {name: _kinds(schema) - {"null"} for name, schema in properties.items()} if isinstance(properties, dict) else {}
    )
    return frozenset(name for name, own in kinds.items() if own == {"string"})


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema and its choices name. A schema or choice without a type counts as `any`."""
    if not isinstance(schema, dict):
        return {"any"}
    named = schema.get("type")
    kinds = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    for choice in schema.get("anyOf") or schema.get("oneOf") or ():
        kinds |= _kinds(choice)
    return kinds or {"any"}


def _free_calls_grammar(
    functions: Sequence[Definition], form: ToolFormat, document: Grammar | None, *, is_strict: bool
) -> Grammar | None:
    """Return the grammar of an output with optional calls, or None if the request's own grammar is sufficient."""
    if document is not None and document.kind is GrammarKind.JSON_SCHEMA:
        return document_or_calls_grammar(
            json.loads(document.text), functions, form, param=document.param, is_lenient=document.is_lenient
        )
    return strict_calls_grammar(functions, form) if document is None and is_strict else None
