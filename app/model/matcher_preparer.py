"""Prepares matchers in a separate thread while the model computes. No torch here."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Protocol


class Preparable(Protocol):
    """The part of a matcher that is used here."""

    def prepare(self) -> None: ...


class MatcherPreparer:
    """A thread that prepares matchers. Matchers that it has not begun when they are needed, the caller prepares itself.

    It saves time where a core is idle. The thread starts with the first matcher.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[deque[Preparable] | None] = SimpleQueue()
        self._busy = threading.Lock()  # held while the thread prepares anything
        self._thread: threading.Thread | None = None

    @contextmanager
    def preparing(self, matchers: Iterable[Preparable]) -> Iterator[None]:
        """Inside this context the matchers must not be used; afterwards all are prepared."""
        left = deque(matchers)
        if not left:
            yield
            return
        self._start()
        self._wanted.put(left)
        try:
            yield
        finally:
            while left:
                _prepare_one(left)
            with self._busy:  # wait for the one that the thread prepares now
                pass

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._wanted, self._busy), name="masks", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._wanted.put, None)


def _work(wanted: SimpleQueue[deque[Preparable] | None], busy: threading.Lock) -> None:
    while (left := wanted.get()) is not None:
        with busy:
            while left:
                _prepare_one(left)


def _prepare_one(left: deque[Preparable]) -> None:
    # Both threads take from the same end, and each matcher is taken once: `popleft` is atomic.
    with suppress(IndexError):
        matcher = left.popleft()
        with suppress(Exception):  # `allowed` raises the same error, and there the request at fault is found
            matcher.prepare()
