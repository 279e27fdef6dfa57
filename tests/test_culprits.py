"""Evidence against what kills, and trials of suspects one after another."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from app.culprits import Culprits, SuspectQueue


async def begun(queue: SuspectQueue, request_id: str) -> asyncio.Task[None]:
    """A request that has asked for its turn, and has it if it could."""
    task = asyncio.ensure_future(queue.begin(request_id))
    await asyncio.sleep(0.01)
    return task


async def test_they_take_turns_in_the_order_in_which_they_came() -> None:
    queue = SuspectQueue()
    tasks = [await begun(queue, name) for name in "abc"]
    assert [task.done() for task in tasks] == [True, False, False]
    queue.end("b")
    await asyncio.sleep(0.01)
    assert not tasks[1].done(), "it was not its turn"
    queue.end("a")
    queue.end("a")
    await asyncio.sleep(0.01)
    assert [task.done() for task in tasks] == [True, True, False]
    queue.end("b")
    await tasks[2]


async def test_one_that_takes_too_long_lets_the_next_begin_and_no_more() -> None:
    queue = SuspectQueue(longest_s=0.3)
    tasks = [await begun(queue, name) for name in "abc"]
    await tasks[1]
    queue.end("a")
    await asyncio.sleep(0.01)
    assert not tasks[2].done(), "the turn is b's now"
    await tasks[2]


async def test_one_that_leaves_while_it_waits_lets_the_next_begin() -> None:
    queue = SuspectQueue()
    tasks = [await begun(queue, name) for name in "abc"]
    tasks[1].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[1]
    queue.end("a")
    await asyncio.sleep(0.01)
    assert tasks[2].done()


def test_a_suspect_becomes_a_culprit_by_losses_in_a_row_without_progress() -> None:
    culprits = Culprits[str](max_losses=3, alone_after=2)
    culprits.note_loss("a", 1)
    culprits.note_loss("a", 2, was_trusted=False)
    assert not culprits.is_suspect("a"), "what was not sound before says nothing"
    culprits.note_loss("a", 3)
    assert culprits.is_suspect("a")
    culprits.note_loss("a", 4, has_progressed=True)
    assert not culprits.is_suspect("a")
    for place in (5, 6, 7):
        assert not culprits.is_culprit("a")
        culprits.note_loss("a", place)
    assert culprits.is_culprit("a")
    assert culprits.num_losses("a") == 7


def test_what_a_known_culprit_has_killed_is_not_counted_against_those_that_were_there() -> None:
    culprits = Culprits[str](max_losses=2)
    for place in (1, 2):
        culprits.note_loss("innocent", place, has_progressed=place == 1)
        assert not culprits.is_culprit("innocent")
        culprits.note_loss("deadly", place)
    assert culprits.is_culprit("deadly")
    assert culprits.num_losses("deadly") == 2
    assert culprits.num_losses("innocent") == culprits.losses_without_progress("innocent") == 0
    culprits.note_loss("late", 2)
    assert culprits.num_losses("late") == 0, "also where its loss is heard of later"
    culprits.is_alive(2)
    culprits.note_loss("later", 2)
    assert culprits.num_losses("later") == 1, "it was not dead but silent"


def test_what_is_explained_does_not_make_a_culprit() -> None:
    culprits = Culprits[str](max_losses=2)
    culprits.note_loss("innocent", 1)
    for place in (1, 2):
        culprits.note_loss("deadly", place)
    culprits.note_loss("innocent", 2)
    assert not culprits.is_culprit("innocent")
    culprits.note_loss("innocent", 3)
    assert not culprits.is_culprit("innocent")
    culprits.note_loss("innocent", 4)
    assert culprits.is_culprit("innocent")


def test_only_so_many_are_remembered_and_what_has_ended_is_forgotten() -> None:
    culprits = Culprits[int](max_losses=2, max_remembered=10)
    for number in range(100):
        culprits.note_loss(number)
    assert len(culprits) == 10
    culprits.forget(99)
    assert (len(culprits), culprits.num_losses(99)) == (9, 0)
