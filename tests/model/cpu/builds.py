"""Native code that is built with further flags, for tests of what this machine's CPU does not have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from app.model.cpu import library as native

# Half of the compiler's time. Products and sums are joined as with -O3, so bits are the same.
QUICK = ("-O1", "-fexpensive-optimizations")
PLAIN_AMX = "-DCAROUSEL_PLAIN_AMX=0"  # plain C++ in place of AMX


@contextmanager
def built_with(*flags: str) -> Iterator[ctypes.CDLL]:
    """Meanwhile, teams begin in the library with these flags. Skips the test where there is no compiler."""
    code = _library(flags)
    if code is None:
        pytest.skip("no C++ compiler here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: code)
        yield code


@cache
def _library(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", (*native._FLAGS, *flags))
        return native.library.__wrapped__()
