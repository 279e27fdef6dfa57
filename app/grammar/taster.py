"""Has grammars compiled in another process first, and tells what came of it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from contextlib import suppress
from typing import IO, Any

from app.engine.request import Grammar
from app.errors import Failure
from app.grammar.compiling import Unusable
from app.grammar.vocabulary import Vocabulary, child_command, child_environment

logger = logging.getLogger(__name__)


class Taster:
    """Keeps one tasting process, and starts another when one dies of what it was given. One thread uses it."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float, memory_bytes: int) -> None:
        """A grammar may take so long, and so much memory beside the vocabulary."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def taste(self, grammar: Grammar) -> list[str]:
        """The grammar in Lark, once it has been compiled and walked through; a part for each tag of one with tags.

        Raises:
            Unusable: it cannot be, within the limits.
            Failure: the process ended for a reason of its own.
        """
        process = self._living() or self._start()
        stdin, stdout = _pipes_of(process)
        wanted = {"kind": grammar.kind, "text": grammar.text, "is_lenient": grammar.is_lenient}
        try:
            stdin.write(json.dumps(wanted).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise self._cause_of_death(process)
        answer: dict[str, Any] = json.loads(line)
        if "unusable" in answer:
            raise Unusable(answer["unusable"])
        larks: list[str] = answer["larks"]
        return larks

    def interrupt(self) -> None:
        """End the process, whatever it does; a grammar that it has is refused. Any thread may call."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and forget it."""
        self.interrupt()
        if self._process is not None:
            self._bury(self._process)

    def _living(self) -> subprocess.Popen[bytes] | None:
        """The process, unless it has died since the last grammar: then the next is not to blame."""
        if self._process is not None and self._process.poll() is not None:
            self._bury(self._process)
        return self._process

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

    def _cause_of_death(self, process: subprocess.Popen[bytes]) -> Unusable | Failure:
        """Whether it died of its grammar."""
        code = self._bury(process)
        if code == -signal.SIGALRM:
            return Unusable(f"to compile it takes longer than {self._timeout_s:g} s; make it simpler")
        if code < 0:
            return Unusable("it is too deep or too large to be compiled; make it simpler")
        return Failure(f"the process that compiles grammars has ended with {code}")

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end; the next grammar gets another. Returns the exit code, below 0 for a signal."""
        self._process = None
        stdin, stdout = _pipes_of(process)
        with suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        code = process.wait()
        logger.info("a tasting process has ended with %d", code)
        return code


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return process.stdin, process.stdout
