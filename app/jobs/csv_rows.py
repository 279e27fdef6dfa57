"""Reads the rows of a CSV stream, each with its position in the file.

Uses Python's `csv` module, because pyarrow's reader does not report positions. Without positions, every piece of a file
would have to be read from the file's first byte, because quoted cells may contain line ends.
"""

from __future__ import annotations

import csv
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from app.batches import MAX_REQUEST_BYTES
from app.errors import InvalidSetup

DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format


class Border(NamedTuple):
    """A position between two lines of a file."""

    offset: int = 0  # in bytes
    line: int = 1  # number of the line after the border, from 1


START = Border()


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRow:
    """The header, or a row with at least one non-empty cell."""

    cells: list[str]
    begin: Border
    end: Border  # may be several lines after `begin`, because a quoted cell may contain line ends


def read_csv_rows(
    stream: BinaryIO,
    delimiter: str,
    *,
    name: str,
    begin: Border = START,
    on_bytes: Callable[[bytes], object] = lambda _: None,
) -> Iterator[CsvRow]:
    """Yield the rows of a UTF-8 stream in order, including the header.

    `begin` is the stream's position in the file and must lie between two rows. `on_bytes` is called with the bytes of
    each line. Error messages name the file as `name`.

    Raises:
        InvalidSetup: the text is not UTF-8, a line or a cell exceeds the limit for requests, or unbalanced quotes make
            it uncertain where the next row begins.
    """
    lines = _Lines(stream, name, begin, on_bytes)
    csv.field_size_limit(MAX_REQUEST_BYTES)  # for the whole process; the default is 131,072 characters
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        begin = lines.place
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InvalidSetup(
                f"{name}:{begin.line}: the row that begins on this line cannot be read: {error}. A cell that begins "
                f"with a quote must end with one, quotes inside it must be doubled, and lines must end with \\n or "
                f"\\r\\n"
            ) from error
        if cells is None:
            return
        if delimiter == DELIMITERS["tsv"] and lines.place.line > begin.line + 1:
            raise InvalidSetup(
                f"{name}:{begin.line}: a quote that opens on this line closes on a later line, but a TSV row must be "
                f"one line. Use CSV or JSONL for texts with line breaks, quote cells that contain quotes, and double "
                f"the quotes inside them"
            )
        if any(cells) or (cells and begin == START):
            yield CsvRow(cells=cells, begin=begin, end=lines.place)


class _Lines:
    """Yields a stream's lines with their line ends, and tracks the position of the next line."""

    def __init__(self, stream: BinaryIO, name: str, begin: Border, on_bytes: Callable[[bytes], object]) -> None:
        self._stream = stream
        self._name = name
        self._on_bytes = on_bytes
        self.place = begin  # the position before the next line

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        data = self._stream.readline(MAX_REQUEST_BYTES + 1)
        if not data:
            raise StopIteration
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidSetup(
                f"{self._name}:{self.place.line}: the line has more than {MAX_REQUEST_BYTES:,} bytes, the maximum for "
                f"one line; lines must end with \\n or \\r\\n"
            )
        try:
            text = (data.removeprefix(BOM_UTF8) if self.place.offset == 0 else data).decode()
        except UnicodeDecodeError:
            raise InvalidSetup(
                f"{self._name}:{self.place.line}: the line is not UTF-8; save the file as UTF-8, or convert it if "
                f"Excel wrote it: iconv -f WINDOWS-1252 -t UTF-8"
            ) from None
        self._on_bytes(data)
        self.place = Border(self.place.offset + len(data), self.place.line + 1)
        return text
