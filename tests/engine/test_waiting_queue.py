"""The waiting queue: what it counts, and what it lets go of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.engine.policies import FirstComeFirstServed
from app.engine.sequence import EngineSequence, SequenceStatus
from app.engine.waiting_queue import LazyHeap, WaitingQueue
from tests.kit.engine import make_request


def queue_of(num_sequences: int) -> tuple[WaitingQueue, list[EngineSequence]]:
    queue = WaitingQueue(FirstComeFirstServed().new_queue, bucket_of=lambda sequence: sequence.num_prompt_tokens % 2)
    sequences = [
        EngineSequence(request=make_request((5,) * (n + 1)), arrival=n, arrived_at=float(n), order_key=(n,))
        for n in range(num_sequences)
    ]
    for sequence in sequences:
        queue.push(sequence)
    return queue, sequences


def finish(queue: WaitingQueue, sequence: EngineSequence) -> None:
    sequence.status = SequenceStatus.FINISHED
    queue.note_finished(sequence)


def test_each_bucket_counts_its_own() -> None:
    queue, _ = queue_of(4)
    assert len(queue) == 4
    assert queue.num_tokens == 10
    assert {bucket.number: (bucket.num_waiting, bucket.num_tokens) for bucket in queue.buckets} == {
        0: (2, 6),
        1: (2, 4),
    }


def test_the_oldest_of_a_bucket_still_waits() -> None:
    queue, sequences = queue_of(6)
    bucket = queue.bucket(1)
    assert bucket.oldest_at == 0.0
    assert list(bucket.oldest(2)) == [sequences[0], sequences[2]]
    finish(queue, sequences[2])
    finish(queue, sequences[0])
    assert bucket.oldest_at == 4.0
    sequences[4].status = SequenceStatus.RUNNING
    assert queue.pop(1) is sequences[4]
    assert 1 not in {bucket.number for bucket in queue.buckets}


def test_a_preempted_sequence_is_the_oldest_again() -> None:
    queue, sequences = queue_of(6)
    sequences[0].status = SequenceStatus.RUNNING
    queue.pop(1)
    sequences[0].status, sequences[0].num_preemptions = SequenceStatus.WAITING, 1
    queue.push(sequences[0])
    assert queue.bucket(1).oldest_at == 0.0
    assert queue.peek(1) is sequences[0]


@pytest.mark.parametrize("keep_first", [True, False])
def test_finished_sequences_are_dropped_from_the_queues(keep_first: bool) -> None:
    queue, sequences = queue_of(2_000)
    for sequence in sequences[2 if keep_first else 0 :]:
        finish(queue, sequence)
    assert len(queue) == 2 * keep_first
    for number in (0, 1):
        bucket = queue.bucket(number)
        assert len(bucket._by_age) <= 20
        assert list(bucket.oldest(20)) == [sequences[1 - number]] * keep_first
        assert len(bucket.queue._heap) <= 20  # type: ignore[attr-defined]


def test_all_sequences_can_be_removed_by_arrival() -> None:
    queue, sequences = queue_of(5)
    finish(queue, sequences[1])
    assert queue.take_all() == [sequences[0], *sequences[2:]]
    assert (len(queue), queue.num_tokens, queue.work) == (0, 0, 0)


def test_background_requests_are_counted_apart_and_everything_is_taken_off_again() -> None:
    queue = WaitingQueue(FirstComeFirstServed().new_queue, bucket_of=lambda sequence: 0)
    background = replace(make_request((5,) * 4), is_background=True)
    for arrival, request in enumerate((make_request((5,) * 2), background, make_request((5,) * 7))):
        queue.push(EngineSequence(request=request, arrival=arrival, num_predicted_tokens=10))

    def counts() -> tuple[int, ...]:
        return len(queue), queue.num_tokens, queue.work, queue.num_foreground, queue.num_foreground_tokens

    assert counts() == (3, 13, 43, 2, 9)
    queue.pop()
    assert counts() == (2, 11, 31, 1, 7)
    finish(queue, queue.peek())
    assert counts() == (1, 4, 14, 0, 0)
    queue.take_all()
    assert counts() == (0, 0, 0, 0, 0)
    assert list(queue.buckets) == []


def test_the_first_are_the_next_of_each_bucket_and_then_the_order_of_ranks() -> None:
    queue, sequences = queue_of(6)
    finish(queue, sequences[2])
    assert queue.first(9) == [sequences[0], sequences[1], *sequences[3:]]
    assert queue.first(3) == [sequences[0], sequences[1], sequences[3]]
    sequences[5].order_key = (-1,)
    assert queue.first(3) == [sequences[0], sequences[1], sequences[5]]
    assert queue.first(0) == []


def test_a_heap_gives_the_lowest_key_and_of_equal_ones_the_first_that_came() -> None:
    heap = LazyHeap[float](lambda sequence: 3.0)
    sequences = [EngineSequence(request=make_request(), arrival=arrival) for arrival in range(6)]
    for sequence, key in zip(reversed(sequences), (None, 1.0, 2.0, 2.0, 1.0, None), strict=True):
        heap.push(sequence, key)
    assert (heap.first_key(), heap.peek(), len(heap)) == (1.0, sequences[1], 6)
    sequences[1].status = SequenceStatus.FINISHED
    heap.note_finished(sequences[1])
    assert (heap.first_key(), heap.peek(), len(heap)) == (1.0, sequences[4], 5)
    assert set(heap) == {sequences[number] for number in (0, 2, 3, 4, 5)}
    assert [heap.pop() for _ in range(5)] == [sequences[number] for number in (4, 2, 3, 0, 5)]
    assert len(heap) == 0
