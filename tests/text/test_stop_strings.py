from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text import StopStrings


def feed(stop: list[str], pieces: list[str]) -> tuple[list[str], StopStrings]:
    stop_strings = StopStrings(stop)
    out = [stop_strings.push(piece) for piece in pieces]
    return [*out, stop_strings.flush()], stop_strings


def first_match(stop: list[str], text: str) -> tuple[str, str | None]:
    """The same by trying every end: the text before the stop string that is complete first, and that string."""
    for end in range(1, len(text) + 1):
        complete = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_across_pieces_is_held_back_and_cut_off() -> None:
    out, stop_strings = feed(["END"], ["one E", "N", "D two", "three"])
    assert out == ["one ", "", "", "", ""]
    assert stop_strings.found == "END"


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["bc", "abcd"], "abcd", "a"),  # "bc" is complete first
        (["c", "abc"], "abc", ""),  # they end together: the longer
        (["aab"], "aaab", "a"),
        (["abab", "ba"], "abab", "a"),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stop: list[str], text: str, shown: str) -> None:
    assert "".join(feed(stop, [text])[0]) == shown
    assert "".join(feed(stop, list(text))[0]) == shown


@settings(max_examples=500)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
)
def test_the_result_does_not_depend_on_how_the_text_was_cut(stop: list[str], pieces: list[str]) -> None:
    out, stop_strings = feed(stop, pieces)
    assert ("".join(out), stop_strings.found) == first_match(stop, "".join(pieces))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text(alphabet="ab"))
def test_no_more_is_held_than_could_become_a_stop_string(stop: list[str], text: str) -> None:
    stop_strings = StopStrings(stop)
    shown = "".join(stop_strings.push(character) for character in text)
    if stop_strings.found is None:
        held = text[len(shown) :]
        assert held == "" or any(candidate.startswith(held) for candidate in stop)


def test_the_stop_string_itself_comes_out_where_it_is_shown() -> None:
    found = StopStrings(["END"], is_shown=True)
    assert "".join([found.push("abE"), found.push("N"), found.push("Dxy"), found.push("z")]) == "abEND"
    assert found.found == "END"
