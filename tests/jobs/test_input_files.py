from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from app.errors import InvalidSetup
from app.jobs.input_files import ROWS_IN_A_PIECE, InputRows, find_files, look_through, read_piece
from app.jobs.items import Row, RowSettings


def written(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def questions(num_rows: int, prefix: str = "row") -> list[dict[str, Any]]:
    return [{"id": f"{prefix}-{number}", "prompt": "Once"} for number in range(num_rows)]


def looked_through(pattern: object, **row_settings: Any) -> InputRows:
    return look_through(find_files(str(pattern)), RowSettings(**row_settings))


def all_rows(found: InputRows) -> list[Row]:
    return [row for piece in found.pieces for row in read_piece(piece)]


def test_every_row_is_in_one_piece_with_its_number(tmp_path: Path) -> None:
    num_rows = 2 * ROWS_IN_A_PIECE + 3
    found = looked_through(written(tmp_path / "input.jsonl", questions(num_rows)))
    assert (found.num_rows, len(found.pieces)) == (num_rows, 3)
    assert [(row.number, row.id) for row in all_rows(found)] == [(n, f"row-{n}") for n in range(num_rows)]


def test_blank_lines_are_no_rows_and_a_row_without_an_id_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", ["\n", {"prompt": "a"}, "  \n", "{broken\n", {"prompt": "b"}])
    assert [row.id for row in all_rows(looked_through(path))] == ["input.jsonl:2", "input.jsonl:4", "input.jsonl:5"]


def test_a_last_line_without_a_line_end_is_a_row(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", ['{"prompt": "a"}\n{"prompt": "b"}'])
    assert len(all_rows(looked_through(path))) == 2


def test_parquet_rows_are_numbered_through_their_row_groups_and_have_no_fields_of_others(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "?", "name": None}], "seed": None}] * 5
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "input.parquet", row_group_size=2)
    found = looked_through(tmp_path / "input.parquet")
    assert (found.num_rows, len(found.pieces)) == (5, 3)
    assert [row.id for row in all_rows(found)] == [f"input.parquet:{line}" for line in range(1, 6)]
    assert all_rows(found)[0].fields == {"messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize("pattern", ["*.jsonl", "", "{a,b}*"])
def test_a_glob_or_a_folder_means_its_files_by_name(tmp_path: Path, pattern: str) -> None:
    written(tmp_path / "b.jsonl", questions(2, "b"))
    written(tmp_path / "a.jsonl", questions(1, "a"))
    if pattern.startswith("{"):
        with pytest.raises(InvalidSetup, match="no file was found"):
            looked_through(tmp_path / pattern)
        return
    found = looked_through(tmp_path / pattern)
    assert [file.name for file in found.files] == ["a.jsonl", "b.jsonl"]
    assert [row.number for row in all_rows(found)] == [0, 1, 2]


def test_a_uri_is_read_like_a_path(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", questions(ROWS_IN_A_PIECE + 1))
    parquet.write_table(pyarrow.Table.from_pylist(questions(3, "p")), tmp_path / "input.parquet")
    assert len(all_rows(looked_through(f"file://{path}"))) == ROWS_IN_A_PIECE + 1
    assert looked_through(f"file://{tmp_path}/*.jsonl").num_rows == ROWS_IN_A_PIECE + 1
    assert len(all_rows(looked_through(f"file://{tmp_path}"))) == ROWS_IN_A_PIECE + 4


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", questions(5))
    before = looked_through(path).fingerprint
    assert looked_through(path).fingerprint == before
    written(path, [*questions(4), {"id": "row-4", "prompt": "Twice"}])
    assert looked_through(path).fingerprint != before


def test_the_same_id_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [{"id": "x", "prompt": "?"}, {"id": 7, "prompt": "?"}])
    written(tmp_path / "b.jsonl", [{"custom_id": "x", "prompt": "?"}, {"id": "7", "prompt": "?"}])
    with pytest.raises(InvalidSetup, match=r"2 ids .*'x' in a.jsonl:1, b.jsonl:1; '7' in a.jsonl:2, b.jsonl:2"):
        looked_through(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "has no rows"),
        (["\n\n"], "has no rows"),
        ([{"text": "?"}], "no row has a prompt or messages column; the first row has text"),
    ],
)
def test_a_file_that_asks_nothing_is_refused(tmp_path: Path, content: list[Any], words: str) -> None:
    with pytest.raises(InvalidSetup, match=words):
        looked_through(written(tmp_path / "input.jsonl", content))


def test_a_column_that_no_row_has_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", questions(3))
    with pytest.raises(InvalidSetup, match="no row has a column 'text'; the first row has id, prompt"):
        looked_through(path, prompt_column="text")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "table.xls").write_text("prompt\n")
    for name, words in {
        "nothing.jsonl": "no file was found",
        "broken.parquet": "cannot be read",
        "table.xls": "is not supported; use one of",
    }.items():
        with pytest.raises(InvalidSetup, match=words):
            looked_through(tmp_path / name)


