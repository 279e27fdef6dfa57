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


def follow(lookup: PromptLookup, *token_ids: int) -> list[int]:
    """What is drafted behind these generated tokens, at most 8."""
    lookup.follow(token_ids)
    return lookup.draft(8)


def test_a_prediction_is_followed_from_its_beginning_to_its_end() -> None:
    lookup = PromptLookup((1, 2, 3), tuple(range(20, 32)))
    assert lookup.draft(8) == [20, 21, 22, 23, 24, 25, 26, 27]
    assert lookup.is_predicted
    output = [20, 21, 22, 23, 24, 25, 26, 27, 28]
    assert follow(lookup, *output) == [29, 30, 31]
    assert follow(lookup, *output, 29, 30, 31) == []
    assert follow(lookup, *output, 29, 30, 31, 1, 2) == []
    assert not lookup.is_predicted, "the prompt does not follow the prediction"


@pytest.mark.parametrize(
    ("written", "goes_on"),
    [((20, 21, 22, 90, 24), 25), ((20, 21, 22, 90, 91, 92, 23), 24), ((20, 21, 22, 26), 27), ((90, 91, 20), 21)],
    ids=["replaced", "inserted", "left out", "before it"],
)
def test_behind_an_edit_one_equal_token_near_it_finds_the_place_again(written: tuple[int, ...], goes_on: int) -> None:
    lookup = PromptLookup((1, 2, 3), tuple(range(20, 60)))
    assert follow(lookup, *written) == list(range(goes_on, goes_on + 8))
    assert follow(lookup, *written, goes_on, goes_on + 1) == list(range(goes_on + 2, goes_on + 10))


def test_of_several_places_near_an_edit_the_one_with_most_equal_tokens_before_it_counts() -> None:
    lookup = PromptLookup((), (20, 21, 22, 23, 5, 30, 31, 24, 5, 40, 41))
    assert follow(lookup, 20, 21, 22, 24, 5)[:1] == [40]
    assert follow(PromptLookup((), (20, 21, 22, 23, 5, 30, 31, 24, 5, 40, 41)), 20, 21, 22, 90, 5)[:1] == [30]


def test_text_that_was_moved_is_found_by_an_ngram_and_before_the_prompts() -> None:
    prediction = tuple(range(100, 200))
    lookup = PromptLookup((1, 170, 171, 172, 50, 51), prediction)
    assert follow(lookup, 100, 101, 102, 170, 171, 172)[:2] == [173, 174]
    assert lookup.is_predicted
    assert follow(lookup, 100, 101, 102, 170, 171, 172, 173, 103, 104, 105)[:1] == [106], "and back"


def test_a_place_that_was_found_by_chance_is_forgotten() -> None:
    prediction = (20, 21, 22, 23, *range(30, 40), 5, *range(40, 50))
    lookup = PromptLookup((), prediction)
    assert follow(lookup, 20, 21, 22, 90, 5)[:2] == [40, 41]
    assert follow(lookup, 20, 21, 22, 90, 5, 91) == []
    assert follow(lookup, 20, 21, 22, 90, 5, 91, 23)[:2] == [30, 31], "not only behind the 5"


def test_without_a_match_in_the_prediction_the_prompt_is_looked_up() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6), (70, 71))
    assert follow(lookup, 1, 2, 3) == [4, 5, 6]
    assert not lookup.is_predicted
