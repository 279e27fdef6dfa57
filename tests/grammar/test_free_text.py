"""Grammars of tags: free text allows every token, and each marked piece matches its grammar."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest
from app.grammar.free_text import FreeText, FreeTextState, TokenTable, Trigger
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import advance, allowed_ids, begun, request_for

# The bytes, texts that write up to and past triggers, and special tokens.
LONGER = (
    b"<tool",
    b"_call>",
    b"_call>{",
    b"x<tool_call>",
    b"<tool_call>[",
    b'{"name',
    b'": "f"',
    b'": "f",',
    b"\xe2\x82",
    b"",
)
SPECIAL = (b"<|end|>", b"<|other|>", b"[CALLS]")
TOKENS = (*(bytes([byte]) for byte in range(256)), *LONGER, *SPECIAL)
END, OTHER, CALLS = (TOKENS.index(text) for text in SPECIAL)
TABLE = Vocabulary(tokens=TOKENS, special_token_ids=(END, OTHER, CALLS), eos_token_ids=(END,))
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def small() -> Iterator[Grammars]:
    made = Grammars(lambda: TABLE)
    yield made
    made.close()


def tags(*each: dict[str, Any], schemas: Sequence[Any] = (SCHEMA,)) -> Grammar:
    written = [{"is_opening": False, "is_last": False} | tag for tag in each]
    named = [{"schema": schema, "is_lenient": False} for schema in schemas]
    return Grammar(GrammarKind.TAGS, json.dumps({"schemas": named, "tags": written}))


CALL = {"trigger": "<tool_call>", "content": [{"schema": 0}, "</tool_call>"]}


def ids(text: bytes) -> list[int]:
    """Byte by byte."""
    return list(text)


def test_outside_of_pieces_every_token_may_be_drawn(small: Grammars) -> None:
    text = begun(small, tags(CALL))
    draw = random.Random(1)
    everything = set(range(len(TOKENS)))
    past = {TOKENS.index(b"<tool_call>[")}  # and what writes past a trigger that has begun
    for _ in range(3000):
        allowed = set(allowed_ids(text))
        assert everything - allowed <= past | {TOKENS.index(b"_call>{")}
        # Whatever it is: bytes that are no text, special tokens, the end token where it ends nothing.
        token_id = draw.choice(sorted(allowed - {TOKENS.index(b"x<tool_call>"), TOKENS.index(b"_call>")}))
        text.advance(token_id)


def test_a_piece_begins_where_its_trigger_is_complete_however_it_is_written(small: Grammars) -> None:
    ways = [
        ids(b"So: <tool_call>"),
        [TOKENS.index(b"<tool"), TOKENS.index(b"_call>")],
        [TOKENS.index(b"x<tool_call>")],
        [*ids(b"<tool_<tool"), TOKENS.index(b"_call>")],
        [*ids(b"<tool"), OTHER, *ids(b"_call>")],  # with special tokens hidden it reads as the trigger
    ]
    for way in ways:
        text = begun(small, tags(CALL))
        advance(text, way)
        assert allowed_ids(text) == ids(b"{"), way
        advance(text, ids(b'{"a":22}</tool_call>'))
        assert len(allowed_ids(text)) > 250, "free again"
        advance(text, ids(b" And <tool_call>"))
        assert allowed_ids(text) == ids(b"{")


def test_no_token_writes_past_a_trigger(small: Grammars) -> None:
    text = begun(small, tags(CALL))
    assert TOKENS.index(b"<tool_call>[") not in allowed_ids(text)
    assert TOKENS.index(b"_call>{") in allowed_ids(text), "nothing has begun"
    advance(text, ids(b"<tool"))
    assert TOKENS.index(b"_call>{") not in allowed_ids(text)


def test_a_special_token_is_a_trigger_as_its_text_is(small: Grammars) -> None:
    tag = {"trigger": "[CALLS]", "content": ["f", "[CALLS]", {"schema": 0}], "is_last": True}
    for begin in ([CALLS], ids(b"[CALLS]")):
        for again in ([CALLS], ids(b"[CALLS]")):
            text = begun(small, tags(tag))
            advance(text, [*begin, *ids(b"f"), *again, *ids(b'{"a":1}')])
            assert allowed_ids(text) == [END], "it is the last"


def test_several_triggers_have_each_their_own(small: Grammars) -> None:
    one = {"trigger": "<a", "content": ["=", {"schema": 0}, ">"]}
    other = {"trigger": "<bc", "content": [{"pattern": "[0-9]+"}]}
    third = {"trigger": "<a", "content": ["x"]}
    text = begun(small, tags(one, other, third))
    advance(text, ids(b"<b<a"))
    assert set(allowed_ids(text)) == {*b"=x"}
    advance(text, ids(b'={"a":1}><bc7'))
    assert set(b"0123456789") < set(allowed_ids(text))
    assert ord("!") in allowed_ids(text), "a piece that may end may be followed by text"
    advance(text, ids(b"7!<ax"))


def test_an_opening_is_one_only_at_the_beginning(small: Grammars) -> None:
    opening = {"trigger": '{"name":"f"', "is_opening": True, "content": [",", {"schema": 0}, "}"], "is_last": True}
    for begin in (ids(b' {\n"name" : "f"'), [ord("{"), *ids(b'"name'), TOKENS.index(b'": "f"')],
                  [OTHER, TOKENS.index(b'{"name'), TOKENS.index(b'": "f"')]):  # fmt: skip
        text = begun(small, tags(opening))
        advance(text, begin)
        assert allowed_ids(text) == ids(b",")
        advance(text, ids(b',{"a":1}}'))
        assert allowed_ids(text) == [END]
    for other in (b'{"name":"g"', b'{"na me":"f"', b'x{"name":"f"', b'\xc2\xa0{"name":"f"'):
        text = begun(small, tags(opening))
        advance(text, ids(other))
        assert len(allowed_ids(text)) == len(TOKENS), other
    text = begun(small, tags(opening))
    advance(text, [TOKENS.index(b'{"name')])
    assert TOKENS.index(b'": "f",') not in allowed_ids(text), "it would write past it"


def test_another_engine_goes_on_from_anywhere(small: Grammars) -> None:
    whole = [*ids(b"Well <tool"), TOKENS.index(b"_call>"), *ids(b'{"a":22}</tool_call> and <tool_call>{"a":1}')]
    for cut in range(len(whole) + 1):
        resumed = begun(small, tags(CALL), generated_token_ids=tuple(whole[:cut]))
        other = advance(begun(small, tags(CALL)), whole[:cut])
        assert resumed.allowed() == other.allowed()
        advance(resumed, whole[cut:])


def test_what_stands_in_a_piece_is_compiled_before_anything_is_written(small: Grammars) -> None:
    for grammar in (
        tags(CALL, schemas=[{"type": "nonsense"}]),
        tags(CALL, schemas=[{"type": "string", "minLength": 9, "maxLength": 3}]),
        tags({"trigger": "<a", "content": [{"pattern": "(("}]}),
    ):
        refused = small.matcher_of(request_for(grammar)).exception()
        assert isinstance(refused, InvalidRequest)
        assert refused.code == "invalid_grammar"


def test_a_place_holds_the_longest_beginning_of_a_trigger() -> None:
    free = FreeText(TokenTable(TABLE), [Trigger(b"<tool_call>", False), Trigger(b"ool!", False)])
    place = free.beginning
    for token_id in ids(b"x<tool"):
        reached = free.after(place, token_id)
        assert isinstance(reached, FreeTextState)
        place = reached
    assert place.tail == b"<tool"
    assert free.after(place, ord("!")) == 1


def naive_search(texts: Sequence[bytes], part: bytes) -> list[int]:
    return [token_id for token_id, text in enumerate(texts) if part in text[:-1]]


@given(texts=st.lists(st.text("ab<", max_size=6)), part=st.text("ab<", min_size=1, max_size=3))
def test_the_search_finds_the_tokens_that_go_on_behind_a_text(texts: list[str], part: str) -> None:
    tokens = tuple(text.encode() for text in ["</s>", *texts])
    table = TokenTable(Vocabulary(tokens=tokens, special_token_ids=(0,), eos_token_ids=(0,)))
    for _ in range(2):  # the second may be remembered
        assert list(table.containing(part.encode())) == naive_search([b"", *tokens[1:]], part.encode())


def test_many_triggers_do_not_read_every_token_in_python() -> None:
    draw = random.Random(1)
    words = {"".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))).encode() for _ in range(40_000)}
    table = TokenTable(Vocabulary(tokens=(b"</s>", *words), special_token_ids=(0,), eos_token_ids=(0,)))
    triggers = [Trigger(b"<tool number %d>" % number, is_opening=False) for number in range(16)]
    began_at = time.thread_time()
    for trigger in triggers:
        naive_search(table.texts, trigger.text)
    naive_s = time.thread_time() - began_at
    began_at = time.thread_time()
    FreeText(table, triggers)
    assert time.thread_time() - began_at < naive_s / 3
