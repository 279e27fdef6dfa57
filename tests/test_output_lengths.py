"""How long outputs should be, by those before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.output_lengths import MAX_KINDS, WINDOW, OutputLengths


def taught(*outputs: tuple[str, int, int], by_median: bool = True) -> OutputLengths:
    """Of (kind, length, number) each; all of them are of the kind `all`, too."""
    lengths = OutputLengths(by_median=by_median)
    for kind, length, number in outputs:
        for _ in range(number):
            lengths.learn((kind, "all"), length)
    return lengths


@pytest.mark.parametrize("by_median", [True, False])
@pytest.mark.parametrize(
    ("outputs", "kind", "expected"),
    [
        ([("a", 5, 3)], "a", None),  # few say nothing
        ([("a", 10, 8), ("b", 200, 8)], "a", 10),
        ([("a", 10, 8), ("b", 200, 8)], "b", 200),
        ([("a", 30, 20)], "new", 30),  # it is taken for an average one
        ([("a", 10, 200), ("a", 100, WINDOW)], "a", 100),  # they have changed
        ([("a", 5000, 10)], "a", 1000),  # the limit
        ([("a", 0, 10)], "a", 1),
    ],
)
def test_the_first_kind_of_which_enough_is_known_says_what_is_expected(
    outputs: list[tuple[str, int, int]], kind: str, expected: int | None, by_median: bool
) -> None:
    assert taught(*outputs, by_median=by_median).expected((kind, "all"), at_most=1000) == expected


def test_the_median_halves_them_and_the_mean_adds_up() -> None:
    outputs = [("a", length, 1) for length in (*range(1, 41), 1000)]
    assert taught(*outputs).expected(("a",), at_most=1000) == 21
    assert taught(*outputs, by_median=False).expected(("a",), at_most=1000) == round((820 + 1000) / 41)


def test_nothing_is_shorter_than_it_must_be() -> None:
    assert taught(("a", 5, 10)).expected(("a",), at_least=20, at_most=99) == 20


def test_its_memory_is_bounded() -> None:
    lengths = taught(*((f"tenant-{number}", 3, 1) for number in range(2 * MAX_KINDS)))
    assert len(lengths._windows) <= MAX_KINDS
    for length in range(1000):
        lengths.learn(("a",), length)
    assert max(len(window.by_length) for window in lengths._windows.values()) == WINDOW


@given(
    ended=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4096))), limit=st.integers(1, 10_000),
    by_median=st.booleans(),
)  # fmt: skip
def test_what_is_expected_is_at_least_one_token_and_at_most_the_limit(
    ended: list[tuple[int, int]], limit: int, by_median: bool
) -> None:
    lengths = OutputLengths(by_median=by_median)
    for kind, num_generated in ended:
        lengths.learn((kind, None), num_generated)
    assert 1 <= (lengths.expected((0, None), at_most=limit) or limit) <= limit
