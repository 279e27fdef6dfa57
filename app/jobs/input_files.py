"""Finds a bulk run's input files, scans them once before the run starts, and reads their rows in pieces.

The scan stores 8 bytes per row (a hash of its id). It returns the number of rows, a fingerprint by which a resumed run
recognizes its input, and the pieces. Each piece carries its row numbers and can be read independently.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shlex
from array import array
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy
import pyarrow
from pyarrow import fs, parquet

from app.batches import PIECE_BYTES
from app.errors import InvalidSetup
from app.jobs.csv_rows import DELIMITERS, START, Border, CsvRow, read_csv_rows
from app.jobs.items import (
    Row,
    RowSettings,
    has_question,
    hash_of_id,
    row_from_cells,
    row_from_fields,
    row_from_line,
    without_bom,
)
from app.jobs.run_folder import MANIFEST

logger = logging.getLogger(__name__)

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
HIDDEN = (".", "_")  # a folder or a pattern does not include files whose names begin with one of these characters
ROWS_IN_A_PIECE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One input file."""

    uri: str
    name: str  # relative to the common folder of all input files; prefixes the ids of rows that have no id
    format: str  # jsonl, csv, tsv, parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPiece:
    """Consecutive rows of one file, read by one task."""

    file: InputFile
    first_number: int  # the number of the piece's first row in the whole input
    num_rows: int
    first_line: int  # the line in the file, from 1; each row of a Parquet file counts as a line
    offset: int = 0  # where the piece begins in the file, in bytes; only for JSONL and CSV
    row_group: int = 0  # only for Parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """The result of a scan of all files."""

    files: tuple[InputFile, ...]
    pieces: tuple[InputPiece, ...]
    num_rows: int
    fingerprint: str


def find_files(pattern: str) -> tuple[InputFile, ...]:
    """Return the file at a path, the files in a folder, or those that match a glob pattern, sorted by name.

    `pattern` is a local path, or a URI that pyarrow (and so Ray Data) can open: s3://, gs://, abfs://, hdfs://. A
    folder includes its sub-folders. As in pyarrow and Ray Data, folders and patterns exclude hidden files. A file is
    hidden if its name or one of its sub-folders begins with "." or "_". Files that are left out are logged.

    Raises:
        InvalidSetup: no file was found, or a file's name does not show its format.
    """
    try:
        uris = _remote(pattern) if "://" in pattern else _local(pattern)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise InvalidSetup(f"--input {pattern} cannot be read: {error}") from error
    if not uris:
        raise InvalidSetup(f"--input {pattern}: no file was found, or only hidden ones")
    folder = os.path.dirname(uris[0]) if len(uris) == 1 else os.path.commonpath([os.path.dirname(uri) for uri in uris])
    return tuple(InputFile(uri=uri, name=os.path.relpath(uri, folder), format=_format(uri)) for uri in uris)


def look_through(files: Sequence[InputFile], settings: RowSettings) -> InputRows:
    """Scan all files.

    Raises:
        InvalidSetup: the input has no rows, two rows have the same id (the error names their lines), no row has a
            prompt or messages, or a file's content does not match the format in its name: for example, a JSON array
            over several lines, UTF-16, a table without a header, or no readable row at all.
    """
    digest, id_hashes = hashlib.blake2b(digest_size=16), array("Q")
    pieces: list[InputPiece] = []
    num_rows, asks_something, sample = 0, False, None
    for file in files:
        has_readable_row, first_error = False, ""
        try:
            for piece in _pieces(file, first_number=num_rows, digest=digest):
                pieces.append(piece)
                num_rows += piece.num_rows
                for row in read_piece(piece):
                    id_hashes.append(_hash(row.id))
                    has_readable_row = has_readable_row or row.fields is not None
                    first_error = first_error or row.error
                    sample = sample or row.fields
                    asks_something = asks_something or has_question(row, settings)
            if first_error:
                _check_is_readable(file, first_error, has_readable_row=has_readable_row)
        except (OSError, pyarrow.ArrowException) as error:
            raise InvalidSetup(f"{file.uri} cannot be read: {error}") from error
    if num_rows == 0:
        raise InvalidSetup(f"the input has no rows: {', '.join(file.uri for file in files)[:300]}")
    _check_ids(pieces, id_hashes)
    if sample is not None and not asks_something:
        raise InvalidSetup(
            f"no row has {settings.wanted_column}; the first row has {', '.join(map(str, sample))[:300]}. Name the "
            f"column with --prompt-column or --messages-column"
        )
    return InputRows(files=tuple(files), pieces=tuple(pieces), num_rows=num_rows, fingerprint=digest.hexdigest())


