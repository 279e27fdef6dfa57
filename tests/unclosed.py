"""Whether something is left for the garbage collector to close, told to the test that left it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def nothing_unclosed() -> Iterator[None]:
    """Fails when what is done in it leaves something open, or raises where no caller can catch it.

    A connection that was not closed may stand in a cycle of references: its warning comes when the collector runs
    next, as a rule in another test; and only where it finds the connection before the response that holds it, which
    would release it. They lie in the order in which they were made until a collection that they survive mixes
    them; so there is none but the last.
    """
    gc.freeze()  # what others have left is theirs, and need not be looked at
    found: list[str] = []

    def note(unraisable: Any) -> None:
        found.append(str(unraisable.exc_value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", note)
        gc.disable()
        try:
            yield
            gc.collect()
        finally:
            gc.enable()
            gc.unfreeze()
    assert not found, f"left behind: {'; '.join(found)}"
