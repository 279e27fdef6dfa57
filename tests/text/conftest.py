"""Tokenizers of the kinds that behave differently when text comes piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.text import Tokenizer
from tests.text.small_tokenizers import build_byte_fallback, build_byte_level


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.load(str(demo_path))


@pytest.fixture(scope="session")
def awkward_tokenizer() -> Tokenizer:
    """Byte-level, with tokens that begin or end inside a character; no chat template."""
    return build_byte_level()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    """Sentencepiece's way, with bytes for rare characters."""
    return build_byte_fallback()
