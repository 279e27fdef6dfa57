"""Large answers as JSON, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import to_json

from app.json_pieces import PIECE_BYTES, Rows, as_json, event, joined, json_pieces


def test_a_value_without_rows_is_one_piece() -> None:
    value = {"text": 'é "0" \x00', "numbers": [1, 2.5, None]}
    assert list(json_pieces(value)) == [to_json(value)]


@pytest.mark.parametrize("num_rows", [0, 1, 2048, 2049, 50_000])
def test_rows_are_written_where_they_stand(num_rows: int) -> None:
    numbers = list(range(num_rows))
    value = {"a": [{"n": Rows.of(numbers)}, "x"], "b": Rows.of(numbers, lambda some: [str(each) for each in some])}
    written = json.loads(b"".join(json_pieces(value)))
    assert written == {"a": [{"n": numbers}, "x"], "b": list(map(str, numbers))}


def test_pieces_do_not_grow_with_the_answer_and_no_row_is_made_before_its_piece() -> None:
    made = 0

    def some_at_a_time() -> Any:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield ["x" * 1000] * 10

    pieces = json_pieces({"rows": Rows(some_at_a_time)})
    first = next(pieces)
    assert made < 10
    sizes = [len(first), *map(len, pieces)]
    assert (made, len(sizes) > 100, max(sizes) < PIECE_BYTES + 20_000) == (1000, True, True)


def test_short_rows_that_take_long_to_make_are_pieces_too() -> None:
    assert len(list(json_pieces(Rows(lambda: iter([[1]] * 1000))))) > 1000 / 20


def test_rows_can_be_written_twice() -> None:
    value = {"rows": Rows(lambda: iter([[1], list[int](), [2]]))}
    assert b"".join(json_pieces(value)) == b"".join(json_pieces(value)) == b'{"rows":[1,2]}'


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="object is not JSON"):
        list(json_pieces({"a": object()}))


def test_short_pieces_are_put_together() -> None:
    assert list(joined([b"ab", b"", b"c"])) == [b"abc"]
    assert list(joined([])) == []
    assert [len(piece) for piece in joined([b"x" * PIECE_BYTES] * 3)] == [PIECE_BYTES] * 3


LINE_ENDS = "a\u0085b\u2028c\u2029d\n\r\x0b\x0c\x1c\x1d\x1e\u201c\u00c5"  # all that Python ends a line at, and others


@pytest.mark.parametrize(
    "write",
    [as_json, event, lambda value: b"".join(json_pieces({"rows": Rows.of([value])}))],
    ids=["as_json", "event", "json_pieces"],
)
def test_no_text_ends_a_line(write: Any) -> None:
    written = write({"text": LINE_ENDS}).decode().rstrip("\n")
    assert len(written.splitlines()) == 1
    assert json.dumps(LINE_ENDS)[1:-1] in json.dumps(json.loads(written.removeprefix("data: ")))


def test_a_number_that_json_cannot_say_is_null() -> None:
    assert as_json({"a": float("inf"), "b": float("nan")}) == b'{"a":null,"b":null}'
