"""Drafts from the tokens that followed the same tokens before."""

from __future__ import annotations

import pytest

from app.engine.speculation import prompt_lookup
from app.engine.speculation.prompt_lookup import PromptLookup


def test_what_followed_the_last_tokens_is_drafted_no_more_than_matched_before_it() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 7, 9, 9, 2, 3, 4))
    assert lookup.draft(8) == [5, 6, 7]
    assert PromptLookup((1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4)).draft(8) == [5, 6, 7, 9]
    assert PromptLookup((1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4)).draft(2) == [5, 6]


@pytest.mark.parametrize("prompt", [(), (1,), (1, 2, 3), (1, 2, 3, 4, 5, 6)])
def test_nothing_is_drafted_without_a_match(prompt: tuple[int, ...]) -> None:
    assert PromptLookup(prompt).draft(8) == []


def test_a_source_that_goes_on_to_match_is_followed_though_the_ngram_stood_elsewhere_later() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 7, 8, 20, 4, 5, 6, 30, 1, 2, 3))
    assert lookup.draft(3) == [4, 5, 6]
    lookup.follow([4, 5, 6])
    assert lookup.draft(2) == [7, 8], "30 follows the latest 4, 5, 6"


def test_after_another_token_the_latest_match_counts() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3))
    assert lookup.draft(2) == [4, 5]
    lookup.follow([9])
    assert lookup.draft(2) == []
    lookup.follow([9, 5, 6, 7])
    assert lookup.draft(2) == [8, 1]


def test_output_is_looked_up_as_the_prompt_is() -> None:
    lookup = PromptLookup((1, 2))
    lookup.follow([5, 6, 7, 8, 9])
    lookup.follow([5, 6, 7, 8, 9, 5, 6, 7])
    assert lookup.draft(8) == [8, 9, 5]


def test_a_match_that_ends_with_the_tokens_is_a_cycle() -> None:
    assert PromptLookup((4, 4, 4, 4, 4)).draft(4) == [4, 4, 4, 4]
    assert PromptLookup((1, 2, 1, 2, 1, 2, 1)).draft(4) == [2, 1, 2, 1]


def test_of_a_long_prompt_the_last_tokens_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "MAX_PROMPT_TOKENS", 8)
    assert PromptLookup((1, 2, 3, 4, 9, 9, 9, 9, 9, 1, 2, 3)).draft(4) == []
    assert PromptLookup((9, 9, 9, 9, 1, 2, 3, 4, 5, 1, 2, 3)).draft(4) == [4, 5, 1]
