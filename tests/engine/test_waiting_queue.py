"""The waiting room: what it counts, and what it lets go of."""

from __future__ import annotations

import pytest

from app.engine.policies import FirstComeFirstServed
from app.engine.sequence import Sequence, SequenceStatus
from app.engine.waiting_queue import WaitingQueue
from tests.fakes import make_request


def room_of(num_sequences: int) -> tuple[WaitingQueue, list[Sequence]]:
    room = WaitingQueue(FirstComeFirstServed(), bucket_of=lambda sequence: sequence.num_prompt_tokens % 2)
    sequences = [
        Sequence(request=make_request((5,) * (n + 1)), arrival=n, arrived_at=float(n), rank=(n,))
        for n in range(num_sequences)
    ]
    for sequence in sequences:
        room.push(sequence)
    return room, sequences


def finish(room: WaitingQueue, sequence: Sequence) -> None:
    sequence.status = SequenceStatus.FINISHED
    room.note_finished(sequence)


def test_each_bucket_counts_its_own() -> None:
    room, _ = room_of(4)
    assert len(room) == 4
    assert room.num_tokens == 10
    assert {bucket.number: (bucket.num_waiting, bucket.num_tokens) for bucket in room.buckets} == {0: (2, 6), 1: (2, 4)}


def test_the_oldest_of_a_bucket_is_whoever_still_waits() -> None:
    room, sequences = room_of(6)
    bucket = room.bucket(1)
    assert bucket.oldest_at == 0.0
    finish(room, sequences[2])
    finish(room, sequences[0])
    assert bucket.oldest_at == 4.0
    sequences[4].status = SequenceStatus.RUNNING
    assert room.pop(1) is sequences[4]
    assert 1 not in {bucket.number for bucket in room.buckets}


def test_a_preempted_sequence_is_the_oldest_again() -> None:
    room, sequences = room_of(6)
    sequences[0].status = SequenceStatus.RUNNING
    room.pop(1)
    sequences[0].status, sequences[0].num_preemptions = SequenceStatus.WAITING, 1
    room.push(sequences[0])
    assert room.bucket(1).oldest_at == 0.0
    assert room.peek(1) is sequences[0]


@pytest.mark.parametrize("keep_first", [True, False])
def test_it_lets_go_of_those_who_gave_up(keep_first: bool) -> None:
    room, sequences = room_of(2_000)
    for sequence in sequences[2 if keep_first else 0 :]:
        finish(room, sequence)
    assert len(room) == 2 * keep_first
    for number in (0, 1):
        bucket = room.bucket(number)
        assert len(bucket._by_age) <= 20
        assert len(bucket.queue._heap._heap) <= 20  # type: ignore[attr-defined]


def test_everybody_can_be_taken_out_by_arrival() -> None:
    room, sequences = room_of(5)
    finish(room, sequences[1])
    assert room.take_all() == [sequences[0], *sequences[2:]]
    assert (len(room), room.num_tokens, room.work) == (0, 0, 0)
