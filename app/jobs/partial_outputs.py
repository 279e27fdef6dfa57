"""The tokens of rows that have begun and not ended, so that another engine, or another run, goes on after them.

A token is a function of the row, its seed and the tokens before it, so these are all the state there is. They lie in
memory, and in a file that is renewed as a whole: after a crash it holds what was known a moment before.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from app.jobs.preparation import PreparedRow

_SHARE_OF_TIME = 0.02  # at most, for writing: a run with very many rows under way writes them less often
_HEAD_BYTES = 8


class UnderWay:
    """By row: the tokens that are known."""

    def __init__(self, path: Path) -> None:
        """Take up what an earlier run left in the file; nothing if it is torn."""
        self._path = path
        self._token_ids = dict(_read(path))
        self._has_changed = False
        self._next_save_at = 0.0

    def __contains__(self, row: int) -> bool:
        return row in self._token_ids

    def add(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Rows have got further tokens."""
        self._has_changed = self._has_changed or bool(token_ids)
        for row, more in token_ids.items():
            self._token_ids.setdefault(row, array("q")).extend(more)

    def drop(self, row: int) -> None:
        """The row has its record."""
        self._token_ids.pop(row, None)

    def continued(self, row: PreparedRow) -> PreparedRow:
        """The row as an engine gets it: it goes on after the tokens that are known."""
        token_ids = self._token_ids.get(row.number)
        if token_ids is None:
            return row
        return replace(row, request=replace(row.request, generated_token_ids=tuple(token_ids)))

    def save(self) -> None:
        """Write all of it, unless nothing is new, or that was done just now and takes long. Raises OSError."""
        began_at = time.monotonic()
        if not self._has_changed or began_at < self._next_save_at:
            return
        content = array("q")
        for row, token_ids in self._token_ids.items():
            content.extend((row, len(token_ids)))
            content.extend(token_ids)
        body = content.tobytes()
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        # Not synced: whether the machine's death leaves it torn, the checksum tells, and then those rows begin again.
        temporary.write_bytes(crc32(body).to_bytes(_HEAD_BYTES, "big") + body)
        os.rename(temporary, self._path)
        self._has_changed = False
        ended_at = time.monotonic()
        self._next_save_at = ended_at + (ended_at - began_at) / _SHARE_OF_TIME


def _read(path: Path) -> Iterator[tuple[int, array[int]]]:
    content = path.read_bytes() if path.exists() else b""
    head, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
    if not body or crc32(body).to_bytes(_HEAD_BYTES, "big") != head:
        return
    values, place = array("q", body), 0
    while place < len(values):
        row, num_tokens = values[place], values[place + 1]
        yield row, values[place + 2 : place + 2 + num_tokens]
        place += 2 + num_tokens
