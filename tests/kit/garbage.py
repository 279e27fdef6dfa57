"""Whether something stays in memory until the garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Fails when what is done in it leaves reference cycles. What was there before stays as it is."""
    gc.collect()
    gc.disable()
    debug = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.garbage.clear()
    try:
        yield
        gc.collect()
        found = sorted({type(each).__qualname__ for each in gc.garbage})
    finally:
        gc.set_debug(debug)
        gc.garbage.clear()
        gc.enable()
    assert not found, f"reference cycles are left, with {', '.join(found)}"
