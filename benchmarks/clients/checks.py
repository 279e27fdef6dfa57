"""Checks that run in a client's own environment: the standard library only."""

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
OUT = Path(tempfile.gettempdir())  # a folder of this run's own: `make clients` says where temporary files go

Check = Callable[[], None]
Wrong = TypeVar("Wrong", bound=Exception)


def run(*checks: Check, **named: Check) -> None:
    """Each of them, whatever comes of the others; a line of JSON for each."""
    for name, check in (named | {check.__name__: check for check in checks}).items():
        problem = None
        try:
            check()
        except Exception as error:  # whatever a client raises is what came of the check
            problem = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps({"check": name, "problem": problem}), flush=True)


def expect(is_so: bool, problem: object) -> None:
    """Raises AssertionError; unlike `assert` under every interpreter option."""
    if not is_so:
        raise AssertionError(problem)


def raised(kind: type[Wrong], ask: Callable[[], object]) -> Wrong:
    """The error of this kind that a client raises. Raises AssertionError where it raises none."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def tell(note: str) -> None:
    """A line of JSON for what was found beside right or wrong."""
    print(json.dumps({"note": note}), flush=True)


def ran(*command: str | Path, timeout_s: float = 600.0, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a program of this environment printed on both streams; a line of JSON tells the command.

    `variables`: more of the program's environment. It has no standard input, and works in the folder of this run where
    it has variables.

    Raises AssertionError when it fails, with the end of what it printed.
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
    """A command as it can be repeated on another machine."""
    text = shlex.join(words)
    for value, name in ((BASE_URL, "$URL"), (FOLDER, "$FOLDER"), (str(OUT), "$OUT")):
        text = text.replace(value, name)
    return text
