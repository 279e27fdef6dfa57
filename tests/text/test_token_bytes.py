"""Tokens as bytes: one after the other they are the text."""

from __future__ import annotations

import pytest

from app.text import Tokenizer, TokenOffsets
from tests.text.small_tokenizers import AWKWARD

TEXTS = ("Hello, what is 3 + 4?", "é € 😀 x", "  two  spaces\n")


@pytest.mark.parametrize("text", TEXTS)
def test_the_bundled_models_bytes_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_tokens_that_split_characters(awkward_tokenizer: Tokenizer) -> None:
    found = {awkward_tokenizer.token_bytes(token_id) for token_id in range(256 + len(AWKWARD))}
    assert found >= set(AWKWARD)
    assert found >= {bytes([byte]) for byte in range(256)}


def test_special_tokens_are_written_as_they_are(awkward_tokenizer: Tokenizer) -> None:
    [end] = awkward_tokenizer.special_token_ids
    assert awkward_tokenizer.token_bytes(end) == b"<end>"
    assert awkward_tokenizer.token_bytes(100_000) == b""


def test_sentencepieces_spaces_and_bytes(fallback_tokenizer: Tokenizer) -> None:
    token_ids = {text: number for number, text in enumerate(["▁", "▁hello", "▁a", "a", "b", "lo", "é"])}
    assert fallback_tokenizer.token_bytes(token_ids["▁hello"]) == b" hello"
    assert fallback_tokenizer.token_bytes(token_ids["é"]) == "é".encode()
    assert fallback_tokenizer.token_bytes(len(token_ids) + 0xE2) == b"\xe2"


def test_offsets_are_those_of_the_characters_that_tokens_are_part_of(awkward_tokenizer: Tokenizer) -> None:
    """`a`, the three bytes of a euro sign, `b`."""
    offsets = TokenOffsets(awkward_tokenizer, skip_special_tokens=True)
    assert offsets.push([0x61, 0xE2, 0x82]) == [0, 1, 1]
    assert offsets.push([0xAC, 0x62]) == [1, 2]
