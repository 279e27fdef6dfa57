"""Prepares matchers in a separate thread while the model computes. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol


class Preparable(Protocol):
    """The part of a matcher that this module uses."""

    def prepare(self) -> None: ...


class MatcherPreparer:
    """A thread that prepares matchers. The caller prepares the matchers that the thread has not started in time.

    Preparing saves time if a core is idle. The thread starts with the first matcher.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")

    @contextmanager
    def preparing(self, matchers: Iterable[Preparable]) -> Iterator[None]:
        """Prepare the matchers. No matcher may be used inside the context; after it, all matchers are prepared."""
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
                elsewhere.result()  # the thread may still be preparing the last matcher that it took


def _prepare_all(left: deque[Preparable]) -> None:
    # The two threads take matchers from the same end, and `popleft` is atomic, so each matcher is taken only once.
    with suppress(IndexError):
        while True:
            matcher = left.popleft()
            with suppress(Exception):  # `allowed` raises the same error, where it can be assigned to the request
                matcher.prepare()
