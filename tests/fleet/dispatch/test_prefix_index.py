"""Which replica should have the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.dispatch import PrefixIndex

BLOCK = 4


class Index(PrefixIndex):
    """Takes prompts."""

    def add(self, replica_id: str, token_ids: Sequence[int], *, salt: str = "") -> None:
        super().add(replica_id, self.chain(token_ids, salt=salt))

    def match(self, token_ids: Sequence[int], *, salt: str = "") -> dict[str, int]:
        return super().match(self.chain(token_ids, salt=salt))


def index(max_tokens: int = 1000) -> Index:
    return Index(block_size=BLOCK, max_tokens=max_tokens)


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_equal_blocks_after_different_beginnings_do_not_match() -> None:
    sent = index()
    sent.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert sent.match([9, 9, 9, 9, 5, 6, 7, 8]) == {}


def test_callers_with_different_salts_share_nothing() -> None:
    sent = index()
    sent.add("a", prompt(8), salt="tenant-1")
    assert sent.match(prompt(8), salt="tenant-1") == {"a": 8}
    assert sent.match(prompt(8), salt="tenant-2") == {}
    assert sent.match(prompt(8)) == {}


def test_the_longest_unused_prompt_is_forgotten_first() -> None:
    sent = index(max_tokens=16)
    sent.add("a", prompt(8))
    sent.add("a", prompt(8, start=100))
    sent.add("a", prompt(8))
    sent.add("a", prompt(8, start=200))
    assert sent.match(prompt(8)) == {"a": 8}
    assert sent.match(prompt(8, start=100)) == {}
    assert sent.match(prompt(8, start=200)) == {"a": 8}


def test_a_prompt_is_forgotten_from_its_end() -> None:
    sent = index(max_tokens=24)
    sent.add("a", prompt(16))
    sent.add("a", prompt(12, start=100))
    assert sent.match(prompt(16)) == {"a": 12}


def test_each_replica_has_a_memory_of_its_own_and_those_that_are_gone_have_none() -> None:
    sent = index(max_tokens=8)
    sent.add("a", prompt(8))
    sent.add("b", prompt(8, start=100))
    assert sent.match(prompt(8)) == {"a": 8}
    sent.keep_only({"b"})
    assert sent.match(prompt(8)) == {}
    assert sent.match(prompt(8, start=100)) == {"b": 8}


PROMPTS = st.lists(st.integers(0, 1), max_size=5 * BLOCK).map(tuple)


@given(added=st.lists(st.tuples(st.sampled_from("ab"), PROMPTS), max_size=20), asked=PROMPTS)
def test_a_match_is_what_a_list_of_all_that_was_sent_says(
    added: list[tuple[str, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    sent = index(max_tokens=100_000)
    for replica_id, token_ids in added:
        sent.add(replica_id, token_ids)
    expected: dict[str, int] = {}
    for length in range(BLOCK, len(asked) + 1, BLOCK):
        holders = {replica_id for replica_id, token_ids in added if token_ids[:length] == asked[:length]}
        expected |= dict.fromkeys(holders, length)
    assert sent.match(asked) == expected


@given(added=st.lists(PROMPTS, max_size=30), max_blocks=st.integers(1, 6))
def test_the_last_prompt_is_always_held_as_far_as_there_is_room(added: list[tuple[int, ...]], max_blocks: int) -> None:
    sent = index(max_tokens=max_blocks * BLOCK)
    for token_ids in added:
        sent.add("a", token_ids)
        num_blocks = min(max_blocks, len(token_ids) // BLOCK)
        assert sent.match(token_ids) == ({"a": num_blocks * BLOCK} if num_blocks else {})
