"""Has grammars compiled in another process first, and tells what came of it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from contextlib import suppress
from typing import IO

from app.engine.request import Grammar
from app.errors import InvalidRequest
from app.grammar.vocabulary import Vocabulary, child_command, child_environment

logger = logging.getLogger(__name__)

INVALID_GRAMMAR = "invalid_grammar"


class Taster:
    """Keeps one tasting process, and starts another when one dies of what it was given. One thread uses it."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float, memory_bytes: int) -> None:
        """A grammar may take so long, and so much memory beside the vocabulary."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def taste(self, grammar: Grammar) -> str:
        """The grammar in Lark, once it has been compiled and walked through. Raises InvalidRequest when it cannot."""
        process = self._process or self._start()
        stdin, stdout = _pipes_of(process)
        wanted = {"kind": grammar.kind, "text": grammar.text, "is_lenient": grammar.is_lenient}
        try:
            stdin.write(json.dumps(wanted).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise refusal(grammar, self._cause_of_death(process))
        answer: dict[str, str] = json.loads(line)
        if "unusable" in answer:
            raise refusal(grammar, answer["unusable"])
        return answer["lark"]

    def interrupt(self) -> None:
        """End the process, whatever it does; a grammar that it has is refused. Any thread may call."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and forget it."""
        self.interrupt()
        if self._process is not None:
            self._cause_of_death(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            child_command("app.grammar.tasting"),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash in native code writes what the log need not have
        )
        stdin, _ = _pipes_of(process)
        settings = {"timeout_s": self._timeout_s, "memory_bytes": self._memory_bytes}
        with suppress(BrokenPipeError):  # the first grammar will find out
            stdin.write(json.dumps(settings).encode() + b"\n")
            self._vocabulary.write(stdin)
        return process

    def _cause_of_death(self, process: subprocess.Popen[bytes]) -> str:
        """In words for the caller; the next grammar gets another process."""
        self._process = None
        stdin, stdout = _pipes_of(process)
        with suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        code = process.wait()
        logger.info("a tasting process has ended with %d", code)
        if code == -signal.SIGALRM:
            return f"to compile it takes longer than {self._timeout_s:g} s; make it simpler"
        return "it is too deep or too large to be compiled; make it simpler"


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return process.stdin, process.stdout


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """What the caller of a grammar hears that cannot be used."""
    return InvalidRequest(
        f"{grammar.param}: this {grammar.kind.in_words} cannot be used: {reason}",
        param=grammar.param,
        code=INVALID_GRAMMAR,
    )