def read_piece(piece: InputPiece) -> Iterator[Row]:
    """Yield the rows of a piece in order. A line that cannot be read becomes a row with an error."""
    if piece.file.format == "parquet":
        return _read_parquet(piece)
    return _read_csv(piece) if piece.file.format in DELIMITERS else _read_lines(piece)


def _pieces(file: InputFile, *, first_number: int, digest: hashlib.blake2b) -> Iterator[InputPiece]:
    """Yield a file's pieces, and add its name and bytes to the digest."""
    digest.update(file.name.encode() + b"\0")
    if file.format == "parquet":
        with _open(file) as stream:
            while chunk := stream.read(PIECE_BYTES):
                digest.update(chunk)
        yield from _parquet_pieces(file, first_number)
    elif file.format in DELIMITERS:
        yield from _csv_pieces(file, first_number, digest)
    else:
        yield from _line_pieces(file, first_number, digest)


def _line_pieces(file: InputFile, first_number: int, digest: hashlib.blake2b) -> Iterator[InputPiece]:
    with _open(file) as stream:
        yield from _pieces_between(file, first_number, START, _ends_of_lines(stream, digest))


def _ends_of_lines(stream: BinaryIO, digest: hashlib.blake2b) -> Iterator[Border]:
    """Yield the position after each line that is not blank."""
    offset = 0
    for line_number, line in enumerate(stream, start=1):
        digest.update(line)
        offset += len(line)
        if _is_row(without_bom(line, line_number)):
            yield Border(offset, line_number + 1)


def _pieces_between(file: InputFile, first_number: int, begin: Border, ends: Iterable[Border]) -> Iterator[InputPiece]:
    """Group a text file's rows, given by their ends, into pieces. The first row begins at `begin` or later."""
    num_rows = 0
    for end in ends:
        num_rows += 1
        if num_rows == ROWS_IN_A_PIECE:
            yield _text_piece(file, first_number, num_rows, begin)
            first_number, num_rows, begin = first_number + num_rows, 0, end
    if num_rows:
        yield _text_piece(file, first_number, num_rows, begin)


def _text_piece(file: InputFile, first_number: int, num_rows: int, begin: Border) -> InputPiece:
    return InputPiece(
        file=file, first_number=first_number, num_rows=num_rows, first_line=begin.line, offset=begin.offset
    )


def _csv_pieces(file: InputFile, first_number: int, digest: hashlib.blake2b) -> Iterator[InputPiece]:
    with _open(file) as stream:
        if kind := _kind_in_bytes(stream.read(4), file):
            raise InvalidSetup(f"{file.uri}: {kind}")
        stream.seek(0)
        rows = _csv_rows(file, stream, on_bytes=digest.update)
        header = next(rows, None)
        if header is None:
            return
        _check_header(file, _names(header))
        yield from _pieces_between(file, first_number, header.end, (row.end for row in rows))


def _names(header: CsvRow) -> list[str]:
    return [name.strip() for name in header.cells]


