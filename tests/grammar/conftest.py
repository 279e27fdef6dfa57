from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary, read_vocabulary
from app.text import Tokenizer

DEMO_VOCAB_SIZE = 763


@pytest.fixture(scope="session")
def vocabulary(demo_path: Path) -> Vocabulary:
    """The bundled model's."""
    return read_vocabulary(str(demo_path), None, vocab_size=DEMO_VOCAB_SIZE, eos_token_ids=(4,))


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


@pytest.fixture(scope="session")
def grammars(vocabulary: Vocabulary) -> Iterator[Grammars]:
    """With two seconds for each grammar, as by default."""
    compiled = Grammars(lambda: vocabulary)
    yield compiled
    compiled.close()
