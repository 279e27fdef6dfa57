from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import json_structure
from app.api.json_structure import (
    CONTAINER_SIZE,
    MAX_STRINGS,
    MAX_STRUCTURE,
    MAX_VALUES,
    check_structure,
    is_longer,
    size_of,
)
from app.errors import InvalidRequest

SIGNS = st.text(st.sampled_from('a"\\[]{}:, \n\u00e9'), max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | SIGNS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(SIGNS, inner, max_size=5),
    max_leaves=25,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Lists, objects and fields, commas, and strings, the plain way."""
    if isinstance(value, list | dict):
        inner = [counted(each) for each in (value if isinstance(value, list) else value.values())]
        fields = len(value) if isinstance(value, dict) else 0
        structure = 1 + fields + sum(each[0] for each in inner)
        num_strings = fields + sum(each[2] for each in inner)
        return structure, max(0, len(value) - 1) + sum(each[1] for each in inner), num_strings
    return 0, 0, int(isinstance(value, str))


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_what_is_in_strings_does_not_count(value: Any, ascii_only: bool, piece_bytes: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_structure, "_PIECE_BYTES", piece_bytes)
        assert json_structure._counted(text) == counted(value)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":1}'])
def test_too_many_lists_and_objects_are_refused_with_their_number(item: bytes) -> None:
    most = MAX_STRUCTURE // (2 if b":" in item else 1) - 1
    check_structure([b"[" + b",".join([item] * most) + b"]"], "the body")
    with pytest.raises(InvalidRequest, match=r"the body contains 60,00\d lists, objects and fields; at most 60,000"):
        check_structure([b"[" + b",".join([item] * (most + 1)) + b"]"], "the body")


def test_too_many_values_are_refused_over_all_texts() -> None:
    texts = [b"[" + b",".join([b"1"] * 400_000) + b"]"] * 2
    check_structure(texts, "the body")
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUES:,}"):
        check_structure([*texts, texts[0]], "the body")


def test_too_many_strings_are_refused() -> None:
    check_structure([b"[" + b",".join([b'"a"'] * MAX_STRINGS) + b"]"], "the body")
    with pytest.raises(InvalidRequest, match="125,001 strings; at most 125,000"):
        check_structure([b"[" + b",".join([b'"a"'] * (MAX_STRINGS + 1)) + b"]"], "the body")


@given(VALUES)
def test_a_value_is_never_said_to_be_longer_than_its_text(value: Any) -> None:
    assert not is_longer(value, len(json.dumps(value, separators=(",", ":"), ensure_ascii=False)))


def test_a_size_is_counted_until_the_limit() -> None:
    assert size_of({"a": "bcd", "e": [1, 2]}, 1000) == 1 + CONTAINER_SIZE + 2 + 4 + 1 + CONTAINER_SIZE + 2
    assert size_of("x" * 5000, 1000) > 1000
    assert size_of([[]] * 1_000_000, 1000) > 1000
    assert size_of([1] * 1_000_000, 1000) > 1000
