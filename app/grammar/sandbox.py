"""Compiles grammars in a separate process (`sandbox_worker.py`) with limits on CPU time and memory."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from contextlib import suppress
from typing import IO, Any

from app.child_process import child_command, child_environment
from app.engine.request import Grammar
from app.errors import Failure
from app.grammar.compiling import Compiled, Unusable
from app.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class WorkerKilled(Exception):
    """Raised if a signal ended the worker while it was compiling a grammar.

    `is_from_outside` is True if the worker did not cause the signal: the kernel kills processes if memory is short.
    """

    def __init__(self, signal_number: int) -> None:
        self.is_from_outside = signal_number in (signal.SIGKILL, signal.SIGALRM, signal.SIGTERM)
        super().__init__(
            f"the process that was compiling it was killed by signal {signal_number}"
            if self.is_from_outside
            else "it is too deep or too large to be compiled; simplify it"
        )


class Sandbox:
    """Runs one worker process, and replaces it after it has ended. Must be used by one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float, memory_bytes: int) -> None:
        """Each grammar may use `timeout_s` of CPU time, and `memory_bytes` in addition to the vocabulary."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._is_interrupted = False

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile and test a grammar. Blocks until the worker responds or ends.

        Raises:
            Unusable: the grammar cannot be used, or cannot be compiled within the limits.
            WorkerKilled: a signal ended the worker twice, or once after `interrupt`.
            Failure: the worker ended for another reason.
        """
        try:
            return self._compile_once(grammar)
        except WorkerKilled as killed:
            if self._is_interrupted:
                raise
            logger.warning("compiling a grammar failed and is being retried: %s", killed)
            return self._compile_once(grammar)

    def _compile_once(self, grammar: Grammar) -> Compiled:
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
            raise self._error_of_end(process)
        answer: dict[str, Any] = json.loads(line)
        if "unusable" in answer:
            raise Unusable(answer["unusable"])
        return Compiled(**answer)

    def interrupt(self) -> None:
        """Kill the worker. Its current grammar is not retried. Thread-safe."""
        self._is_interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the worker and wait until it has ended."""
        self.interrupt()
        if self._process is not None:
            self._wait_for(self._process)

    def _living(self) -> subprocess.Popen[bytes] | None:
        """Return the worker, or None if it has ended. Otherwise, the next grammar would be blamed for the end."""
        if self._process is not None and self._process.poll() is not None:
            self._wait_for(self._process)
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            child_command("app.grammar.sandbox_worker"),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash in native code writes confusing lines
        )
        stdin, _ = _pipes_of(process)
        settings = {"timeout_s": self._timeout_s, "memory_bytes": self._memory_bytes}
        with suppress(BrokenPipeError):  # `_compile_once` handles a broken pipe
            stdin.write(json.dumps(settings).encode() + b"\n")
            self._vocabulary.write(stdin)
        return process

    def _error_of_end(self, process: subprocess.Popen[bytes]) -> Unusable | WorkerKilled | Failure:
        """Return the error for the grammar that was being compiled when the worker ended."""
        code = self._wait_for(process)
        if code == -signal.SIGPROF:  # the limit of CPU time, which does not depend on other processes
            return Unusable(f"compiling takes more than {self._timeout_s:g} s of CPU time; simplify it")
        if code < 0:
            return WorkerKilled(-code)
        return Failure(f"the process that compiles grammars has ended with status {code}")

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the worker ends, and drop it. Returns its exit code (negative for a signal)."""
        self._process = None
        stdin, stdout = _pipes_of(process)
        with suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        code = process.wait()
        logger.info("a process that compiles grammars has ended with status %d", code)
        return code


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return process.stdin, process.stdout
