"""Checks that run in a client's own environment: the standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

BASE_URL = os.environ.get("CAROUSEL_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CAROUSEL_MODEL", "demo")

Check = Callable[[], None]


def run(*checks: Check) -> None:
    """Each of them, whatever comes of the others; a line of JSON for each."""
    for check in checks:
        try:
            check()
        except Exception as error:  # whatever a client raises is what came of the check
            print(
                json.dumps({"check": check.__name__, "problem": f"{type(error).__name__}: {error}"[:500]}), flush=True
            )
        else:
            print(json.dumps({"check": check.__name__, "problem": None}), flush=True)


def expect(is_so: bool, problem: object) -> None:
    """Raises AssertionError; unlike `assert` under every interpreter option."""
    if not is_so:
        raise AssertionError(problem)
