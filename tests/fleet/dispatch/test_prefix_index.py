"""Which replica should have the beginning of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.engine.prefix import digests_of
from app.fleet.dispatch import PrefixChanges, PrefixIndex, is_indexed

BLOCK = 4


def chain_of(token_ids: Sequence[int], *, salt: str = "") -> list[int]:
    return digests_of(token_ids, salt=salt, block_size=BLOCK)


class Index(PrefixIndex):
    """Takes prompts. Each is a request of its own."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK)
        self.num_requests = 0

    def send(self, replica_id: str, token_ids: Sequence[int], *, salt: str = "") -> str:
        self.num_requests += 1
        self.add(str(self.num_requests), replica_id, chain_of(token_ids, salt=salt))
        return str(self.num_requests)

    def hold(self, replica_id: str, token_ids: Sequence[int], *, is_all: bool = False) -> None:
        self.note(replica_id, PrefixChanges(held=array("q", chain_of(token_ids)).tobytes(), is_all=is_all))

    def matched(self, token_ids: Sequence[int], *, salt: str = "") -> dict[str, int]:
        return self.match(chain_of(token_ids, salt=salt))


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_equal_blocks_after_different_beginnings_do_not_match() -> None:
    index = Index()
    index.send("a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert index.matched([9, 9, 9, 9, 5, 6, 7, 8]) == {}


def test_callers_with_different_salts_share_nothing() -> None:
    index = Index()
    index.send("a", prompt(8), salt="tenant-1")
    assert index.matched(prompt(8), salt="tenant-1") == {"a": 8}
    assert index.matched(prompt(8), salt="tenant-2") == {}
    assert index.matched(prompt(8)) == {}


def test_what_a_request_was_sent_with_counts_until_it_ends_and_what_a_replica_says_until_it_is_gone() -> None:
    index = Index()
    first, second = index.send("a", prompt(8)), index.send("a", prompt(12))
    index.end(first)
    assert index.matched(prompt(16)) == {"a": 12}
    index.end(second)
    index.end("unknown")
    assert index.matched(prompt(16)) == {}
    index.hold("a", prompt(16))
    gone = chain_of(prompt(16))[2:]
    index.note("a", PrefixChanges(held=b"", gone=array("q", gone).tobytes()))
    assert index.matched(prompt(16)) == {"a": 8}
    index.hold("a", prompt(4), is_all=True)
    assert index.matched(prompt(16)) == {"a": 4}


def test_a_request_that_goes_on_elsewhere_counts_there() -> None:
    index = Index()
    index.add("it", "a", chain_of(prompt(8)))
    index.add("it", "b", chain_of(prompt(8)))
    assert index.matched(prompt(8)) == {"b": 8}


def test_replicas_that_are_gone_have_nothing_though_their_requests_end_later() -> None:
    index = Index()
    sent = index.send("a", prompt(8))
    index.hold("a", prompt(12))
    index.send("b", prompt(8, start=100))
    index.keep_only({"b"})
    assert index.matched(prompt(8)) == {}
    assert index.matched(prompt(8, start=100)) == {"b": 8}
    index.end(sent)
    assert index.matched(prompt(8)) == {}


PROMPTS = st.lists(st.integers(0, 1), max_size=9 * BLOCK).map(tuple) | st.integers(0, 36).map(lambda n: (1,) * n)


def test_of_many_replicas_with_a_prefix_some_are_found_those_with_the_longest_first() -> None:
    index = Index()
    for number in range(200):
        index.hold(f"r{number}", prompt(8))
    index.hold("long", prompt(16))
    found = index.matched(prompt(20))
    assert next(iter(found.items())) == ("long", 16)
    assert 32 <= len(found) <= 40
    others = {each for _ in range(20) for each in index.matched(prompt(20))}
    assert len(others) > 100, "not always the same"


def test_one_replica_fills_no_more_than_its_share() -> None:
    index = PrefixIndex(block_size=BLOCK, max_prefixes=4_000)
    index.note("a", PrefixChanges(held=array("q", range(10_000)).tobytes()))
    assert len(index._held) == 4_000
    index.note("b", PrefixChanges(held=array("q", range(20_000, 30_000)).tobytes()))
    assert len(index._held) == 6_000
    assert index.match([0]) == {"a": BLOCK}
    assert index.match([9_999]) == {}
    index.note("a", PrefixChanges(held=b"", gone=array("q", range(3_000)).tobytes()))
    index.note("a", PrefixChanges(held=array("q", [9_999]).tobytes()))
    assert index.match([9_999]) == {"a": BLOCK}
    index.keep_only({"b"})
    assert index.match([9_999]) == {}
    for _ in range(100):
        index.note("b", PrefixChanges(held=b""))
    assert len(index._held) == 2_000


def test_prefixes_of_replicas_that_are_gone_are_forgotten_in_pieces_and_found_no_more() -> None:
    index = PrefixIndex(block_size=BLOCK)
    own = {f"r{number}": array("q", [0, *range(1000 * number, 1000 * number + 1000)]) for number in range(1, 31)}
    for replica_id, digests in own.items():
        index.note(replica_id, PrefixChanges(held=digests.tobytes(), is_all=True))
    lost, stays = [f"r{number}" for number in range(1, 30)], "r30"
    before = len(index._held)
    index.keep_only({stays})
    assert len(index._held) == before, "a rack is half a million: nothing waits for them"
    assert index.match([0]) == {stays: BLOCK}
    assert all(index.match([own[each][5]]) == {} for each in lost)
    index.note("r7", PrefixChanges(held=array("q", own["r7"][:3]).tobytes(), is_all=True))  # it is there again
    held = [len(index._held)]
    while index._gone:
        index.note(stays, PrefixChanges(held=b""))
        held.append(len(index._held))
    assert 0 <= max(earlier - later for earlier, later in pairwise(held)) < 100
    assert held[-1] == 1000 + 3
    assert index.match([own["r7"][1]]) == {"r7": BLOCK}
    assert index.match([own["r7"][5]]) == {}
    index.keep_only(())
    assert len(index._held) == 0


def test_a_replica_whose_prefixes_come_and_go_takes_no_more_memory() -> None:
    index = PrefixIndex(block_size=BLOCK)
    for number in range(0, 100_000, 100):
        changes = array("q", range(number, number + 100)).tobytes()
        index.note("a", PrefixChanges(held=changes, gone=array("q", range(number - 100, number)).tobytes()))
    assert len(index._held) == 100
    assert len(index._of_replica["a"].digests) <= 2_000
    index.keep_only(())
    assert len(index._held) == 0


def test_requests_of_one_prefix_are_counted() -> None:
    index = Index()
    sent = [index.send(replica_id, prompt(8)) for replica_id in "aab"]
    for request_id, left in zip(sent, ({"a": 8, "b": 8}, {"b": 8}, {}), strict=True):
        index.end(request_id)
        assert index.matched(prompt(8)) == left
    assert len(index._sent) == 0


@given(added=st.lists(st.tuples(st.sampled_from("ab"), PROMPTS, st.booleans()), max_size=20), asked=PROMPTS)
def test_a_match_is_what_a_list_of_all_prompts_says(
    added: list[tuple[str, tuple[int, ...], bool]], asked: tuple[int, ...]
) -> None:
    index = Index()
    for replica_id, token_ids, is_sent in added:
        (index.send if is_sent else index.hold)(replica_id, token_ids)
    expected: dict[str, int] = {}
    for length in (num_blocks * BLOCK for num_blocks in range(1, len(asked) // BLOCK + 1) if is_indexed(num_blocks)):
        holders = {replica_id for replica_id, token_ids, _ in added if token_ids[:length] == asked[:length]}
        expected |= dict.fromkeys(holders, length)
    assert index.matched(asked) == expected
