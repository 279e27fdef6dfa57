"""Reads and validates items from the lines of an upload and the rows of files.

Uploads may have hundreds of megabytes, so they are read line by line in bounded memory. Reading blocks: use a thread.
"""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, BinaryIO

from app.batches import CHATS_PATH, COMPLETIONS_PATH, PIECE_BYTES
from app.config import shown
from app.engine.request import SamplingParams
from app.jobs.job import InvalidItem, Item, ItemError
from app.json_input import read_json

OpenFile = Callable[[], BinaryIO]

MAX_ID_LENGTH = 512
MAX_LISTED_ERRORS = 100

# Sampling columns of a plain row that may contain text. CSV cells of all other sampling columns are JSON.
TEXT_COLUMNS = ("stop", "reasoning_effort")
# Columns of a plain row that have the same meaning as in a request body. Any other column is ignored. The field
# `grammar` has other names in a body, and a row's answer has no log-probabilities.
SAMPLING_COLUMNS = (
    *(each.name for each in fields(SamplingParams) if each.name != "grammar" and "logprob" not in each.name),
    *TEXT_COLUMNS, "max_completion_tokens", "response_format", "structured_outputs", "thinking_token_budget",
)  # fmt: skip


# One item


class NotAnItem(Exception):
    """Raised for a line or row that is not a valid item. `error` is the reason."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = ItemError(code=code, message=message, param=param)


def batch_line(value: Mapping[str, Any], urls: Collection[str]) -> tuple[str, str, dict[str, Any]]:
    """Return (custom_id, url, body) from a line of an OpenAI batch. Raises NotAnItem. Does not validate the body."""
    for param in ("custom_id", "method", "url", "body"):
        if value.get(param) is None:
            raise NotAnItem("missing_required_parameter", f"{param} is required", param)
    custom_id, method, url, body = (value[param] for param in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_LENGTH:
        message = f"custom_id should be a string of 1 to {MAX_ID_LENGTH} characters"
        raise NotAnItem("invalid_custom_id", message, "custom_id")
    if method != "POST":
        raise NotAnItem("invalid_method", f"method should be 'POST'; got {shown(method)}", "method")
    if not isinstance(url, str) or url not in urls:
        raise NotAnItem("invalid_url", f"url should be one of {', '.join(urls)}; got {shown(url)}", "url")
    if not isinstance(body, dict):
        raise NotAnItem("invalid_body", "body should be an object with the request's parameters", "body")
    if body.get("stream") not in (None, False):
        message = "batch items cannot be streamed; leave stream out"
        raise NotAnItem("stream_not_supported", message, "body.stream")
    return custom_id, url, body


def without_bom(line: bytes, line_number: int) -> bytes:
    """Remove the byte order mark that Windows programs write before the first line of a file."""
    return line.removeprefix(BOM_UTF8) if line_number == 1 else line


def json_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises NotAnItem."""
    try:
        value = read_json(line)
    except ValueError as error:
        place = str(error).replace(" at line 1 column ", " at column ")  # line 1 of this text is not line 1 of the file
        raise NotAnItem("invalid_json_line", f"the line is not valid JSON: {place}") from None
    if not isinstance(value, dict):
        raise NotAnItem("invalid_json_line", "the line should be a JSON object")
    return value


