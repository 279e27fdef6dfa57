"""Thoughts before outputs: free text between two marks, at most as long as its budget; then the form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind, Thought
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import advance, allowed_ids, begun

# The bytes, texts that are parts of marks or go on past them, and special tokens.
LONGER = (b"<thi", b"nk>", b"nk>\n", b"</think>", b"ink>", b"ink>x", b"\n\n")
SPECIAL = (b"<|end|>", b"[THINK]", b"[/THINK]")
TOKENS = (*(bytes([byte]) for byte in range(256)), *LONGER, *SPECIAL)
END, BEGIN_MARK, END_MARK = (TOKENS.index(text) for text in SPECIAL)
VOCABULARY = Vocabulary(tokens=TOKENS, special_token_ids=(END, BEGIN_MARK, END_MARK), eos_token_ids=(END,))
TAG = Grammar(GrammarKind.REGEX, "<[ab]>")  # begins as the mark does
ANY = Grammar(GrammarKind.TEXT, "")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: VOCABULARY)
    yield made
    made.close()


def matcher(
    grammars: Grammars,
    grammar: Grammar,
    *,
    marks: tuple[str, str] = ("<think>", "</think>"),
    is_open: bool = False,
    budget: int | None = None,
    generated: Sequence[int] = (),
) -> Matcher:
    asked = Grammar(grammar.kind, grammar.text, thought=Thought(*marks, is_open=is_open, max_tokens=budget))
    return begun(grammars, asked, generated_token_ids=tuple(generated))


def token(text: bytes) -> int:
    return TOKENS.index(text)


def test_a_thought_is_free_text_and_the_form_follows_it(grammars: Grammars) -> None:
    for begin in (b"<think>", [token(b"<thi"), token(b"nk>")]):
        for end in (b"</think>", [token(b"</think>")], [*b"</th", token(b"ink>")]):
            text = advance(matcher(grammars, TAG), begin)
            assert set(range(len(TOKENS))) - set(allowed_ids(text)) == {END}, "the output may not end in its thought"
            advance(text, [*b"So: <a> \xff", *end])
            assert set(allowed_ids(text)) == {*b"\t\n\v\f\r <", token(b"\n\n")}
            advance(text, [*b"\n <b>"])
            assert allowed_ids(text) == [END]


def test_white_space_behind_a_thought_has_an_end(grammars: Grammars) -> None:
    text = advance(matcher(grammars, TAG), b"<think></think>    ")
    assert allowed_ids(text) == [*b"<"]


def test_a_thought_may_be_left_out_though_the_output_begins_as_its_mark(grammars: Grammars) -> None:
    text = advance(matcher(grammars, TAG, budget=3), b"<")
    assert set(allowed_ids(text)) == {*b"abt"}
    assert allowed_ids(advance(text, b"a>")) == [END]
    thinking = advance(matcher(grammars, TAG), b"<t")
    assert set(allowed_ids(thinking)) == {*b"h"}
    advance(thinking, b"hink>x</think><a>")


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_behind_its_budget_a_thought_can_only_end(grammars: Grammars, budget: int) -> None:
    for form, is_open in ((TAG, False), (TAG, True), (ANY, False), (ANY, True)):
        text = matcher(grammars, form, is_open=is_open, budget=budget)
        advance(text, b"" if is_open else b"<think>")
        advance(text, b"x" * budget)
        assert allowed_ids(text) == [token(b"</think>")]
        advance(text, [token(b"</think>"), *b"<a>"])


def test_a_mark_that_the_thought_has_begun_is_completed(grammars: Grammars) -> None:
    text = advance(matcher(grammars, TAG, is_open=True, budget=4), b"</th")
    assert allowed_ids(text) == [token(b"ink>")]
    assert token(b"ink>x") not in allowed_ids(advance(matcher(grammars, TAG, is_open=True), b"</th"))


def test_marks_may_be_special_tokens(grammars: Grammars) -> None:
    marks = ("[THINK]", "[/THINK]")
    text = advance(matcher(grammars, TAG, marks=marks, budget=2), [BEGIN_MARK, *b"xy"])
    assert allowed_ids(text) == [END_MARK]
    advance(text, [END_MARK, *b"<a>"])


def test_without_a_form_all_but_the_budget_is_free(grammars: Grammars) -> None:
    everything = set(range(len(TOKENS)))
    assert set(allowed_ids(matcher(grammars, ANY, budget=2))) == everything
    answer = advance(matcher(grammars, ANY, budget=2), b"<thought> is <think>")
    assert set(allowed_ids(answer)) == everything, "a mark in an answer is text"
    for begin in ([*b"\n <think>x"], [token(b"<thi"), token(b"nk>\n")]):  # the last is the thought's first token too
        text = advance(matcher(grammars, ANY, budget=2), begin)
        assert END in allowed_ids(text)
        assert allowed_ids(advance(text, b"y")) == [token(b"</think>")]
        assert set(allowed_ids(advance(text, [token(b"</think>")]))) == everything


def test_requests_that_share_a_form_have_each_their_own_marks_and_budget(grammars: Grammars) -> None:
    assert allowed_ids(begun(grammars, TAG)) == [*b"<"]
    one, two = (matcher(grammars, TAG, is_open=True, budget=budget) for budget in (1, 2))
    other = matcher(grammars, TAG, marks=("[THINK]", "[/THINK]"), is_open=True, budget=1)
    endless = matcher(grammars, TAG)
    assert {*b"<"} < set(allowed_ids(endless))
    assert allowed_ids(advance(one, b"x")) == [token(b"</think>")]
    assert len(allowed_ids(advance(two, b"x"))) > 250
    assert allowed_ids(advance(other, b"x")) == [END_MARK]


@pytest.mark.parametrize("form", [TAG, ANY])
def test_another_engine_goes_on_from_anywhere(grammars: Grammars, form: Grammar) -> None:
    for whole in (
        [*b"<think>x </th", token(b"ink>"), *b"\n<b>", END],
        [token(b"<thi"), token(b"nk>"), *b"abcdef", token(b"</think>"), *b"<a>", END],
        [*b"<a>", END],
    ):
        other = matcher(grammars, form, budget=6)
        for cut in range(len(whole)):
            resumed = matcher(grammars, form, budget=6, generated=whole[:cut])
            assert resumed.allowed() == other.allowed()
            advance(other, whole[cut : cut + 1])
