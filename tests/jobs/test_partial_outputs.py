from __future__ import annotations

from pathlib import Path

from app.jobs.partial_outputs import UnderWay
from app.jobs.preparation import PreparedRow
from tests.fakes import make_request


def row(number: int) -> PreparedRow:
    return PreparedRow(number=number, row_id="x", request=make_request(), stop=(), skip_special_tokens=True)


def known(under_way: UnderWay, number: int) -> tuple[int, ...]:
    return under_way.continued(row(number)).request.generated_token_ids


def test_a_row_goes_on_after_all_its_tokens_and_others_begin_at_the_beginning(tmp_path: Path) -> None:
    under_way = UnderWay(tmp_path / "tokens")
    under_way.add({3: (5, 6)})
    under_way.add({3: (7,), 9: (1,)})
    under_way.drop(9)
    assert known(under_way, 3) == (5, 6, 7)
    assert (known(under_way, 9), known(under_way, 4)) == ((), ())
    assert [number in under_way for number in (3, 9)] == [True, False]


def test_another_process_finds_what_was_saved_last(tmp_path: Path) -> None:
    first = UnderWay(tmp_path / "tokens")
    first.add({3: (5, 6), 2**40: (7,)})
    first.save()
    first.add({3: (8,)})  # killed before it is saved
    again = UnderWay(tmp_path / "tokens")
    assert (known(again, 3), known(again, 2**40)) == ((5, 6), (7,))


def test_a_torn_file_counts_as_none(tmp_path: Path) -> None:
    first = UnderWay(tmp_path / "tokens")
    first.add({3: (5, 6)})
    first.save()
    content = (tmp_path / "tokens").read_bytes()
    for length in range(len(content)):
        (tmp_path / "tokens").write_bytes(content[:length])
        assert 3 not in UnderWay(tmp_path / "tokens")
    (tmp_path / "tokens").write_bytes(content[:-1] + b"\1")
    assert 3 not in UnderWay(tmp_path / "tokens")


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    under_way = UnderWay(tmp_path / "tokens")
    under_way.save()
    assert not (tmp_path / "tokens").exists()
