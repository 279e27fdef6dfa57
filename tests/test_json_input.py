"""JSON as clients send it: what is read, and the place of what is refused."""

from __future__ import annotations

import pytest

from app.json_input import read_json


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"metadata": {"a": 1e999}}', "metadata.a"),
        ('{"a": [1, {"b": -1E+999}]}', r"a\[1\].b"),
        ('{"a": 1, "b": 12345678901e300}', "number at b "),
        (f'{{"a": {"9" * 310}}}', "number at a "),
        (f'{{"a": -{"9" * 310}.5}}', "number at a "),
        ("1e309", "number at the top"),
        ('{"a": [0, NaN]}', "line 1 column 11"),
        ('{"a": -Infinity}', "line 1 column 8"),
        ('{"a": "\\ud800"}', "line 1 column 14"),
    ],
)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_value_that_json_cannot_say_is_refused_by_its_place(
    text: str, place: str, kind: type[bytes | bytearray]
) -> None:
    with pytest.raises(ValueError, match=place):
        read_json(kind(text.encode()))


@pytest.mark.parametrize("value", ["1e308", "-1.7976931348623157e308", "1e-999", f"{2**1024 - 2**970 - 1}", '"1e999"'])
def test_the_largest_numbers_and_texts_like_numbers_are_read(value: str) -> None:
    assert read_json(f'[{value}, "2e5"]'.encode())[1] == "2e5"
