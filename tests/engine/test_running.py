"""The running sequences: their order, their blocks, and which of them make way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.engine.block_pool import BlockPool
from app.engine.request import Pooling
from app.engine.running import RunningSequences
from app.engine.sequence import EngineSequence, SequenceStatus
from tests.kit.engine import make_request


def sequence_of(num_tokens: int, *, rank: int, max_tokens: int = 4) -> EngineSequence:
    request = make_request(tuple(range(2, 2 + num_tokens)), max_tokens=max_tokens)
    return EngineSequence(request=request, arrival=rank, order_key=(rank,))


def run(running: RunningSequences, sequence: EngineSequence, num_computed_tokens: int = 0) -> EngineSequence:
    """Let it join without a cached prefix, with blocks for all of its tokens."""
    running.share(sequence, [])
    running.extend(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = num_computed_tokens
    running.add(sequence)
    return sequence


def test_they_are_in_order_and_one_leaves_with_its_blocks_though_another_has_its_rank() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    running = RunningSequences(pool)
    first, second, alike, last = (run(running, sequence_of(3, rank=rank)) for rank in (0, 1, 1, 2))
    assert (list(running), len(running), running.last) == ([first, second, alike, last], 4, last)
    assert pool.num_free == 0
    running.remove(alike)
    assert list(running) == [first, second, last]
    assert (pool.num_free, alike.blocks, alike.num_computed_tokens) == (2, [], 0)
    running.reorder(lambda sequence: (-sequence.arrival,))
    assert list(running) == [last, second, first]


def test_a_sequence_that_waits_keeps_what_it_has_found_of_its_prefix_while_that_is_there() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    running = RunningSequences(pool)
    owned = pool.allocate(2)
    parent: int | str = ""
    for block, tokens in zip(owned, ((2, 3), (4, 5)), strict=True):
        parent = pool.cache_full_block(block, tokens, parent=parent)
    pool.free(owned)
    waiting = sequence_of(5, rank=0)
    for _ in range(2):
        assert running.blocks_to_join(waiting) == (owned, 3)  # two that are free too, and one more
    assert running.blocks_to_join(sequence_of(3, rank=1)) == (owned[:1], 2)
    pool.clear_cache()
    assert running.blocks_to_join(waiting) == ([], 3)


@pytest.mark.parametrize(
    ("wants", "num_scored", "num_cached"),
    [
        ({}, 0, 2),
        ({"pooling": Pooling.MEAN}, 0, 0),
        ({"prompt_logprobs": 0}, 0, 0),
        ({"prompt_logprobs": 0}, 3, 1),
        ({"prompt_logprobs": 0}, 4, 2),
    ],
)
def test_no_block_is_skipped_of_which_more_than_the_kv_is_wanted(
    wants: dict[str, Any], num_scored: int, num_cached: int
) -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    owned = pool.allocate(2)
    parent = pool.cache_full_block(owned[0], (2, 3), parent="")
    pool.cache_full_block(owned[1], (4, 5), parent=parent)
    request = replace(make_request((2, 3, 4, 5, 6), **wants), num_scored_tokens=num_scored)
    running, sequence = RunningSequences(pool), EngineSequence(request=request, arrival=0)
    assert running.blocks_to_join(sequence) == (owned[:num_cached], 3 - num_cached)


def test_those_with_a_prediction_and_those_in_the_background_are_counted_while_they_run() -> None:
    running = RunningSequences(BlockPool(num_blocks=8, block_size=2))

    def started(rank: int, **fields: Any) -> EngineSequence:
        sequence = sequence_of(3, rank=rank)
        sequence.request = replace(sequence.request, **fields)
        return run(running, sequence)

    predicted = [started(rank, prediction_token_ids=(5, 6)) for rank in (0, 1)]
    background = [started(rank, is_background=True) for rank in (2, 3)]
    for left in (1, 0):
        running.remove(predicted.pop())
        running.remove(background.pop())
        assert (running.num_predicted, running.num_background) == (left, left)


def test_a_sequence_starts_behind_its_cached_prefix() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    running, sequence = RunningSequences(pool), sequence_of(3, rank=0)
    cached = pool.allocate(1)
    pool.cache_full_block(cached[0], (2, 3), parent="")
    running.share(sequence, cached)
    assert sequence.status is SequenceStatus.RUNNING
    assert (sequence.num_computed_tokens, sequence.prefixes) == (2, [cached[0].prefix])
    assert cached[0].num_owners == 2
    assert running.num_missing_blocks(sequence, 2) == 1
    assert running.has_room_for(sequence, 2)
    assert not running.has_room_for(sequence, 3)


@pytest.mark.parametrize(
    ("max_tokens", "is_short", "num_draftable"),
    [(4, True, 2), (4, False, 3), (3, True, 2), (2, True, 1), (9, True, 2), (99, False, 8)],
)
def test_drafts_are_as_many_as_it_has_slots_for_and_may_still_generate(
    max_tokens: int, is_short: bool, num_draftable: int
) -> None:
    running = RunningSequences(BlockPool(num_blocks=4, block_size=3))
    sequence = run(running, sequence_of(6, rank=0, max_tokens=max_tokens), num_computed_tokens=3)
    assert running.num_draftable(sequence, is_short=is_short) == num_draftable


def test_those_behind_a_waiting_one_make_way_from_the_last_on_as_far_as_it_takes() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    running = RunningSequences(pool)
    first, second, last = (run(running, sequence_of(4, rank=rank)) for rank in (0, 2, 3))

    def victims(
        num_tokens: int, *, rank: int, max_running: int = 9, spared: EngineSequence | None = None
    ) -> list[EngineSequence]:
        return running.to_preempt_for(
            sequence_of(num_tokens, rank=rank),
            may_preempt=lambda _, other: other is not spared,
            max_running=max_running,
        )

    assert victims(4, rank=1) == [last]
    assert victims(5, rank=1) == [last, second]
    assert victims(4, rank=1, spared=last) == [second]
    assert victims(9, rank=1) == [], "even both would not do"
    assert victims(4, rank=3) == []
    assert victims(4, rank=-1, max_running=3) == [last]
    assert victims(4, rank=-1, max_running=2) == [last, second]
    assert victims(4, rank=1, max_running=2, spared=second) == [], "there would be blocks, but no slot"
    running.remove(first)
    assert victims(4, rank=1, max_running=2) == [last], "there are blocks, but no slot"
    assert victims(4, rank=1) == []
    assert RunningSequences(pool).to_preempt_for(second, may_preempt=lambda *_: True, max_running=1) == []
