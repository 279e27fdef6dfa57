"""Checks that run in a client's own environment. This module needs only the standard library."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

BASE_URL = os.environ.get("CAROUSEL_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CAROUSEL_MODEL", "demo")
FOLDER = os.environ.get("CAROUSEL_MODEL_FOLDER", "models/demo")  # for clients that count tokens themselves
OUT = Path(tempfile.gettempdir())  # this run's own folder: `make clients` sets the place of temporary files

Check = Callable[[], None]
Wrong = TypeVar("Wrong", bound=Exception)


def run(*checks: Check, **named: Check) -> None:
    """Run each check, even if another check fails, and print a line of JSON for each."""
    for name, check in (named | {check.__name__: check for check in checks}).items():
        problem = None
        try:
            check()
        except Exception as error:  # any error of a client is the result of the check
            problem = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps({"check": name, "problem": problem}), flush=True)


def expect(is_so: bool, problem: object) -> None:
    """Raise AssertionError if it is not so; unlike `assert`, this works under every interpreter option."""
    if not is_so:
        raise AssertionError(problem)


def raised(kind: type[Wrong], ask: Callable[[], object]) -> Wrong:
    """Return the error of this kind that a client raises. Raises AssertionError if the client raises none."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def tell(note: str) -> None:
    """Print a line of JSON with a note that is neither a success nor a problem."""
    print(json.dumps({"note": note}), flush=True)


def ran(*command: str | Path, timeout_s: float = 600.0, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a program of this environment; return the output of both streams. A line of JSON reports the command.

    `variables`: added to the program's environment. The program has no standard input. With variables, it works in the
    folder of this run.

    Raises AssertionError when the program fails, with the end of its output.
    """
    words = [str(word) for word in command]
    settings = [f"{name}={value}" for name, value in variables.items()]
    print(json.dumps({"command": shown(settings + words)}), flush=True)
    beside = Path(sys.executable).parent / words[0]
    words[0] = sys.executable if words[0] == "python" else str(beside) if beside.exists() else words[0]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=timeout_s, env=os.environ | variables, cwd=OUT if variables else None,
    )  # fmt: skip
    expect(done.returncode == 0, f"status {done.returncode}: …{done.stdout[-400:]}")
    return done.stdout


def shown(words: list[str]) -> str:
    """Return a command in a form that can be repeated on another machine."""
    text = shlex.join(words)
    for value, name in ((BASE_URL, "$URL"), (FOLDER, "$FOLDER"), (str(OUT), "$OUT")):
        text = text.replace(value, name)
    return text
