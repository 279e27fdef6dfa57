"""Text in, text and tool calls out. The result does not depend on how the text was cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from app.text.pattern import Pattern
from app.text.tool_calls.format import ToolFormat
from app.text.tool_calls.readers import BLANKS, NameFirstReader, ObjectReader, PlainReader, Reader, Reading


class CallPiece(NamedTuple):
    """What is new of one call: its name, which comes once and first, and more of its arguments."""

    number: int  # of the call, from 0
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """What a piece of text has brought: text for people and pieces of calls, at most one for each call."""

    text: str
    calls: tuple[CallPiece, ...]


class CallParser(Protocol):
    """Takes the calls out of one text."""

    @property
    def has_calls(self) -> bool:
        """Whether there was a call so far."""

    @property
    def is_done(self) -> bool:
        """Whether nothing that may follow counts."""

    def push(self, text: str) -> Parsed:
        """Take the next text."""

    def flush(self) -> Parsed:
        """What was held back: nothing more will come."""


class ToolParser:
    """Takes calls out of a text, in one format.

    Whatever turns out to be no call comes out as the text that it is, its markers too. White space around calls and
    what separates them belongs to the format and does not come out. Nothing is ever raised.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], *, only_first: bool = False, is_strict: bool = False
    ) -> None:
        """`names`: of the tools on offer. `only_first`: the text ends with the first call.

        `is_strict`: what nothing marks is a call only where it begins in the one way that a grammar of strict calls
        knows. So no call can be made without it.
        """
        self._form = form
        self._names = names
        self._only_first = only_first
        self._is_strict = is_strict
        self._begin = Pattern(form.begin) if form.begin else None
        self._advance: Callable[[str], None] = self._in_text if form.begin else self._in_lead
        self._held = ""  # text that may yet belong to a call: white space, the beginning of a marker
        self._raw = ""  # a call so far, while it may turn out to be none
        self._reader: Reader = ObjectReader()
        self._num_closed = 0  # how much of the closing marker was read
        self._num_begun = 0  # calls whose name is known
        self._has_text = False
        self._is_done = False
        self._text: list[str] = []
        self._calls: list[CallPiece] = []

    @property
    def has_calls(self) -> bool:
        return self._num_begun > 0

    @property
    def is_done(self) -> bool:
        return self._is_done

    def push(self, text: str) -> Parsed:
        for character in text:
            if self._is_done:
                break
            self._advance(character)
        return self._taken()

    def flush(self) -> Parsed:
        if self._advance == self._in_text:
            self._say(self._held)
        elif self._advance == self._after_call:
            self._say(self._form.end[: self._num_closed])
        elif self._advance == self._in_lead or (self._advance == self._in_call and self._reader.name is None):
            self._say(self._raw)
        return self._taken()

    def _taken(self) -> Parsed:
        self._take_arguments()
        parsed = Parsed("".join(self._text), _merged(self._calls))
        self._text, self._calls = [], []
        return parsed

    def _say(self, text: str) -> None:
        self._text.append(text)
        self._has_text = self._has_text or bool(text.strip())

    def _in_text(self, character: str) -> None:
        assert self._begin is not None, "without a marker there is no text before calls"
        self._held += character
        if self._form.may_begin_bare and not self._has_text and self._held.lstrip(self._blanks) == "{":
            self._begin_call(character, self._unmarked_reader(), before=self._held[:-1])
        elif self._begin.advance(character):
            said = self._held[: -len(self._form.begin)].rstrip()
            self._say(said)
            self._raw, self._held = self._held[len(said) :], ""
            self._begin.num_matched = 0
            self._advance = self._in_lead
        else:
            certain = self._held[: len(self._held) - self._begin.num_matched].rstrip()
            self._say(certain)
            self._held = self._held[len(certain) :]

    @property
    def _blanks(self) -> str | None:
        """What may stand before a call that nothing marks; None is all white space."""
        return BLANKS if self._is_strict else None

    def _unmarked_reader(self) -> Reader:
        return NameFirstReader(self._names) if self._is_strict else ObjectReader(self._names)

    def _in_lead(self, character: str) -> None:
        """Between the marker and the first call."""
        if character.isspace() or character in self._form.lead:
            self._raw += character
        elif character == "{":
            self._begin_call(
                character, ObjectReader() if self._form.begin else self._unmarked_reader(), before=self._raw
            )
        elif self._form.has_plain_names and PlainReader.begins_with(character):
            self._begin_call(character, PlainReader(), before=self._raw)
        else:
            self._give_up(character)

    def _begin_call(self, character: str, reader: Reader, *, before: str) -> None:
        self._raw, self._held = before, ""
        if self._begin is not None:
            self._begin.num_matched = 0
        self._reader = reader
        self._advance = self._in_call
        self._in_call(character)

    def _in_call(self, character: str) -> None:
        was_certain = self._reader.name is not None
        reading = self._reader.advance(character)
        if reading is Reading.NO_CALL:
            self._give_up(character)
            return
        if not was_certain:
            self._raw += character
            if self._reader.name is not None:
                self._calls.append(CallPiece(self._num_begun, self._reader.name, ""))
                self._num_begun += 1
        if reading is not Reading.MORE:
            self._end_call()
            if reading is Reading.BEYOND and not self._is_done:
                self._after_call(character)

    def _end_call(self) -> None:
        self._take_arguments()
        self._raw = ""
        self._advance = self._after_call
        self._is_done = self._only_first

    def _take_arguments(self) -> None:
        arguments = self._reader.take_arguments() if self._reader.name is not None else ""
        if arguments:
            self._calls.append(CallPiece(self._num_begun - 1, None, arguments))

    def _after_call(self, character: str) -> None:
        """What separates and closes calls is not text."""
        end, form = self._form.end, self._form
        if self._num_closed < len(end) and character == end[self._num_closed]:
            self._num_closed = (self._num_closed + 1) % len(end)
        elif self._num_closed:
            self._back_to_text(end[: self._num_closed] + character)
        elif character.isspace() or character in form.separators:
            pass
        elif character == "{" and form.may_follow_bare:
            self._begin_call(character, self._unmarked_reader() if form.may_begin_bare else ObjectReader(), before="")
        else:
            self._back_to_text(character)

    def _give_up(self, character: str) -> None:
        """What was read is no call. This character may begin one."""
        self._say(self._raw)
        self._raw = ""
        self._back_to_text(character)

    def _back_to_text(self, characters: str) -> None:
        self._num_closed = 0
        if self._begin is None:
            self._advance = self._say
        else:
            self._advance = self._in_text
        for character in characters:
            self._advance(character)


def _merged(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """One piece for each call."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        before = calls.get(piece.number)
        calls[piece.number] = (
            piece if before is None else CallPiece(piece.number, before.name, before.arguments + piece.arguments)
        )
    return tuple(calls.values())
