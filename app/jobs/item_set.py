"""A set of row numbers in one bit each: a million rows take 125 kB."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


class RowSet:
    """Which of the rows 0 to num_rows - 1 are in it."""

    def __init__(self, num_rows: int, bits: bytearray | mmap.mmap | None = None) -> None:
        self._bits = bytearray(_num_bytes(num_rows)) if bits is None else bits
        self._count = sum(byte.bit_count() for byte in self._bits[:])

    @classmethod
    def in_file(cls, path: Path, num_rows: int) -> RowSet:
        """A set that lives in a file: what was added is there after the death of this process, however it came."""
        with path.open("a+b") as file:
            # Given its blocks now: a write into a hole of a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, _num_bytes(num_rows))
            return cls(num_rows, mmap.mmap(file.fileno(), _num_bytes(num_rows)))

    @classmethod
    def from_bytes(cls, bits: bytes) -> RowSet:
        """What `to_bytes` was called on."""
        return cls(8 * len(bits), bytearray(bits))

    def to_bytes(self) -> bytes:
        return bytes(self._bits)

    def add(self, row: int) -> None:
        if row not in self:
            self._bits[row >> 3] |= 1 << (row & 7)
            self._count += 1

    def update(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.add(row)

    def __contains__(self, row: int) -> bool:
        return bool(self._bits[row >> 3] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def has_all(self, first: int, num_rows: int) -> bool:
        """Whether so many rows from `first` on are all in it."""
        return all(row in self for row in range(first, first + num_rows))

    def beside(self, other: RowSet) -> Iterator[int]:
        """The rows that are in this set and not in the other, in order."""
        for place, (mine, others) in enumerate(zip(self.to_bytes(), other.to_bytes(), strict=True)):
            if left := mine & ~others & 0xFF:
                yield from (8 * place + bit for bit in range(8) if left >> bit & 1)


def _num_bytes(num_rows: int) -> int:
    return max(1, (num_rows + 7) // 8)
