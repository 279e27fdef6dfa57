from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batches import MAX_REQUEST_BYTES
from app.errors import InvalidSetup
from app.jobs.csv_rows import START, Border, CsvRow, read_csv_rows

CELL = st.text(st.sampled_from('ab"," \t\'\\é€😀\u2028\u0085\x1c;|\0') | st.sampled_from("\n\r"), max_size=8)
TABLES = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(CELL, min_size=width, max_size=width), max_size=8))


def written(rows: list[list[str]], delimiter: str = ",", line_end: str = "\n") -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows(rows)
    return file.getvalue().encode()


def rows_of(content: bytes, delimiter: str = ",", begin: Border = START) -> list[CsvRow]:
    return list(read_csv_rows(io.BytesIO(content), delimiter, name="t.csv", begin=begin))


@given(rows=TABLES, delimiter=st.sampled_from(",\t"), line_end=st.sampled_from(["\n", "\r\n"]), at=st.integers(0, 8))
def test_a_table_comes_back_as_it_was_written_also_from_the_middle(
    rows: list[list[str]], delimiter: str, line_end: str, at: int
) -> None:
    """But for rows without a filled cell, as Excel writes them at the end of a table."""
    if delimiter == "\t":
        rows = [[cell.translate({10: " ", 13: " "}) for cell in row] for row in rows]
    content = written(rows, delimiter, line_end)
    found = rows_of(content, delimiter)
    assert [row.cells for row in found] == [row for number, row in enumerate(rows) if number == 0 or any(row)]
    assert all(row.end.line == content[: row.end.offset].count(b"\n") + 1 for row in found)
    assert all(before.end.offset <= row.begin.offset < row.end.offset for before, row in pairwise(found))
    for before in islice(found, at, at + 1):
        assert rows_of(content[before.end.offset :], delimiter, before.end) == found[at + 1 :]


# In a process of its own: where pyarrow has read CSV once, a fork of a fork ends in an abort.
READ_BY_PYARROW = """
import io, json, sys
import pyarrow
from pyarrow import csv
table = csv.read_csv(
    io.BytesIO(sys.stdin.buffer.read()),
    parse_options=csv.ParseOptions(newlines_in_values=True),
    convert_options=csv.ConvertOptions(default_column_type=pyarrow.string()),
)
print(json.dumps([table.column_names, [list(row.values()) for row in table.to_pylist()]]))
"""


def test_a_table_is_read_as_pyarrow_reads_it() -> None:
    content = (
        b'\xef\xbb\xbfid,"the ""prompt"""\r\n'
        b'007,"one, two\r\nthree"\r\n'
        b"\r\n"
        b'NA,5" pipe\r\n'
        b',"\xc3\xa9 ""quoted"""\n'
        b" x ,null"
    )
    done = subprocess.run([sys.executable, "-c", READ_BY_PYARROW], input=content, capture_output=True, check=True)
    names, table = json.loads(done.stdout)
    header, *rows = rows_of(content)
    assert header.cells == names == ["id", 'the "prompt"']
    assert [row.cells for row in rows] == table
    assert [row.begin.line for row in rows] == [2, 5, 6, 7]


def test_every_byte_goes_by_once() -> None:
    content, seen = b'\xef\xbb\xbfa,b\r\n\n"1\n2",3', bytearray()
    rows = read_csv_rows(io.BytesIO(content), ",", name="t.csv", on_bytes=seen.extend)
    assert [row.end for row in rows] == [(8, 2), (16, 5)]
    assert bytes(seen) == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'a\nb\n"never\nclosed\n', r"t\.csv:3: the row that begins on this line cannot be read: unexpected end"),
        (b'a\n"He said "hi" to me"\n', r"t\.csv:2: .*quotes inside it must be doubled"),
        (b'a\n"He said \\"hi\\""\n', r"t\.csv:2: .*quotes inside it must be doubled"),
        (b"a,b\r1,2\r", r"t\.csv:1: .*lines must end with \\n or \\r\\n"),
        (b"a\nb\ncaf\xe9\n", r"t\.csv:3: the line is not UTF-8; .* iconv -f WINDOWS-1252 -t UTF-8"),
        (b"a\n" + b"x" * (MAX_REQUEST_BYTES + 1), r"t\.csv:2: the line has more than 4,194,304 bytes"),
        (b'a\n"' + b"x" * 99_999 + b"\n" * MAX_REQUEST_BYTES, r"t\.csv:2: .*field larger than field limit \(4194304\)"),
    ],
)
def test_what_leaves_the_next_row_in_doubt_is_refused_with_its_line(content: bytes, words: str) -> None:
    with pytest.raises(InvalidSetup, match=words):
        rows_of(content)


@pytest.mark.parametrize("quoted", ['1\t"Yes\n2\tNo"\n', '1\t"Yes\n'])
def test_a_quote_that_stands_alone_in_tsv_swallows_no_row(quoted: str) -> None:
    with pytest.raises(InvalidSetup, match=r"t\.csv:2: "):
        rows_of(f"id\tprompt\n{quoted}".encode(), "\t")


def test_a_cell_may_be_longer_than_pythons_csv_has_it() -> None:
    [row] = rows_of(b'"' + b"x" * 200_000 + b'"\n')
    assert len(row.cells[0]) == 200_000
