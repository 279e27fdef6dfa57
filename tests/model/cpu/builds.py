"""Native code that is built with further flags, for tests of what this machine's CPU does not have."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from app.disk import cache_folder
from app.model.cpu import library as native

# Half of the compiler's time. Products and sums are joined as with -O3, so bits are the same.
QUICK = ("-O1", "-fexpensive-optimizations")
PLAIN_AMX = "-DCAROUSEL_PLAIN_AMX=0"  # plain C++ in place of AMX
# The same, with attention in small pieces: of more tokens than other builds are compared with.
IN_TILES = (PLAIN_AMX, "-DCAROUSEL_PIECE=96", *QUICK)


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


def program(compiler: str, source: str, *flags: str) -> Path:
    """A program whose source lies beside this file; kept as the library is, under what it was built from."""
    path = Path(__file__).with_name(source)
    options = ("-std=c++17", "-O1", "-pthread", *flags)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    what = [path.read_bytes(), *native._source_texts(), version, " ".join(options).encode(), native._cpu().encode()]
    target = cache_folder() / "native-tests" / hashlib.sha256(b"\0".join(what)).hexdigest()[:16]
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / source
            command = [compiler, *options, f"-I{native._SOURCES}", str(path), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            built.replace(target)
    return target
