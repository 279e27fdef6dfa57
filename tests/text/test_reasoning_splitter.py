"""Reasoning taken out of a text, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.request import FinishReason, TokenDelta
from app.text import GeneratedText, Reasoning, ReasoningMarks, marks_of
from app.text.reasoning import MARKS, ReasoningSplitter
from tests.text.small_tokenizers import build_byte_level

THINK, MISTRAL, GEMMA = MARKS


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(Reasoning(marks=THINK, is_open=is_open))
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nWell, 2 < 3.\n</think>\n\nFive.", False, ("Well, 2 < 3.", "Five.")),
        ("\n <think>a</think>b", False, ("a", "b")),
        ("Well.\n\nSo.</think>\nFive. </think>", True, ("Well.\n\nSo.", "Five. </think>")),
        ("<think>\n\n</think>\n\nFive.", False, ("", "Five.")),
        ("Five <think>a</think>", False, ("", "Five <think>a</think>")),
        (" Five.\n", False, ("", " Five.\n")),
        ("<thin", False, ("", "<thin")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("cut short \n", True, ("cut short", "")),
        ("", False, ("", "")),
        (" " * 2000 + "<think>a</think>", False, ("", " " * 2000 + "<think>a</think>")),
    ],
)
def test_reasoning_and_answer(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split([text], is_open=is_open) == expected
    assert split(list(text), is_open=is_open) == expected


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "a", " ", "\n", "b c", "ink>"]), max_size=12),
    cuts=st.sets(st.integers(0, 60)),
    is_open=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_however_the_text_is_cut_the_parts_are_the_same(parts: list[str], cuts: set[int], is_open: bool) -> None:
    text = "".join(parts)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert split(pieces, is_open=is_open) == split([text], is_open=is_open)


def pushed(
    text: str, sizes: list[int], *, stop: tuple[str, ...] = (), is_open: bool = False
) -> tuple[str, str, int, str | None]:
    """Reasoning, text, reasoning tokens, stop string; each byte is a token, in deltas of these sizes, over and over."""
    tokenizer = build_byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    generated = GeneratedText(tokenizer, stop=stop, reasoning=Reasoning(marks=THINK, is_open=is_open))
    found, at = [], 0
    while at < len(ids):
        size = sizes[len(found) % len(sizes)]
        is_last = at + size >= len(ids)
        found.append(generated.push(TokenDelta("r", ids[at : at + size], FinishReason.LENGTH if is_last else None)))
        at += size
        if found[-1].finish_reason is not None:
            break
    return (
        "".join(each.reasoning for each in found),
        "".join(each.text for each in found),
        sum(each.num_reasoning_tokens for each in found),
        found[-1].stop_string,
    )


@pytest.mark.parametrize("sizes", [[1], [3], [1000], [1, 7]])
def test_tokens_of_reasoning_are_counted_with_their_marks(sizes: list[int]) -> None:
    thought = "<think>\nHm é.\n</think>"
    assert pushed(f"{thought}\n\n3 4", sizes) == ("Hm é.", "3 4", len(thought.encode()), None)
    assert pushed("3 4", sizes) == ("", "3 4", 0, None)
    assert pushed("<think>cut", sizes) == ("cut", "", 10, None)
    assert pushed("a</think>b", sizes, is_open=True) == ("a", "b", 9, None)


@pytest.mark.parametrize("sizes", [[1], [4], [1000]])
def test_a_stop_string_ends_the_answer_and_not_the_reasoning(sizes: list[int]) -> None:
    assert pushed("<think>3 5</think>3 4 5 6", sizes, stop=(" 5",)) == ("3 5", "3 4", 18, " 5")
    assert pushed("<think>3 5</think>3 4", sizes, stop=(" 5",)) == ("3 5", "3 4", 18, None)


def test_the_marks_are_those_of_the_chat_template() -> None:
    assert marks_of(build_byte_level("{{ messages }}")) is None
    assert marks_of(build_byte_level("{{ '<think></think>' }}")) is THINK
    assert marks_of(build_byte_level("{{ '[THINK][/THINK]' }}")) is MISTRAL
    assert marks_of(build_byte_level()) is None


@pytest.mark.parametrize(
    ("marks", "written"),
    [(MISTRAL, "[THINK]a[/THINK]b"), (GEMMA, "<|channel>thought\na<channel|>b")],
    ids=["mistral", "gemma"],
)
def test_marks_that_are_special_tokens_are_seen(marks: ReasoningMarks, written: str) -> None:
    tokenizer = build_byte_level(None, marks.special_texts)
    ids = tokenizer.encode(written, add_special_tokens=False)
    generated = GeneratedText(tokenizer, reasoning=Reasoning(marks=marks, is_open=False))
    found = generated.push(TokenDelta("r", ids, FinishReason.LENGTH))
    assert (found.reasoning, found.text, found.num_reasoning_tokens) == ("a", "b", len(ids) - 1)