def _check_header(file: InputFile, names: Sequence[str]) -> None:
    """Raise InvalidSetup if the header does not name the columns uniquely. Some columns may be unnamed."""
    if len(names) == 1 and any(separator in names[0] for separator in ",;\t|"):
        raise InvalidSetup(
            f"{file.uri}: the header has only one column, {names[0][:200]!r}; separate cells with commas in .csv and "
            f"with tabs in .tsv"
        )
    twice = [name for name, times in Counter(filter(None, names)).items() if times > 1]
    if twice:
        raise InvalidSetup(
            f"{file.uri}: the header contains several columns named {', '.join(twice)[:200]}; make each name unique"
        )
    if not any(names):
        raise InvalidSetup(f"{file.uri}: the header has no names; the first row must name the columns")


def _parquet_pieces(file: InputFile, first_number: int) -> Iterator[InputPiece]:
    first_line = 1
    with _parquet(file) as table:
        for row_group in range(table.metadata.num_row_groups):
            num_rows = table.metadata.row_group(row_group).num_rows
            if num_rows:
                yield InputPiece(
                    file=file, first_number=first_number, num_rows=num_rows, first_line=first_line, row_group=row_group
                )
            first_number, first_line = first_number + num_rows, first_line + num_rows


def _read_lines(piece: InputPiece) -> Iterator[Row]:
    number = piece.first_number
    with _open(piece.file, piece.offset) as stream:
        for line_number, line in enumerate(stream, start=piece.first_line):
            if number == piece.first_number + piece.num_rows:
                return
            text = without_bom(line, line_number)
            if _is_row(text):
                yield row_from_line(text, number=number, place=f"{piece.file.name}:{line_number}")
                number += 1


def _read_csv(piece: InputPiece) -> Iterator[Row]:
    with _open(piece.file) as stream:
        names = _names(next(_csv_rows(piece.file, stream)))
    with _open(piece.file, piece.offset) as stream:
        rows = _csv_rows(piece.file, stream, begin=Border(piece.offset, piece.first_line))
        for number, row in enumerate(islice(rows, piece.num_rows), start=piece.first_number):
            yield row_from_cells(names, row.cells, number=number, place=f"{piece.file.name}:{row.begin.line}")


def _csv_rows(file: InputFile, stream: BinaryIO, **options: Any) -> Iterator[CsvRow]:
    return read_csv_rows(stream, DELIMITERS[file.format], name=file.uri, **options)


def _is_row(line: bytes) -> bool:
    return bool(line) and not line.isspace()


def _read_parquet(piece: InputPiece) -> Iterator[Row]:
    index = 0
    with _parquet(piece.file) as table:
        for batch in table.iter_batches(batch_size=ROWS_IN_A_PIECE, row_groups=[piece.row_group]):
            for fields in batch.to_pylist():
                place = f"{piece.file.name}:{piece.first_line + index}"
                yield row_from_fields(_without_nulls(fields), number=piece.first_number + index, place=place)
                index += 1


