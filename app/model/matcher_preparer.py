"""Prepares matchers in a separate thread while the model computes. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol


class Preparable(Protocol):
    """The part of a matcher that is used here."""

    def prepare(self) -> None: ...


class MatcherPreparer:
    """A thread that prepares matchers. Matchers that it has not begun when they are needed, the caller prepares itself.

    It saves time where a core is idle. The thread starts with the first matcher.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")

    @contextmanager
    def preparing(self, matchers: Iterable[Preparable]) -> Iterator[None]:
        """Inside this context the matchers must not be used; afterwards all are prepared."""
        left = deque(matchers)
        if not left:
            yield
            return
        elsewhere = self._thread.submit(_prepare_all, left)
        try:
            yield
        finally:
            _prepare_all(left)
            if not elsewhere.cancel():
                elsewhere.result()  # it may still prepare the last that it took


def _prepare_all(left: deque[Preparable]) -> None:
    # Both threads take from the same end, and each matcher is taken once: `popleft` is atomic.
    with suppress(IndexError):
        while True:
            matcher = left.popleft()
            with suppress(Exception):  # `allowed` raises the same error, and there the request at fault is found
                matcher.prepare()
