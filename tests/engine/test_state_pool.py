"""Slots for states: who has them, which snapshots stay, and what a step reads and writes."""

from __future__ import annotations

import pytest

from app.engine.block_pool import BlockPool
from app.engine.prefix import Prefix
from app.engine.state_pool import NO_STATE, StatePool
from tests.kit.engine import build_fake_engine, expected_tokens, make_request, run_to_end


def prefixes(pool: BlockPool, number: int, *, first_token: int = 0) -> list[Prefix]:
    """Cached prefixes of 1, 2, … blocks of four tokens."""
    found: list[Prefix] = []
    for at, block in enumerate(pool.allocate(number)):
        token_ids = range(first_token + 4 * at, first_token + 4 * at + 4)
        found.append(pool.cache_full_block(block, list(token_ids), parent=found[-1] if found else ""))
    return found


def have_snapshots(found: list[Prefix]) -> list[bool]:
    return [each.snapshot is not None for each in found]


def pool_of(num_slots: int) -> tuple[BlockPool, StatePool]:
    states = StatePool(num_slots, interval_tokens=8)
    return BlockPool(num_blocks=16, block_size=4, states=states), states


def test_a_step_reads_one_slot_and_writes_others() -> None:
    blocks, states = pool_of(6)
    found = prefixes(blocks, 3)
    sequence = states.begin(None)
    first = states.path(sequence, 0, 10, [4, 8])
    assert first.read == NO_STATE
    assert [end for end, _ in first.writes] == [4, 8, 10]
    states.advance(sequence, 10, found[:2], generates=False)
    second = states.path(sequence, 10, 11, [])
    assert second.read == first.writes[-1][1]
    assert second.writes[0][1] not in {slot for _, slot in first.writes}
    assert len(states.resumable()) == 2
    assert have_snapshots(found) == [True, True, False]


def test_the_state_behind_a_whole_step_may_be_its_snapshot() -> None:
    blocks, states = pool_of(4)
    found = prefixes(blocks, 1)
    sequence = states.begin(None)
    (snapshot,) = states.path(sequence, 0, 4, [4]).writes
    states.advance(sequence, 4, found, generates=False)
    after = states.path(sequence, 4, 5, [])
    assert after.read == snapshot[1]
    assert after.writes[0][1] in sequence.own
    states.end(sequence)
    other = states.begin(found[0])
    assert other.current == snapshot[1]


def test_the_longest_unused_snapshot_makes_room_and_no_snapshot_that_is_read() -> None:
    blocks, states = pool_of(5)
    older, newer = prefixes(blocks, 1), prefixes(blocks, 1, first_token=100)
    for (prefix,) in (older, newer):
        sequence = states.begin(None)
        states.path(sequence, 0, 4, [4])
        states.advance(sequence, 4, [prefix], generates=False)
        states.end(sequence)
    reader = states.begin(older[0])
    assert states.num_free == 2
    assert states.has_room(None)
    assert not states.has_room(newer[0]), "the snapshot itself is one of the two slots"
    states.begin(None)
    assert have_snapshots([*older, *newer]) == [True, False]
    states.end(reader)


def test_a_reserved_slot_becomes_the_snapshot_of_a_prefix_or_is_free_again() -> None:
    blocks, states = pool_of(4)
    found = prefixes(blocks, 2)
    for prefix, num_free, num_snapshots in ((found[1], 4, 1), (found[1], 4, 1), (None, 4, 1)):
        slot = states.reserve()
        assert slot is not None
        assert states.num_free == 3
        states.take_back(slot, prefix, 8)
        assert (states.num_free, len(states.resumable())) == (num_free, num_snapshots)
    assert states.begin(found[1]).current == found[1].snapshot.slot  # type: ignore[union-attr]


def test_for_a_fetch_the_snapshot_behind_which_its_sequence_would_begin_makes_room_last() -> None:
    blocks, states = pool_of(3)
    found = prefixes(blocks, 3)
    for number, prefix in enumerate(found, 1):
        slot = states.reserve()
        assert slot is not None
        states.take_back(slot, prefix, 4 * number)
    assert states.reserve(found[0]) is not None
    assert have_snapshots(found) == [True, False, True]


def test_a_state_behind_more_tokens_than_its_prefix_is_no_snapshot() -> None:
    blocks, states = pool_of(4)
    slot = states.reserve()
    assert slot is not None
    with pytest.raises(AssertionError, match="state after 9 tokens for a prefix of 8"):
        states.take_back(slot, prefixes(blocks, 2)[1], 9)


def test_no_slot_is_reserved_where_no_sequence_could_begin_behind_it() -> None:
    _, states = pool_of(4)
    states.begin(None)
    assert states.reserve() is None


def test_a_snapshot_goes_with_the_block_of_its_prefix() -> None:
    blocks, states = pool_of(3)
    (prefix,) = prefixes(blocks, 1)
    sequence = states.begin(None)
    states.path(sequence, 0, 4, [4])
    states.advance(sequence, 4, [prefix], generates=False)
    states.end(sequence)
    blocks.free([prefix.block])
    assert (len(states.resumable()), states.num_free) == (1, 3)
    blocks.allocate(16)
    assert (len(states.resumable()), states.num_free) == (0, 3)