def _without_nulls(value: Any) -> Any:
    """Remove null fields, because a Parquet row has a null in every column without a value."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _check_is_readable(file: InputFile, first_error: str, *, has_readable_row: bool) -> None:
    """Raise InvalidSetup if a file with an unreadable line does not have the format that its name indicates."""
    if file.format in DELIMITERS:
        if not has_readable_row:
            raise InvalidSetup(f"{file.uri}: no row can be read; the first error: {first_error}")
        return
    with _open(file) as stream:
        lines = (without_bom(line, number) for number, line in enumerate(stream, start=1))
        first_line = next(filter(_is_row, lines)).strip()
    # The last line of an array with one element per line may be a valid row, because no comma follows the element.
    is_open_array = first_line.startswith(b"[") and not first_line.endswith(b"]")
    if not has_readable_row or is_open_array:
        raise InvalidSetup(f"{file.uri}: {_kind_of(first_line, file, first_error)}")


def _kind_of(first_line: bytes, file: InputFile, first_error: str) -> str:
    """Explain why a file with this first line is not JSONL, with the command that converts it."""
    name, target = _quoted(file), _target(file, "jsonl")
    if kind := _kind_in_bytes(first_line, file):
        return kind
    if first_line.startswith(b"["):
        return f"is a JSON array, but JSONL has one object per line; convert it with: jq -c '.[]' {name} > {target}"
    return (
        f"no row can be read; the first error: {first_error}. JSONL has one object per line; convert objects that "
        f"span several lines with: jq -c . {name} > {target}"
    )


def _quoted(file: InputFile) -> str:
    return shlex.quote(Path(file.uri).name)


def _target(file: InputFile, format_: str) -> str:
    """Return a name for the converted file, quoted for a shell."""
    return shlex.quote(f"{Path(file.uri).name.partition('.')[0]}.converted.{format_}")


def _kind_in_bytes(start: bytes, file: InputFile) -> str:
    """Return the format and the remedy for a file whose first bytes are not UTF-8 text, otherwise ""."""
    name, target, ours = _quoted(file), _target(file, file.format), file.format
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in start[:2]:
        return f"is UTF-16, but {ours.upper()} is UTF-8; convert it with: iconv -f UTF-16 -t UTF-8 {name} > {target}"
    if start.startswith(b"\x1f\x8b"):
        return f"is compressed with gzip; decompress it with: gunzip --stdout {name} > {target}"
    if start.startswith(b"PAR1"):
        return "is Parquet; give it a name that ends in .parquet"
    return ""


def _check_ids(pieces: Sequence[InputPiece], id_hashes: array[int]) -> None:
    """Raise InvalidSetup if two rows have the same id. Reads the rows again only if two hashes are equal."""
    hashes = numpy.sort(numpy.frombuffer(id_hashes, dtype=numpy.uint64))
    twice = {int(value) for value in hashes[1:][hashes[1:] == hashes[:-1]]}
    if not twice:
        return
    places: dict[str, list[str]] = {}
    for piece in pieces:
        for row in read_piece(piece):
            if _hash(row.id) in twice:
                places.setdefault(row.id, []).append(row.place)
    duplicates = {row_id: where for row_id, where in places.items() if len(where) > 1}
    max_named_duplicates = 5
    if duplicates:
        shown = list(duplicates.items())[:max_named_duplicates]
        named = "; ".join(f"{row_id!r} in {', '.join(where[:4])}" for row_id, where in shown)
        more = f"; and {len(duplicates) - len(shown):,} more" if len(duplicates) > len(shown) else ""
        raise InvalidSetup(f"{len(duplicates):,} ids occur in more than one row: {named}{more}; make each id unique")


def _hash(row_id: str) -> int:
    return int.from_bytes(hash_of_id(row_id), "big")


def _local(pattern: str) -> list[str]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [str(path.absolute() / name) for name in _input_names(pattern, _names_below(path))]
    if path.exists():
        return [str(path.absolute())]
    found = [each for each in glob(str(path), recursive=True) if os.path.isfile(each)]
    folder = os.path.dirname(str(path).partition("*")[0].partition("?")[0].partition("[")[0])
    names = _matched(pattern, [os.path.relpath(each, folder or ".") for each in found])
    return sorted(str(Path(folder, name).absolute()) for name in names)


def _names_below(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files below a folder. Does not follow links to folders, which may form a loop."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(place, name), folder)


def _remote(pattern: str) -> list[str]:
    pattern = pattern.rstrip("/")
    filesystem, path = fs.FileSystem.from_uri(pattern)
    prefix = pattern.removesuffix(path)
    folder, _, name = path.rpartition("/")
    if any(character in folder for character in "*?["):
        raise InvalidSetup(f"--input {pattern}: only the last part of a remote path may be a pattern")
    if any(character in name for character in "*?["):
        listed = filesystem.get_file_info(fs.FileSelector(folder))
        matching = [info.base_name for info in listed if info.is_file and fnmatch(info.base_name, name)]
        return [f"{prefix}{folder}/{each}" for each in sorted(_matched(pattern, matching))]
    found = filesystem.get_file_info(path)
    if found.type == fs.FileType.Directory:
        listed = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        names = [info.path.removeprefix(f"{path}/") for info in listed if info.is_file]
        return [f"{prefix}{path}/{each}" for each in _input_names(pattern, names)]
    return [pattern] if found.is_file else []


def _input_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the folder's sorted input files. If it has none, return the other files, which cause an error later."""
    all_names = sorted(names)
    visible = _not_hidden(pattern, all_names)
    run_folders = {PurePosixPath(name).parent for name in visible if PurePosixPath(name).name == MANIFEST}
    run_folders.discard(PurePosixPath("."))  # a run folder that the user named explicitly is input
    there = [name for name in visible if not run_folders.intersection(PurePosixPath(name).parents)]
    read = [name for name in there if PurePosixPath(name).suffix.lower() in FORMATS]
    _check_copies(pattern, read)
    if read:
        left_out = [f"the folder of a run {folder}" for folder in sorted(run_folders)]
        _warn_left_out(pattern, left_out + sorted(set(there) - set(read)), "only JSONL, CSV and Parquet files are read")
    return read or there


