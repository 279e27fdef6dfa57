from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.jobs.item_set import RowSet


@given(rows=st.lists(st.integers(0, 99)), others=st.lists(st.integers(0, 99)))
def test_it_is_a_set(rows: list[int], others: list[int]) -> None:
    row_set, other_set = RowSet(100), RowSet(100)
    row_set.update(rows)
    other_set.update(others)
    assert {row for row in range(100) if row in row_set} == set(rows)
    assert len(row_set) == len(set(rows))
    assert list(row_set.beside(other_set)) == sorted(set(rows) - set(others))
    assert {row for row in range(100) if row in RowSet.from_bytes(row_set.to_bytes())} == set(rows)


def test_it_knows_whether_neighbours_are_all_in_it() -> None:
    row_set = RowSet(10)
    row_set.update([3, 4, 5])
    assert row_set.has_all(3, 3)
    assert not row_set.has_all(3, 4)


def test_one_in_a_file_is_there_again_without_having_been_closed(tmp_path: Path) -> None:
    first = RowSet.in_file(tmp_path / "bits", 20)
    first.update([0, 19])
    again = RowSet.in_file(tmp_path / "bits", 20)
    assert [row for row in range(20) if row in again] == [0, 19]
    assert len(again) == 2
