"""The bytes of every token, which are matched against grammars.

Reading a tokenizer blocks a process for 0.1 s, or longer if the tokenizer requires transformers. Therefore, a separate
process (`python -m app.grammar.vocabulary`) reads the tokenizer, and writes the vocabulary to its standard output.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate, pairwise
from typing import IO

from llguidance import LLTokenizer, TokenizerWrapper

from app.child_process import child_command, child_environment
from app.errors import InvalidSetup
from app.tokenizer_files import read_tokens

READ_CPU_S = 60.0  # limit for one tokenizer; even the largest take only a few seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of a model's tokens, indexed by id. Unused ids have b""."""

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    def for_matching(self) -> LLTokenizer:
        """Return a tokenizer for llguidance. Blocks all Python threads, for 0.2 s with 128,000 tokens."""
        return LLTokenizer(_Tokens(self), eos_token=list(self.eos_token_ids))

    @property
    def special_texts(self) -> dict[str, int]:
        """Maps the texts of special tokens to their ids. Excludes tokens without a text."""
        found = ((self.tokens[token_id].decode(errors="replace"), token_id) for token_id in self.special_token_ids)
        return {text: token_id for text, token_id in found if text}

    def write(self, file: IO[bytes]) -> None:
        """Write a line of JSON, followed by the bytes of all tokens."""
        header = {
            "lengths": [len(token) for token in self.tokens],
            "special_token_ids": self.special_token_ids,
            "eos_token_ids": self.eos_token_ids,
        }
        file.write(json.dumps(header).encode() + b"\n" + b"".join(self.tokens))
        file.flush()

    @classmethod
    def read(cls, file: IO[bytes]) -> Vocabulary:
        """Read the output of `write`."""
        header = json.loads(file.readline())
        ends = [0, *accumulate(header["lengths"])]
        content = file.read(ends[-1])
        return cls(
            tokens=tuple(content[start:end] for start, end in pairwise(ends)),
            special_token_ids=tuple(header["special_token_ids"]),
            eos_token_ids=tuple(header["eos_token_ids"]),
        )


class _Tokens(TokenizerWrapper):
    """Implements the interface that llguidance requires from a custom tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # `TokenizerWrapper.__init__` is not called, because it requires an encoder.
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("llguidance does not encode text, because every grammar sets `no_forcing`")


def read_vocabulary(
    location: str, revision: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """Return the vocabulary of a tokenizer (a folder or hub id), padded to `vocab_size` ids.

    Blocks while a separate process reads the tokenizer. Raises InvalidSetup if the tokenizer cannot be read, or if
    reading takes too long.
    """
    wanted = json.dumps([location, revision, vocab_size, eos_token_ids, READ_CPU_S])
    try:
        reading = subprocess.run(
            child_command("app.grammar.vocabulary", wanted),
            env=child_environment(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise InvalidSetup(f"the tokenizer of {location} cannot be read for structured output: {error}") from error
    if reading.returncode == -signal.SIGPROF:
        raise InvalidSetup(
            f"reading the tokenizer of {location} for structured output takes more than {READ_CPU_S:g} s of CPU time"
        )
    if reading.returncode != 0:
        reason = reading.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidSetup(f"the tokenizer of {location} cannot be read for structured output: {reason[:300]}")
    return Vocabulary.read(BytesIO(reading.stdout))


def main() -> None:
    """Read the tokenizer in the command line arguments, and write its vocabulary to the standard output."""
    location, revision, vocab_size, eos_token_ids, limit_s = json.loads(sys.argv[1])
    # Limits CPU time, because wall clock time depends on the load. The signal ends the process: it has no handler.
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    backend = read_tokens(location, revision)
    backend.no_truncation()
    backend.no_padding()
    known = LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, backend.get_vocab_size()), slices=[])
    Vocabulary(
        tokens=tuple(known.decode_bytes([token_id]) for token_id in range(vocab_size)),
        special_token_ids=tuple(token_id for token_id in range(vocab_size) if known.is_special_token(token_id)),
        eos_token_ids=tuple(eos_token_ids),
    ).write(sys.stdout.buffer)


if __name__ == "__main__":
    main()
