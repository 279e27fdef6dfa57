"""Records come out as they went in, however their bytes are cut, and a torn one stops the reader."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.records import RecordReader, num_complete_bytes, record

CONTENTS = st.lists(st.binary(min_size=1, max_size=40), max_size=12)


@given(CONTENTS, st.lists(st.integers(0, 600), max_size=8))
def test_pieces_of_any_size_give_the_same_records(contents: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(record, contents))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = RecordReader()
    read = [each for begin, end in pairwise(places) for each in list(reader.feed(data[begin:end]))]
    assert read == contents


@given(CONTENTS, st.binary(min_size=1, max_size=40), st.integers(0, 43))
def test_a_torn_record_and_everything_behind_it_do_not_count(contents: list[bytes], last: bytes, cut: int) -> None:
    data = b"".join(map(record, contents))
    torn = record(last)[: min(cut, len(last) + 3)]
    assert num_complete_bytes(data + torn) == len(data)
    assert list(RecordReader().feed(data + torn)) == contents
    hole = bytes(100)  # as the death of a machine may leave it
    assert num_complete_bytes(data + hole) == len(data)
