"""Requests that have made steps fail, recognised when they come again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import astuple, replace

from app.engine.request import Request

MAX_FAILURES = 2
MAX_REMEMBERED = 4_096


class Quarantine:
    """Counts failures by what is computed (prompt and sampling parameters), in bounded memory.

    Written by the engine's thread; any thread may ask.
    """

    def __init__(self) -> None:
        self._num_failures: OrderedDict[bytes, int] = OrderedDict()  # by digest; the longest ago first

    def note_failure(self, request: Request) -> None:
        """A step failed because of this request, as far as can be told."""
        digest = _digest(request)
        self._num_failures[digest] = self._num_failures.pop(digest, 0) + 1
        if len(self._num_failures) > MAX_REMEMBERED:
            self._num_failures.popitem(last=False)

    def holds(self, request: Request) -> bool:
        """Whether such a request has failed too often to be tried again."""
        return bool(self._num_failures) and self._num_failures.get(_digest(request), 0) >= MAX_FAILURES


def _digest(request: Request) -> bytes:
    # Without the seed: a caller who gives none gets a new one with every try.
    sampling = astuple(replace(request.sampling, seed=0))
    text = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    text.update(repr((sampling, request.cache_salt)).encode())
    return text.digest()
