"""The store of results: each item once, a torn end is cut, nothing is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batches import ItemResponse
from app.jobs.job import Counts, Item, ItemResult
from app.jobs.outputs import BatchFormat
from app.jobs.results import (
    DEATHS,
    JOURNAL,
    RECOVERY,
    ItemSet,
    PartialOutputs,
    ResultStore,
    ResultsUnwritable,
    journals_in,
)


def result(number: int, *, is_error: bool = False, **counts: int) -> ItemResult:
    return ItemResult(number=number, is_error=is_error, line=f'{{"text": "ü {number}"}}'.encode(), **counts)


@contextmanager
def opened(folder: Path, num_items: int = 4) -> Iterator[ResultStore]:
    with closing(ResultStore(folder, num_items)) as store:
        yield store


def numbers(folder: Path) -> list[int]:
    with opened(folder) as store:
        return [each.number for each in store.results()]


def test_two_processes_on_one_folder_lose_nothing_and_an_item_that_both_have_ended_counts_once(tmp_path: Path) -> None:
    """The first has lost its lock without noticing; what it writes from then on is its own."""
    with opened(tmp_path) as first:
        first.append([result(0)])
        with opened(tmp_path) as second:
            second.append([result(1)])
            first.append([result(1), result(2)])
            second.append([result(3)])
            assert [each.number for each in second.results()] == [0, 1, 3]
    assert numbers(tmp_path) == [0, 1, 2, 3]
    with opened(tmp_path) as third:
        assert third.counts.num_items == 4


def test_an_empty_journal_that_its_process_removes_meanwhile_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as earlier:
        earlier.append([result(0)])
    first = ResultStore(tmp_path, 4)

    def closed_after_listing(folder: Path) -> list[Path]:
        found = journals_in(folder)
        first.close()
        return found

    monkeypatch.setattr("app.jobs.results.journals_in", closed_after_listing)
    with opened(tmp_path) as second:
        assert [each.number for each in second.results()] == [0]


def test_a_write_that_fails_in_one_process_takes_nothing_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        second.append([result(0)])
        with monkeypatch.context() as patch:
            patch.setattr("app.jobs.results._write_all", lambda *_: (_ for _ in ()).throw(OSError(5, "lost")))
            with pytest.raises(ResultsUnwritable):
                first.append([result(1)])
        assert [each.number for each in second.results()] == [0]


def test_results_come_back_as_they_were_and_are_counted(tmp_path: Path) -> None:
    first, second = result(2, num_input_tokens=3, num_output_tokens=5), result(0, is_error=True, num_cached_tokens=1)
    with opened(tmp_path) as store:
        assert store.append([first, second]) == [first, second]
    with opened(tmp_path) as store:
        assert list(store.results()) == [first, second]
        assert [item in store.ended for item in range(4)] == [True, False, True, False]
        assert store.counts == Counts(
            num_items=2, num_failed=1, num_input_tokens=3, num_cached_tokens=1, num_output_tokens=5
        )
        assert store.recovery.runs == 2
        assert not store.is_complete


def test_an_item_ends_once_however_often_it_comes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.append([result(1), result(1)]) == [result(1)]
        assert store.append([result(1), result(2)]) == [result(2)]
    assert numbers(tmp_path) == [1, 2]


def line_of(tmp_path: Path, number: int, num_items: int) -> bytes:
    with opened(tmp_path / "other", num_items) as store:
        store.append([result(number)])
    return (tmp_path / "other" / JOURNAL).read_bytes()


@pytest.mark.parametrize(
    "torn",
    ["half a line", "zeros", "digits", "digits alone", "another number of items", "an item that has ended", "a bit"],
)
def test_a_torn_end_is_cut_off_and_its_items_are_open_again(tmp_path: Path, torn: str) -> None:
    whole = line_of(tmp_path, 3, 100)
    content = {
        "half a line": whole[:20],
        "zeros": b"\0\0\0\n",
        "digits": b"00000000 \n",  # the checksum of nothing
        "digits alone": b"00000000\n",
        "another number of items": line_of(tmp_path / "more", 99, 100),
        "an item that has ended": line_of(tmp_path / "ended", 1, 100),
        "a bit": whole[:15] + bytes([whole[15] ^ 1]) + whole[16:],
    }[torn]
    with opened(tmp_path) as store:
        store.append([result(0), result(1)])
    with (tmp_path / JOURNAL).open("ab") as journal:
        journal.write(content)
    with opened(tmp_path) as store:
        assert len(store.ended) == 2
        store.append([result(3)])
    assert numbers(tmp_path) == [0, 1, 3]


def test_cut_anywhere_the_journal_gives_the_whole_results_before_the_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.append([result(number) for number in range(4)])
    content = (tmp_path / JOURNAL).read_bytes()
    for length in range(len(content)):
        (tmp_path / JOURNAL).write_bytes(content[:length])
        with opened(tmp_path) as store:
            assert len(store.ended) == content[:length].count(b"\n")


def test_a_write_that_fails_takes_nothing_back_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as store:
        store.append([result(0)])
        with monkeypatch.context() as patch:
            patch.setattr("app.jobs.results.os.write", full)
            with pytest.raises(ResultsUnwritable, match="No space left"):
                store.append([result(1), result(2)])
        assert len(store.ended) == 1
        store.append([result(1)])
    assert numbers(tmp_path) == [0, 1]


def torn_write(descriptor: int, content: bytes) -> int:
    os.pwrite(descriptor, content[: len(content) // 2], os.fstat(descriptor).st_size)
    raise OSError(28, "No space left on device")


def fails_to_append(store: ResultStore, number: int, monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A full disk that takes half of a line; `functions` of `os` are others meanwhile."""
    with monkeypatch.context() as patch:
        for name, function in {"write": torn_write, **functions}.items():
            patch.setattr(f"app.jobs.results.os.{name}", function)
        with pytest.raises(ResultsUnwritable, match="No space left"):
            store.append([result(number)])