# Uploads


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """The endpoint that all lines of an upload must name, and the limits for an upload."""

    endpoint: str
    max_items: int
    max_line_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of checking a file up to its end, its hundredth error, or the first line above the limit."""

    num_items: int
    model: str | None
    errors: tuple[ItemError, ...]


def check(open_file: OpenFile, rules: InputRules) -> Checked:
    """Check the whole file and return its errors. If there is any error, no item of the file may run."""
    first_lines: dict[bytes, int] = {}  # the first line with a custom id, by a hash of the custom id
    models: set[object] = set()
    errors: list[ItemError] = []
    num_items = 0
    with closing(_read_lines(open_file, rules)) as lines:
        for line_number, read in lines:
            num_items += 1
            if num_items > rules.max_items:
                message = f"the file has more than {rules.max_items:,} lines"
                errors.append(ItemError(code="too_many_lines", message=message))
            elif isinstance(read, ItemError):
                errors.append(read)
            else:
                models.add(read.body.get("model") if isinstance(read.body.get("model"), str) else None)
                first = first_lines.setdefault(hash_of_id(read.id, 16), line_number)
                if first != line_number:
                    errors.append(_duplicate(read, line_number, first))
            if num_items > rules.max_items or len(errors) == MAX_LISTED_ERRORS:
                break
    if not num_items:
        errors.append(ItemError(code="empty_file", message="the file has no lines; it must have at least one request"))
    model = models.pop() if len(models) == 1 else None
    return Checked(num_items=num_items, model=model if isinstance(model, str) else None, errors=tuple(errors))


def read_items(open_file: OpenFile, rules: InputRules) -> Generator[Item, None, None]:
    """Yield the items of a file in which `check` found no error. Close the generator if you stop before its end."""
    with closing(_read_lines(open_file, rules)) as lines:
        for _, read in lines:
            assert isinstance(read, Item), "a batch in progress has a valid input file"
            yield read


def pieces_of(items: Iterator[Item]) -> Generator[list[Item], None, None]:
    """Yield the items in lists of at most 16."""
    items_at_once = 16  # a thread reads this many items before it returns, and an item may have megabytes
    while some := list(islice(items, items_at_once)):
        yield some


def _read_lines(open_file: OpenFile, rules: InputRules) -> Generator[tuple[int, Item | ItemError], None, None]:
    """Yield the line number and the item, or the first error, of each line that is not blank, in order."""
    with open_file() as file:
        line_number = number = 0
        while raw := file.readline(rules.max_line_bytes + 1):
            line_number += 1
            if len(raw) > rules.max_line_bytes and not raw.endswith(b"\n"):
                _skip_rest(file)
                message = f"the line has more than {rules.max_line_bytes:,} bytes, the maximum for one line"
                yield line_number, ItemError(code="line_too_long", line=line_number, message=message)
                continue
            text = without_bom(raw, line_number)
            if text.strip():
                yield line_number, _read_line(text, number, line_number, rules.endpoint)
                number += 1


def _read_line(text: bytes, number: int, line_number: int, endpoint: str) -> Item | ItemError:
    try:
        custom_id, url, body = batch_line(json_object(text), (endpoint,))
    except NotAnItem as problem:
        return replace(problem.error, line=line_number)
    return Item(number=number, id=custom_id, url=url, body=body, num_bytes=len(text))


def _skip_rest(file: BinaryIO) -> None:
    while (piece := file.readline(PIECE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _duplicate(item: Item, line_number: int, first: int) -> ItemError:
    return ItemError(
        code="duplicate_custom_id",
        line=line_number,
        param="custom_id",
        message=f"custom_id {shown(item.id)} is already used in line {first:,}; every line needs its own",
    )


# Rows of files


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Settings for reading all rows of a run."""

    prompt_column: str | None = None
    messages_column: str | None = None
    max_tokens: int | None = None  # the default for rows without a limit
    temperature: float | None = None  # the default for rows without a temperature

    @property
    def wanted_column(self) -> str:
        """The column that a plain row must have, in words."""
        if self.messages_column is not None:
            return f"a column {self.messages_column!r}"
        return f"a column {self.prompt_column!r}" if self.prompt_column is not None else "a prompt or messages column"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of an input file. If the row cannot be read, `fields` is None and `error` is the reason."""

    number: int  # the position in the whole input, from 0
    id: str
    place: str  # the file and the line
    fields: Mapping[str, Any] | None
    error: str = ""
    has_cells: bool = False  # the fields are CSV texts, which `item_of` converts to their types


def row_from_line(line: bytes, *, number: int, place: str) -> Row:
    """Return the row of a JSON line. A row without an id gets `place` (file and line) as its id."""
    try:
        return row_from_fields(json_object(line), number=number, place=place)
    except NotAnItem as problem:
        return Row(number=number, id=place, place=place, fields=None, error=f"{place}: {problem}")


def row_from_fields(fields: Mapping[str, Any], *, number: int, place: str) -> Row:
    """Return a row from its columns. A row without an id gets `place` as its id."""
    return Row(number=number, id=id_of(fields) or place, place=place, fields=fields)


def row_from_cells(names: Sequence[str], cells: Sequence[str], *, number: int, place: str) -> Row:
    """Return a row from its CSV cells and the names in the header. An empty cell counts as not given."""
    if len(cells) != len(names):
        hint = "; quote cells that contain a delimiter" if len(cells) > len(names) else ""
        error = f"{place}: the row has {len(cells):,} cells, but the header has {len(names):,}{hint}"
        return Row(number=number, id=place, place=place, fields=None, error=error)
    fields = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}
    return Row(number=number, id=id_of(fields) or place, place=place, fields=fields, has_cells=True)


def id_of(fields: Mapping[str, Any]) -> str | None:
    """Return the `custom_id` or `id` of a row, or None if neither is a text, a whole number or a whole float."""
    for name in ("custom_id", "id"):
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():  # pandas writes integers as floats if any is missing
            value = int(value)
        if isinstance(value, str | int) and not isinstance(value, bool) and 0 < len(str(value)) <= MAX_ID_LENGTH:
            return str(value)
    return None


def has_question(row: Row, settings: RowSettings) -> bool:
    """Return whether a row has a prompt, messages or a body. These may still be invalid."""
    if row.fields is None:
        return False
    names = [name for name in (settings.messages_column, settings.prompt_column) if name] or ["prompt", "messages"]
    return _is_batch_line(row) or any(row.fields.get(name) is not None for name in names)


def item_of(row: Row, settings: RowSettings, urls: Mapping[str, bool]) -> Item | InvalidItem:
    """Return the item for a row, which is an OpenAI batch line or a plain row with a prompt or messages column.

    `urls` maps each endpoint that a row may name to whether it generates text.
    """
    if row.fields is None:
        return InvalidItem(number=row.number, id=row.id, reason=row.error)
    try:
        if _is_batch_line(row):
            _, url, body = batch_line(
                {"method": "POST", **row.fields, "custom_id": id_of({"custom_id": row.fields["custom_id"]})},
                urls,
            )
        else:
            fields = _typed(row.fields, settings) if row.has_cells else row.fields
            url, body = _plain_row(fields, settings)
        if body.get("n") not in (None, 1):
            message = f"n is {shown(body['n'])}, but an item has only one answer; write one item per answer"
            raise NotAnItem("several_answers", message, "n")
    except NotAnItem as problem:
        return InvalidItem(number=row.number, id=row.id, reason=problem.error.message)
    if urls[url]:
        body = _with_defaults(body, row.id, settings)
    return Item(number=row.number, id=row.id, url=url, body=body)


def _is_batch_line(row: Row) -> bool:
    return row.fields is not None and not row.has_cells and "custom_id" in row.fields and "body" in row.fields


def _typed(cells: Mapping[str, str], settings: RowSettings) -> dict[str, Any]:
    """Return the values of CSV cells. Sampling columns and cells that look like lists of messages or texts are JSON."""
    json_columns = set(SAMPLING_COLUMNS).difference(TEXT_COLUMNS, [settings.prompt_column, settings.messages_column])
    values: dict[str, Any] = dict(cells)
    for name in json_columns & cells.keys():
        # Python and Excel write True and TRUE.
        text = cells[name].lower() if cells[name].lower() in ("true", "false") else cells[name]
        values[name] = _json_cell(name, text, "a number, or true, false, a list or an object in JSON")
    messages = settings.messages_column or ("messages" if settings.prompt_column is None else "")
    if re.match(r"\s*\[\s*\{", cells.get(messages, "")):
        values[messages] = _json_cell(messages, cells[messages], "messages in JSON, because it begins with [{")
    for name in TEXT_COLUMNS & cells.keys():
        if cells[name].startswith('["'):
            values[name] = _json_cell(name, cells[name], 'texts in JSON, because it begins with ["')
    return values


def _json_cell(name: str, cell: str, wanted: str) -> Any:
    try:
        return read_json(cell.encode())
    except ValueError as error:
        raise NotAnItem("invalid_cell", f"{name} is {shown(cell)}; it should be {wanted}: {error}", name) from None


def _with_defaults(body: Mapping[str, Any], row_id: str, settings: RowSettings) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    if settings.max_tokens is not None and "max_completion_tokens" not in given:
        given.setdefault("max_tokens", settings.max_tokens)
    if settings.temperature is not None:
        given.setdefault("temperature", settings.temperature)
    # The seed is derived from the id, so that the item has the same answer if it is recomputed after a crash.
    given.setdefault("seed", int.from_bytes(hash_of_id(row_id), "big") & ((1 << 63) - 1))
    return given


def _plain_row(fields: Mapping[str, Any], settings: RowSettings) -> tuple[str, dict[str, Any]]:
    sampling = {name: fields[name] for name in SAMPLING_COLUMNS if name in fields}
    has_messages = settings.prompt_column is None and fields.get("messages") is not None
    if settings.messages_column is not None or has_messages:
        messages = _column(fields, settings.messages_column or "messages")
        if isinstance(messages, str):  # a text is a single user turn
            messages = [{"role": "user", "content": messages}]
        return CHATS_PATH, sampling | {"messages": messages}
    prompt = _column(fields, settings.prompt_column or "prompt")
    return COMPLETIONS_PATH, sampling | {"prompt": prompt}


def _column(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:
        there = ", ".join(sorted(map(str, fields)))[:200] or "none"
        raise NotAnItem("missing_column", f"the row has no column {name!r}; it has {there}", name)
    return value


def hash_of_id(text: str, num_bytes: int = 8) -> bytes:
    """Return a hash of a text that is the same in every process."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=num_bytes).digest()
