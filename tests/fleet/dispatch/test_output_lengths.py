"""Expected output lengths, learnt by the limit that was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.dispatch import OutputLengths


def test_the_limit_is_expected_while_nothing_is_known() -> None:
    lengths = OutputLengths()
    for _ in range(3):
        lengths.learn(256, 10)
    assert lengths.expected_tokens(256) == 256


def test_the_mean_of_those_with_a_like_limit_is_expected() -> None:
    lengths = OutputLengths()
    for short, long in ((10, 300), (20, 500)) * 5:
        lengths.learn(64, short)
        lengths.learn(1024, long)
    assert lengths.expected_tokens(100) == 15
    assert lengths.expected_tokens(2000) == 400


def test_for_a_limit_that_is_new_the_mean_of_all_is_expected() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.learn(64, 30)
    assert lengths.expected_tokens(4096) == 30
    assert lengths.expected_tokens(16) == 16


def test_it_follows_when_outputs_change() -> None:
    lengths = OutputLengths()
    for length in [20] * 500 + [200] * 300:
        lengths.learn(256, length)
    assert 195 <= lengths.expected_tokens(256) <= 200


@given(ended=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 4096))), limit=st.integers(1, 10_000))
def test_what_is_expected_is_at_least_one_token_and_at_most_the_limit(ended: list[tuple[int, int]], limit: int) -> None:
    lengths = OutputLengths()
    for max_tokens, num_generated in ended:
        lengths.learn(max_tokens, num_generated)
    assert 1 <= lengths.expected_tokens(limit) <= limit
