"""The bytes of tokens, as tokenizers of different kinds have them."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest, InvalidSetup
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary, read_vocabulary
from app.text import Tokenizer
from tests.grammar.documents import allowed_ids, matcher_for, request_for, write
from tests.text.small_tokenizers import AWKWARD, build_byte_fallback, build_byte_level
from tests.waiting import eventually


def vocabulary_of(tokenizer: Tokenizer, folder: Path) -> Vocabulary:
    """As it is read from a model's folder; two ids more than the tokenizer has, as padded models do."""
    tokenizer._pretrained.save_pretrained(folder)
    end, size = tokenizer._backend.token_to_id("<end>"), tokenizer._backend.get_vocab_size()
    return read_vocabulary(str(folder), None, vocab_size=size + 2, eos_token_ids=(end,))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary_of(build_byte_level(), tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary_of(build_byte_fallback(), tmp_path_factory.mktemp("byte-fallback"))


def grammars_of(vocabulary: Vocabulary) -> Grammars:
    return Grammars(lambda: vocabulary)


def test_tokens_of_bytes_are_their_bytes(byte_level: Vocabulary) -> None:
    assert byte_level.tokens[:255] == tuple(bytes([byte]) for byte in range(255))  # 255 is in no character
    assert set(AWKWARD) <= set(byte_level.tokens)


def test_tokens_of_sentencepiece_have_spaces_and_bytes(byte_fallback: Vocabulary) -> None:
    assert byte_fallback.tokens[:7] == (b" ", b" hello", b" a", b"a", b"b", b"lo", "é".encode())
    assert byte_fallback.tokens[7:262] == tuple(bytes([byte]) for byte in range(255))


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux does a thread have a priority of its own")
def test_a_vocabulary_is_read_at_this_processs_priority_when_it_is_prepared_else_behind_those_that_serve(
    byte_level: Vocabulary,
) -> None:
    """A process that a thread starts has the thread's priority."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    steps: list[int] = []

    def read() -> Vocabulary:
        steps.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - ours)
        return byte_level

    prepared, unprepared = Grammars(read), Grammars(read)
    prepared.prepare()
    eventually(lambda: len(steps) == 1)
    with closing(prepared), closing(unprepared):
        for grammars in (prepared, unprepared):
            matcher_for(grammars, GrammarKind.REGEX, "x")
    assert steps == [0, max(10 - ours, 4) if ours < 19 else 0]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_may_be_split_among_tokens(request: pytest.FixtureRequest, kind: str) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(kind)
    grammars = grammars_of(vocabulary)
    texts = ["é€😀", "x hello a", "xéyé"]
    for seed in range(10):
        for text in texts:
            assert write(matcher_for(grammars, GrammarKind.REGEX, text), vocabulary, seed) == text.encode()
    grammars.close()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_special_tokens_and_ids_of_no_token_are_never_text(request: pytest.FixtureRequest, kind: str) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(kind)
    grammars = grammars_of(vocabulary)
    [end] = vocabulary.eos_token_ids
    allowed = allowed_ids(matcher_for(grammars, GrammarKind.REGEX, "(?s:.+)"))
    assert not set(allowed) & {end, len(vocabulary.tokens) - 1, len(vocabulary.tokens) - 2}
    assert end in allowed_ids(matcher_for(grammars, GrammarKind.REGEX, "(?s:.*)"))
    grammars.close()


def test_it_crosses_to_another_process_as_it_is(byte_level: Vocabulary) -> None:
    written = io.BytesIO()
    byte_level.write(written)
    written.seek(0)
    assert Vocabulary.read(written) == byte_level


def test_a_tokenizer_may_take_so_much_cpu_and_no_more(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.grammar.vocabulary.READ_CPU_S", 0.05)
    with pytest.raises(InvalidSetup, match=r"takes more than 0\.05 s of CPU"):
        read_vocabulary(str(demo_path), None, vocab_size=5_000_000, eos_token_ids=(1,))  # takes seconds


def test_without_a_tokenizer_structured_outputs_are_refused_and_no_path_is_told(tmp_path: Path) -> None:
    num_reads = 0

    def read() -> Vocabulary:
        nonlocal num_reads
        num_reads += 1
        with pytest.raises(InvalidSetup, match="cannot be read for structured output") as failed:
            read_vocabulary(str(tmp_path), None, vocab_size=9, eos_token_ids=(1,))
        raise failed.value

    grammars = Grammars(read)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="structured output is not supported") as refused:
            grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "a"))).result()
        assert str(tmp_path) not in str(refused.value)
    assert num_reads == 1
    grammars.close()
