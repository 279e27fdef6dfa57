"""Whether something stays in memory until the garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

KindT = TypeVar("KindT")


def in_memory(kind: type[KindT]) -> list[KindT]:
    """Return the objects of a class. `isinstance` would ask each object for its class, and some of torch warn then."""
    return [each for each in gc.get_objects() if type(each) is kind]


@contextmanager
def no_garbage() -> Iterator[None]:
    """Fail if the block leaves reference cycles. Earlier garbage does not count."""
    gc.collect()
    gc.disable()
    debug = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.garbage.clear()
    try:
        yield
        gc.collect()
        found = sorted({type(each).__qualname__ for each in _without_classes(gc.garbage)})
    finally:
        gc.set_debug(debug)
        gc.garbage.clear()
        gc.enable()
    assert not found, f"reference cycles are left, with {', '.join(found)}"


def _without_classes(garbage: Iterable[object]) -> list[object]:
    """Return the garbage without classes and their parts. ctypes creates a class for each length of an array.

    Every class is a cycle, and a class may belong to any thread.
    """
    left = {id(each): each for each in garbage}
    parts = [each for each in left.values() if isinstance(each, type)]
    while parts:
        part = parts.pop()
        if left.pop(id(part), None) is not None:
            parts += gc.get_referents(part)
    return list(left.values())
