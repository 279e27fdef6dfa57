"""The process that compiles a grammar for the first time (`python -m app.grammar.sandbox_worker`).

Some grammars make the compiler overflow its stack, allocate gigabytes, or run for minutes. These grammars only end this
process, by a limit or a crash, and `sandbox.py` starts a new process.

The process reads a line with settings and the vocabulary from its standard input, followed by one grammar per line. For
each grammar, it writes one line: a `Compiled` from `compiling.py`, or the reason why the grammar cannot be used.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from app.child_process import lower_priority
from app.engine.request import GrammarKind
from app.grammar.compiling import Unusable, compiled
from app.grammar.vocabulary import Vocabulary

MAX_WALL_S = 60.0  # wall clock limit for startup and for each grammar, generous because a busy machine may be slow


def main() -> None:
    """Compile grammars until the input ends."""
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)  # the signal ends the process, because it has no handler
    lower_priority()
    _die_first()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = json.loads(sys.stdin.buffer.readline())
    vocabulary = Vocabulary.read(sys.stdin.buffer)
    tokenizer = vocabulary.for_matching()
    limit = _address_space() + settings["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The engine's threads, which recompile tested grammars, have eight times this stack.
    stack_bytes = 1 << 20
    threading.stack_size(stack_bytes)
    answering = threading.Thread(target=_answer_all, args=(tokenizer, vocabulary.special_texts, settings["timeout_s"]))
    answering.start()
    answering.join()


def _answer_all(tokenizer: LLTokenizer, special: Mapping[str, int], timeout_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # CPU time of this process; its signal has no handler either
        answer = _answer(tokenizer, special, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(tokenizer: LLTokenizer, special: Mapping[str, int], wanted: dict[str, Any]) -> dict[str, Any]:
    kind = GrammarKind(wanted["kind"])
    try:
        made = compiled(tokenizer, kind, wanted["text"], is_lenient=wanted["is_lenient"], special=special)
    except Unusable as reason:
        return {"unusable": str(reason)}
    except (MemoryError, RecursionError):
        return {"unusable": "it is too deep or too large to be compiled; simplify it"}
    return asdict(made)


def _die_first() -> None:
    """If memory is short, make the kernel kill this process instead of the replica."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
