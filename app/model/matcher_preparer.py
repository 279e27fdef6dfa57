"""Prepares the next tokens' masks in a separate thread while the model is computing. Does not import torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol


class Preparable(Protocol):
    """The method of a matcher that this module calls."""

    def prepare(self) -> None: ...


class MatcherPreparer:
    """A thread that prepares matchers. The caller itself prepares those that the thread has not begun in time.

    This saves time if a core is idle. The thread is started for the first matcher.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")

    @contextmanager
    def preparing(self, matchers: Iterable[Preparable]) -> Iterator[None]:
        """Prepare matchers during the `with` block, which must not use them. All are prepared when the block ends."""
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
                elsewhere.result()  # the thread may still be preparing its last matcher


def _prepare_all(left: deque[Preparable]) -> None:
    # `popleft` is atomic, so each matcher is prepared only once although both threads run this loop.
    with suppress(IndexError):
        while True:
            matcher = left.popleft()
            with suppress(Exception):  # `allowed` raises it again, where the request is known
                matcher.prepare()