def _check_copies(pattern: str, names: Iterable[str]) -> None:
    """Raise InvalidSetup if a table exists in two formats, because each of its rows would be answered twice."""
    formats: dict[PurePosixPath, list[str]] = {}
    for name in names:
        formats.setdefault(PurePosixPath(name).with_suffix(""), []).append(name)
    for alike in formats.values():
        if len(alike) > 1 and any(FORMATS[PurePosixPath(name).suffix.lower()] in DELIMITERS for name in alike):
            raise InvalidSetup(
                f"--input {pattern}: {' and '.join(alike)} share one name, so they may have the same rows; select "
                f"files with a pattern, such as '*{PurePosixPath(alike[-1]).suffix}'"
            )


def _matched(pattern: str, names: Sequence[str]) -> Sequence[str]:
    """Return the names except hidden ones, unless the last part of the pattern itself begins with "." or "_"."""
    return names if PurePosixPath(pattern).name.startswith(HIDDEN) else _not_hidden(pattern, names)


def _not_hidden(pattern: str, names: Sequence[str]) -> list[str]:
    hidden = [name for name in names if any(part.startswith(HIDDEN) for part in PurePosixPath(name).parts)]
    input_like = [name for name in hidden if PurePosixPath(name).suffix.lower() in FORMATS]
    _warn_left_out(pattern, input_like, "hidden files are not read unless they are named one by one")
    return [name for name in names if name not in set(hidden)]


def _warn_left_out(pattern: str, names: Sequence[str], why: str) -> None:
    max_named = 5
    if names:
        more = f" and {len(names) - max_named:,} more" if len(names) > max_named else ""
        logger.warning("--input %s: skipped %s%s: %s", pattern, ", ".join(names[:max_named]), more, why)


def _format(uri: str) -> str:
    suffix = Path(uri).suffix.lower()
    if suffix not in FORMATS:
        raise InvalidSetup(f"{uri}: the suffix {suffix!r} is not supported; use one of {', '.join(FORMATS)}")
    return FORMATS[suffix]


def _open(file: InputFile, offset: int = 0) -> BinaryIO:
    if "://" not in file.uri:
        stream = open(file.uri, "rb", buffering=PIECE_BYTES)  # noqa: SIM115 - the caller closes it
        stream.seek(offset)
        return stream
    filesystem, path = fs.FileSystem.from_uri(file.uri)
    remote = filesystem.open_input_file(path)
    remote.seek(offset)
    return cast(BinaryIO, io.BufferedReader(remote, PIECE_BYTES))


def _parquet(file: InputFile) -> parquet.ParquetFile:
    if "://" not in file.uri:
        return parquet.ParquetFile(file.uri)
    filesystem, path = fs.FileSystem.from_uri(file.uri)
    return parquet.ParquetFile(path, filesystem=filesystem)