def test_what_follows_a_line_that_was_written_in_part_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        store.append([result(0)])
        fails_to_append(store, 1, monkeypatch)
        store.append([result(1), result(2)])
        assert [each.number for each in store.results()] == [0, 1, 2]
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_journal_whose_torn_end_cannot_be_cut_takes_nothing_more_and_the_next_opening_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_cut(descriptor: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    with opened(tmp_path) as store:
        store.append([result(0)])
        fails_to_append(store, 1, monkeypatch, ftruncate=not_cut)
        with pytest.raises(ResultsUnwritable, match="incomplete record"):
            store.append([result(2)])
        assert [each.number for each in store.results()] == [0]
    with opened(tmp_path) as store:
        store.append([result(1), result(2)])
    assert numbers(tmp_path) == [0, 1, 2]


def test_what_an_earlier_process_did_not_bring_to_the_disk_is_there_before_anything_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items count as ended from then on, and the machine may die too."""
    store = ResultStore(tmp_path, 4)
    store.append([result(0)])
    os.close(store._journal)  # the process dies
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noted)
    with opened(tmp_path):
        assert (tmp_path / JOURNAL).stat().st_ino in synced


def test_a_copy_of_a_journal_is_no_journal(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.append([result(0)])
    (tmp_path / f"{JOURNAL}.old").write_bytes(line_of(tmp_path / "more", 1, 4))
    assert numbers(tmp_path) == [0]


def test_items_that_were_begun_and_not_ended_begin_again_or_continue_where_their_tokens_are_known(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as store:
        store.begun.update([0, 1, 2, 3])
        store.progress({1: (7, 8), 2: (9,)})
        store.append([result(1)])
    with opened(tmp_path) as store:
        assert (store.recovery.continued_items, store.recovery.recomputed_items) == (1, 2)
        assert [item in store.partial for item in range(4)] == [False, False, True, False]


def test_what_interruptions_cost_outlives_the_process(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.recovery.engines_lost += 1
        store.note_interrupted([0, 3])
        store.sync()
    with opened(tmp_path) as store:
        assert (store.recovery.engines_lost, store.recovery.recomputed_items, store.recovery.runs) == (1, 2, 2)


def test_a_sync_that_comes_after_the_end_does_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        pass
    store.sync()


def test_it_takes_five_thousand_results_a_second(tmp_path: Path) -> None:
    """Ten times as many are usual; CPU time, so that other work on the machine does not count."""
    form, body = (
        BatchFormat("batch_1"),
        {"choices": [{"message": {"content": "word " * 20}}], "usage": {"prompt_tokens": 3}},
    )
    with opened(tmp_path, 10_000) as store:
        began = time.process_time()
        for number in range(10_000):
            item = Item(number=number, id=f"item-{number}", url="/v1/chat/completions", body={})
            store.append([form.answered(item, ItemResponse(200, body))])
        assert time.process_time() - began < 2


# Sets of items


@given(items=st.lists(st.integers(0, 99)), others=st.lists(st.integers(0, 99)))
def test_it_is_a_set(items: list[int], others: list[int]) -> None:
    item_set, other_set = ItemSet(100), ItemSet(100)
    item_set.update(items)
    other_set.update(others)
    assert {item for item in range(100) if item in item_set} == set(items)
    assert len(item_set) == len(set(items))
    assert list(item_set.minus(other_set)) == sorted(set(items) - set(others))
    assert {item for item in range(100) if item in ItemSet.from_bytes(item_set.to_bytes())} == set(items)


def test_it_knows_whether_neighbours_are_all_in_it() -> None:
    item_set = ItemSet(10)
    item_set.update([3, 4, 5])
    assert item_set.has_all(3, 3)
    assert not item_set.has_all(3, 4)


def test_one_in_a_file_is_there_again_without_having_been_closed(tmp_path: Path) -> None:
    first = ItemSet.in_file(tmp_path / "bits", 20)
    first.update([0, 19])
    again = ItemSet.in_file(tmp_path / "bits", 20)
    assert [item for item in range(20) if item in again] == [0, 19]
    assert len(again) == 2


# Partial outputs


def test_what_is_known_of_an_item_is_all_its_tokens(tmp_path: Path) -> None:
    partial = PartialOutputs(tmp_path / "tokens")
    partial.add({3: (5, 6)})
    partial.add({3: (7,), 9: (1,)})
    partial.drop(9)
    assert partial.token_ids(3) == (5, 6, 7)
    assert (partial.token_ids(9), partial.token_ids(4)) == ((), ())
    assert [item in partial for item in (3, 9)] == [True, False]


def test_another_process_finds_what_was_saved_last(tmp_path: Path) -> None:
    first = PartialOutputs(tmp_path / "tokens")
    first.add({3: (5, 6), 2**40: (7,)})
    first.save()
    first.add({3: (8,)})  # killed before it is saved
    again = PartialOutputs(tmp_path / "tokens")
    assert (again.token_ids(3), again.token_ids(2**40)) == ((5, 6), (7,))


def test_a_torn_file_counts_as_none(tmp_path: Path) -> None:
    first = PartialOutputs(tmp_path / "tokens")
    first.add({3: (5, 6)})
    first.save()
    content = (tmp_path / "tokens").read_bytes()
    for length in range(len(content)):
        (tmp_path / "tokens").write_bytes(content[:length])
        assert 3 not in PartialOutputs(tmp_path / "tokens")
    (tmp_path / "tokens").write_bytes(content[:-1] + b"\1")
    assert 3 not in PartialOutputs(tmp_path / "tokens")


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    partial = PartialOutputs(tmp_path / "tokens")
    partial.save()
    assert not (tmp_path / "tokens").exists()


def test_a_save_that_takes_long_puts_the_next_one_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a fiftieth of the time goes into them."""
    times = iter([10.0, 11.0, 60.9, 61.1, 61.2])
    monkeypatch.setattr("app.jobs.results.time.monotonic", lambda: next(times))
    partial, saved = PartialOutputs(tmp_path / "tokens"), []
    for token_id in (5, 6, 7):
        partial.add({3: (token_id,)})
        partial.save()
        saved.append(PartialOutputs(tmp_path / "tokens").token_ids(3))
    assert saved == [(5,), (5,), (5, 6, 7)]


def died_with(folder: Path, *items: int) -> None:
    """A process that dies while it has these items: nothing closes its store."""
    store = ResultStore(folder, 4)
    store.begun.update(items)
    os.close(store._journal)


def test_what_was_under_way_when_a_process_died_is_known_of_each_death(tmp_path: Path) -> None:
    died_with(tmp_path, 0, 1)
    died_with(tmp_path, 1, 2)
    with opened(tmp_path) as store:
        assert store.deaths == {0: 1, 1: 2, 2: 1}
        store.begun.update([3])
    with opened(tmp_path) as store:
        assert store.deaths == {0: 1, 1: 2, 2: 1}, "a process that stops in order has not died"


@pytest.mark.parametrize(
    "torn", [b"", b'{"2": 1', b"\0\0\0", b'{"2": "x"}', b'{"x": 2}', b'{"2": null}', b"[]", b"\xff"]
)
@pytest.mark.parametrize("name", [DEATHS, RECOVERY])
def test_counts_that_are_torn_are_none_and_cost_no_result(tmp_path: Path, name: str, torn: bytes) -> None:
    store = ResultStore(tmp_path, 4)
    store.append([result(0)])
    store.begun.update([1])
    os.close(store._journal)  # the process dies
    (tmp_path / name).write_bytes(torn)
    with opened(tmp_path) as store:
        assert [each.number for each in store.results()] == [0]
        assert store.deaths == {1: 1}
        assert store.recovery.recomputed_items == 1