def test_a_sequence_that_generates_keeps_its_latest_snapshot() -> None:
    blocks, states = pool_of(5)
    found = prefixes(blocks, 3)
    sequence = states.begin(None)
    for end in (4, 8, 12):
        states.path(sequence, end - 4, end, [end])
        states.advance(sequence, end, [found[end // 4 - 1]], generates=end > 4)
    assert have_snapshots(found) == [True, False, True]


def test_the_end_of_a_conversation_stays_longer_than_its_beginning() -> None:
    blocks, states = pool_of(6)
    found, other = prefixes(blocks, 2), prefixes(blocks, 1, first_token=100)
    for prefix, end in ((found[0], 4), (other[0], 4), (found[1], 8)):
        sequence = states.begin(found[0] if end == 8 else None)
        states.path(sequence, end - 4, end, [end])
        states.advance(sequence, end, [prefix], generates=False)
        states.end(sequence)
    sequence = states.begin(None)
    states.path(sequence, 0, 8, [4, 8])
    third = prefixes(blocks, 2, first_token=200)
    states.advance(sequence, 8, third, generates=False)
    states.end(sequence)
    states.begin(None)
    states.begin(None)
    assert have_snapshots([*found, *other, *third]) == [False, True, False, False, True]


def test_prefixes_up_to_a_snapshot_count_as_held() -> None:
    blocks, states = pool_of(5)
    held: list[tuple[int, bool]] = []
    found = prefixes(blocks, 3)
    blocks.on_prefixes(lambda prefix, is_held: held.append((prefix.digest, is_held)))
    assert held == []
    sequence = states.begin(None)
    states.path(sequence, 0, 12, [8])
    states.advance(sequence, 12, [found[1]], generates=False)
    assert sorted(held) == sorted((each.digest, True) for each in found[:2])


def test_an_equal_prompt_is_resumed_from_the_snapshot_of_its_last_block() -> None:
    prompt = tuple(range(2, 24))
    engine = build_fake_engine(num_state_slots=8, state_interval_tokens=100)
    for _ in range(2):
        request = make_request(prompt, max_tokens=3)
        assert run_to_end(engine, request).token_ids[request.request_id] == expected_tokens(prompt, 3)
    assert engine.stats().total_cached_tokens == 20


def test_where_prompts_part_a_snapshot_is_made_for_the_third() -> None:
    engine = build_fake_engine(num_state_slots=16, state_interval_tokens=100)
    shared = tuple(range(2, 18))
    cached = []
    for number in range(3):
        prompt = (*shared, *range(20 + number, 27 + number))
        request = make_request(prompt, max_tokens=2)
        assert run_to_end(engine, request).token_ids[request.request_id] == expected_tokens(prompt, 2)
        cached.append(engine.stats().total_cached_tokens)
    assert cached == [0, 0, 16]


def test_a_conversation_goes_on_behind_the_last_answer() -> None:
    engine = build_fake_engine(num_state_slots=8, state_interval_tokens=100)
    prompt = tuple(range(2, 12))
    first = make_request(prompt, max_tokens=9)
    answer = run_to_end(engine, first).token_ids[first.request_id]
    longer = (*prompt, *answer, 5, 6)
    run_to_end(engine, make_request(longer, max_tokens=1))
    assert engine.stats().total_cached_tokens == 16


def test_sequences_wait_for_slots_and_none_is_lost() -> None:
    engine = build_fake_engine(num_state_slots=5, max_running=8)
    requests = [make_request((7, 8, number), max_tokens=5) for number in range(6)]
    outcome = run_to_end(engine, *requests)
    assert outcome.token_ids == {each.request_id: expected_tokens(each.prompt_token_ids, 5) for each in requests}


def test_of_a_step_with_drafts_the_state_behind_the_last_kept_token_stays() -> None:
    for num_kept in (1, 2, 3):
        _, states = pool_of(6)
        sequence = states.begin(None)
        states.path(sequence, 0, 5, [])
        states.advance(sequence, 5, [], generates=False)
        path = states.path(sequence, 5, 8, [], has_drafts=True)
        assert [end for end, _ in path.writes] == [1, 2, 3]
        assert len({path.read, *(slot for _, slot in path.writes)}) == 4
        states.advance(sequence, 5 + num_kept, [], generates=True)
        assert sequence.current == path.writes[num_kept - 1][1]
        assert sequence.current in sequence.own
        assert states.num_free == 4, "slots behind other drafts are free again"
        states.end(sequence)
        assert states.num_free == 6


def test_a_snapshot_among_drafts_is_made_only_of_kept_tokens() -> None:
    for num_kept, is_made in ((1, False), (2, True), (3, True)):
        blocks, states = pool_of(8)
        found = prefixes(blocks, 1)
        sequence = states.begin(None)
        states.path(sequence, 0, 2, [])
        states.advance(sequence, 2, [], generates=False)
        path = states.path(sequence, 2, 5, [4], has_drafts=True)
        end = 2 + num_kept
        states.advance(sequence, end, found if is_made else [], generates=True)
        assert (found[0].snapshot is not None) == is_made
        assert sequence.current == path.writes[num_kept - 1][1]
        states.end(sequence)
        assert states.num_free == 8


def test_a_sequence_that_ends_in_a_step_with_drafts_leaves_all_slots() -> None:
    _, states = pool_of(6)
    sequence = states.begin(None)
    states.path(sequence, 0, 4, [4], has_drafts=True)
    states.end(sequence)
    assert states.num_free == 6