def test_a_byte_order_mark_before_the_first_row_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"id": "first", "prompt": "a"}\n{"id": "second", "prompt": "b"}\n')
    assert [(row.id, row.error) for row in all_rows(looked_through(path))] == [("first", ""), ("second", "")]
    path.write_bytes(b'\xef\xbb\xbf\n{"id": "only", "prompt": "a"}\n')
    assert [row.id for row in all_rows(looked_through(path))] == ["only"]


PROMPTS = [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            json.dumps(PROMPTS, indent=2).encode(),
            r"is a JSON array, .*: jq -c '\.\[\]' input\.jsonl > input\.converted",
        ),
        (json.dumps(PROMPTS).encode(), "is a JSON array"),
        (b'[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n', "is a JSON array"),
        (b'[{"prompt": "a"},\n{"prompt": "b"}]\n', "is a JSON array"),
        (b"\xef\xbb\xbf \n" + json.dumps(PROMPTS, indent=2).encode(), "is a JSON array"),
        (json.dumps(PROMPTS[0], indent=2).encode(), r"no row can be read; .*input\.jsonl:1.*: jq -c \. input"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16, .*: iconv -f UTF-16 -t UTF-8 input"),
        ('{"prompt": "a"}\n'.encode("utf-16-le"), "is UTF-16"),
        (gzip.compress(b'{"prompt": "a"}\n', mtime=0), "is compressed with gzip; .*: gunzip --stdout input"),
        (b"PAR1\x15\x04", "is Parquet"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused_with_its_kind_and_the_way_out(
    tmp_path: Path, content: bytes, words: str
) -> None:
    written(tmp_path / "good.jsonl", questions(2))
    (tmp_path / "input.jsonl").write_bytes(content)
    with pytest.raises(InvalidSetup, match=words):
        looked_through(tmp_path)


def test_a_row_that_cannot_be_read_fails_alone_where_others_can(tmp_path: Path) -> None:
    path = written(tmp_path / "input.jsonl", ["[1, 2]\n", {"prompt": "a"}, "{broken\n"])
    assert [bool(row.error) for row in all_rows(looked_through(path))] == [True, False, True]


@pytest.mark.parametrize("uri", ["{}", "{}/", "file://{}", "file://{}/"])
def test_a_folder_is_read_with_its_sub_folders_and_without_hidden_files(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "_data"
    for name in ("b.JSONL", "sub/a.jsonl", ".c.jsonl", "_a.jsonl", "._a.jsonl", ".hidden/d.jsonl", "_SUCCESS", "x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder / name, questions(1, name))
    (folder / "out").mkdir()
    for name in ("run.json", "results.jsonl"):
        written(folder / "out" / name, questions(1, name))
    assert [row.id for row in all_rows(looked_through(uri.format(folder)))] == ["b.JSONL-0", "sub/a.jsonl-0"]
    assert "skipped ._a.jsonl, .c.jsonl, .hidden/d.jsonl, _a.jsonl: hidden files are not read" in caplog.text
    assert "skipped the folder of a run out, x.txt: only JSONL, CSV and Parquet files are read" in caplog.text
    assert "_SUCCESS" not in caplog.text


def test_a_link_to_a_folder_is_named_and_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "a.jsonl", questions(1))
    (tmp_path / "again").symlink_to(tmp_path)
    assert [file.name for file in find_files(str(tmp_path))] == ["a.jsonl"]
    assert "skipped again" in caplog.text


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_pattern_means_hidden_files_only_if_it_names_them(tmp_path: Path, prefix: str) -> None:
    for name in ("a.jsonl", "_b.jsonl", ".c.jsonl"):
        written(tmp_path / name, questions(1, name))
    assert [file.name for file in find_files(f"{prefix}{tmp_path}/*.jsonl")] == ["a.jsonl"]
    assert [file.name for file in find_files(f"{prefix}{tmp_path}/_*.jsonl")] == ["_b.jsonl"]
    assert [file.name for file in find_files(f"{prefix}{tmp_path}/.c.jsonl")] == [".c.jsonl"]


# CSV


def table(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.text(st.sampled_from('a", \t\n\ré😀'), min_size=1, max_size=6), min_size=1, max_size=9),
    blanks=st.booleans(),
)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_the_rows_of_a_table_come_back_through_pieces_that_are_read_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, prompts: list[str], blanks: bool
) -> None:
    monkeypatch.setattr("app.jobs.input_files.ROWS_IN_A_PIECE", 2)
    line_end = " " if suffix == "tsv" else "\n"
    rows = [[f"{number:03d}", prompt.replace("\n", line_end)] for number, prompt in enumerate(prompts)]
    with_blanks = [line for row in rows for line in ([row, [], ["", ""]] if blanks else [row])]
    column = f"the{line_end}prompt"
    header = ["id", f" {column} "]
    path = table(tmp_path / f"t.{suffix}", [header, *with_blanks], "\t" if suffix == "tsv" else ",")
    found = looked_through(path, prompt_column=column)
    assert (found.num_rows, len(found.pieces)) == (len(rows), -(-len(rows) // 2))
    read = [row for piece in reversed(found.pieces) for row in reversed([*read_piece(piece)])][::-1]
    assert [row.fields for row in read] == [{"id": row_id, column: prompt} for row_id, prompt in rows]
    assert [(row.number, row.id) for row in read] == [(number, row_id) for number, (row_id, _) in enumerate(rows)]
    lines = path.read_bytes().split(b"\n")
    assert [lines[int(row.place.partition(":")[2]) - 1][:3].decode() for row in read] == [row_id for row_id, _ in rows]


def test_a_table_in_two_formats_is_not_read_twice(tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.jsonl", "more.jsonl"):
        (tmp_path / name).write_text("prompt\na\n" if name.endswith("csv") else '{"prompt": "a"}\n')
    with pytest.raises(
        InvalidSetup, match=r"rows\.csv and rows\.jsonl share one name, .* pattern, such as '\*\.jsonl'"
    ):
        find_files(str(tmp_path))
    assert [each.name for each in find_files(f"{tmp_path}/*.jsonl")] == ["more.jsonl", "rows.jsonl"]


def test_a_row_of_a_table_is_named_by_the_line_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbfprompt,seed\r\n"a\r\nb",1\r\n\r\nNA,\r\n007,2\r\n')
    rows = all_rows(looked_through(f"file://{tmp_path}/t.csv"))
    assert [row.id for row in rows] == ["t.csv:2", "t.csv:5", "t.csv:6"]
    assert [row.fields for row in rows] == [
        {"prompt": "a\r\nb", "seed": "1"},
        {"prompt": "NA"},
        {"prompt": "007", "seed": "2"},
    ]


def test_a_row_with_other_cells_than_the_header_fails_alone_where_others_do_not(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [["id", "prompt"], ["1", "a"], ["2", "b", "c"], ["3"]])
    errors = [row.error for row in all_rows(looked_through(path))]
    assert errors[0] == ""
    assert errors[1].startswith("t.csv:3: the row has 3 cells, but the header has 2; quote cells that contain a d")
    assert errors[2].startswith("t.csv:4: the row has 1 cells, but the header has 2")
    table(path, [["prompt", "seed"], ["one, two"]])
    with pytest.raises(InvalidSetup, match=r"no row can be read; the first error: t\.csv:2: the row has 1"):
        looked_through(path)


def test_a_table_without_rows_has_none_and_columns_without_a_name_are_left_alone(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", [["prompt", "id"]])
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(InvalidSetup, match="the input has no rows"):
        looked_through(tmp_path)
    table(tmp_path / "c.csv", [["", "prompt", ""], ["0", "Once", "x"]])  # as pandas writes its index
    assert [row.fields for row in all_rows(looked_through(tmp_path))] == [{"prompt": "Once"}]


def test_the_fingerprint_of_a_table_follows_each_of_its_bytes(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [["prompt"], ["a"]])
    before = looked_through(path).fingerprint
    assert looked_through(path).fingerprint == before
    path.write_bytes(path.read_bytes() + b"\r\n")
    assert looked_through(path).fingerprint != before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"id,prompt,id\n1,a,2\n", "the header contains several columns named id; make each name unique"),
        (b",,\n1,a,2\n", "the header has no names"),
        (b"id;prompt\n1;a\n", "the header has only one column, 'id;prompt'; separate cells with commas in .csv"),
        (b"text\na\n", "no row has a prompt or messages column; the first row has text"),
        (b'prompt\n"a\n', r"t\.csv:2: the row that begins on this line cannot be read"),
        (
            "prompt\na\n".encode("utf-16"),
            r"is UTF-16, but CSV is UTF-8; .*: iconv .* t\.csv > t\.converted",
        ),
        ("prompt\na\n".encode("utf-16-le"), "is UTF-16"),
        (
            gzip.compress(b"prompt\na\n", mtime=0),
            r"is compressed with gzip; .*: gunzip --stdout t\.csv > t\.conv",
        ),
        (b"PAR1\x15\x04", "is Parquet"),
    ],
)
def test_a_file_that_is_no_table_of_prompts_is_refused_with_the_way_out(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InvalidSetup, match=words):
        looked_through(tmp_path)
