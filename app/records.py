"""Records in a growing file or a stream. Each record consists of its length, in four bytes, and its content.

A process that dies while writing leaves a torn record at the end. Readers stop before a torn record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct(">I")


def record(content: bytes) -> bytes:
    """Return a record with this content, which must not be empty."""
    return _LENGTH.pack(len(content)) + content


class RecordReader:
    """Reads the contents of records whose bytes arrive in pieces of any size."""

    def __init__(self) -> None:
        self._begun = b""  # bytes of a record that is still incomplete

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the contents of all records that `data` completes. Exhaust the iterator before the next call."""
        data = self._begun + data if self._begun else data
        at = 0
        while at < len(data) and (end := _end_of_record(data, at)) is not None:
            yield data[at + _LENGTH.size : end]
            at = end
        self._begun = data[at:]


def num_complete_bytes(data: bytes) -> int:
    """Return how many bytes at the start of `data` are complete records."""
    at = 0
    while (end := _end_of_record(data, at)) is not None:
        at = end
    return at


def _end_of_record(data: bytes, at: int) -> int | None:
    """Return the end of the record at `at`, or None for a torn record or for zeros, which a crash may leave."""
    if len(data) < at + _LENGTH.size:
        return None
    [length] = _LENGTH.unpack_from(data, at)
    end: int = at + _LENGTH.size + length
    return end if length and end <= len(data) else None
