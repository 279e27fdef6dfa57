"""Encodes large answers as JSON and server-sent events in pieces, and computes the rows of long lists along the way.

Each piece takes little time, so that the event loop and other threads can run in between. Neither all rows nor the
whole JSON are ever in memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, get_args

from pydantic_core import to_json
from pydantic_core.core_schema import CoreSchema, ListSchema, list_schema

PIECE_BYTES = 64 * 1024  # about 0.7 ms of work for an answer with log-probabilities
DONE = b"data: [DONE]\n\n"  # the event that ends a stream of chunks

T = TypeVar("T")
RowT = TypeVar("RowT")
Json = dict[str, Any]


class Rows(Generic[RowT]):
    """A long list in an answer. Its rows are computed each time the list is encoded."""

    def __init__(self, some_at_a_time: Callable[[], Iterable[Sequence[RowT]]]) -> None:
        """`some_at_a_time` yields groups of rows. Each group should take much less than a millisecond."""
        self.some_at_a_time = some_at_a_time

    @classmethod
    def of(cls, values: Sequence[T], write: Callable[[Sequence[T]], Sequence[Any]] = list) -> Rows[Any]:
        """Return rows that `write` computes from groups of 2,048 values. By default, the values are the rows."""
        values_at_once = 2048
        starts = range(0, len(values), values_at_once)
        return cls(lambda: (write(values[at : at + values_at_once]) for at in starts))

    def __iter__(self) -> Iterator[RowT]:
        return chain.from_iterable(self.some_at_a_time())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, schema_of: Callable[[Any], CoreSchema]) -> ListSchema:
        """Describe the rows as the list that clients read."""
        return list_schema(schema_of(get_args(source)[0]))


# Encodes a value as JSON. The second argument is called with each part that is not JSON, and returns a replacement.
Encode = Callable[[Any, Callable[[Any], Any]], bytes]


def as_json(value: Any, fallback: Callable[[Any], Any] | None = None) -> bytes:
    """Encode a value as JSON that every reader treats as one line. NaN and infinity become null."""
    written = to_json(value, fallback=fallback, inf_nan_mode="null")
    return written if written.isascii() else one_line(written)


def one_line(written: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029 in JSON, because `str.splitlines` and many clients break lines at them."""
    return (
        written.replace(b"\xc2\x85", rb"\u0085")
        .replace(b"\xe2\x80\xa8", rb"\u2028")
        .replace(b"\xe2\x80\xa9", rb"\u2029")
    )


def json_pieces(value: Any, encode: Encode = as_json) -> Iterator[bytes]:
    """Yield the JSON for a value in pieces: one piece if it has no `Rows`. `encode` encodes everything but the rows."""
    found: list[Rows[Any]] = []
    mark = secrets.token_hex(16)  # clients cannot guess the mark, so their texts do not contain it

    def marked(part: Any) -> str:
        if not isinstance(part, Rows):
            raise TypeError(f"{type(part).__name__} is not JSON")
        found.append(part)
        return mark

    first, *others = encode(value, marked).split(f'"{mark}"'.encode())
    piece = bytearray(first)
    steps_at_once = 16  # groups before a piece is yielded even if it is short, because they may be slow to compute
    for rows, text in zip(found, others, strict=True):
        separator = b"["
        for step, some in enumerate(rows.some_at_a_time(), 1):
            if some:
                piece += separator
                piece += as_json(some)[1:-1]
                separator = b","
            if len(piece) >= PIECE_BYTES or step % steps_at_once == 0:
                yield bytes(piece)
                piece.clear()
        piece += b"]" if separator == b"," else b"[]"
        piece += text
    yield bytes(piece)


def joined(pieces: Iterable[bytes], *, at_least: int = PIECE_BYTES) -> Iterator[bytes]:
    """Join short pieces into pieces of at least `at_least` bytes. Only the last one may be shorter."""
    piece = bytearray()
    for each in pieces:
        piece += each
        if len(piece) >= at_least:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with the payload as one line of JSON."""
    return b"data: %b\n\n" % as_json(payload)


def named_event(payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose name is the payload's `type`."""
    return b"event: %b\n%b" % (payload["type"].encode(), event(payload))


def event_pieces(payload: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield `event` in pieces, for a payload that may contain `Rows`."""
    yield b"data: "
    yield from json_pieces(payload)
    yield b"\n\n"


def named_event_pieces(payload: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield `named_event` in pieces, for a payload that may contain `Rows`."""
    yield b"event: %b\n" % payload["type"].encode()
    yield from event_pieces(payload)
