"""Separates text from tool calls. The result does not depend on how the text is divided into pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from app.text.begun import partial_match_length
from app.text.tool_calls.format import ToolFormat
from app.text.tool_calls.own_readers import NO_TEXTS, Texts
from app.text.tool_calls.readers import BLANKS, CallReader, NameFirstReader, ObjectReader, Reading

MAX_HELD_BLANKS = 1024  # maximum white space characters that are held back because a marker may follow


class CallPiece(NamedTuple):
    """A new part of one call: its name (only in the first piece), and more of its arguments."""

    number: int  # the call's position in the text, from 0
    name: str | None
    arguments: str  # or the input, if the call is for a custom tool
    is_custom: bool = False


class Parsed(NamedTuple):
    """Text for the user, followed by new parts of calls, at most one per call."""

    text: str
    calls: tuple[CallPiece, ...]


class CallParser(Protocol):
    """Separates the calls in one output from its text."""

    @property
    def has_calls(self) -> bool:
        """Whether a call has been found so far."""

    @property
    def is_done(self) -> bool:
        """Whether the parser ignores all further text."""

    def push(self, text: str) -> list[Parsed]:
        """Parse the next piece of the output. Returns the text and calls in order."""

    def flush(self) -> list[Parsed]:
        """Return the text and calls that are still held back. Call this after the last piece."""


class ArgumentsParser:
    """A parser for output that only consists of a function's arguments or a custom tool's input."""

    def __init__(self, name: str, *, is_custom: bool = False) -> None:
        self._name = name
        self._is_custom = is_custom
        self.has_calls = False
        self.is_done = False

    def push(self, text: str) -> list[Parsed]:
        if not text:
            return []
        name = None if self.has_calls else self._name
        self.has_calls = True
        return [Parsed("", (CallPiece(0, name, text, self._is_custom),))]

    def flush(self) -> list[Parsed]:
        return []


class ToolParser:
    """Separates calls in one format from the text around them.

    Text that turns out not to be a call is returned as text, including its markers. White space around calls (up to a
    limit) and separators between calls belong to the format and are dropped. The parser never raises an error. Its time
    is linear in the length of the text, and the amount of text that is held back is limited.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        only_first: bool = False,
        is_strict: bool = False,
        raw_names: Collection[str] = (),
        texts: Texts = NO_TEXTS,
    ) -> None:
        """`names` are the names of the offered tools. With `only_first`, everything after the first call is ignored.

        With `is_strict`, an object without a marker is a call only if it starts exactly as the grammar for strict calls
        requires. Otherwise, the model could avoid the grammar. `raw_names` are tools whose calls have empty arguments,
        followed by an input from the next line to the end of the text. `texts` lists by tool the arguments that can
        only be strings, for formats that do not distinguish strings from numbers.
        """
        self._form = form
        self._names = names
        self._only_first = only_first
        self._is_strict = is_strict
        self._raw_names = raw_names
        self._texts = texts
        # A plain function, because a bound method would create a reference cycle.
        self._advance: Callable[[ToolParser, str], None] = ToolParser._in_text if form.begin else ToolParser._in_lead
        self._blanks: list[str] = []  # white space held back before a possible marker
        self._num_opened = 0  # length of the opening marker's prefix at the end of the text
        self._raw: list[str] = []  # the current call's characters, as long as it may turn out not to be a call
        self._reader: CallReader = ObjectReader()
        self._num_closed = 0  # how many characters of the closing marker have been read
        self._is_closed = False  # whether the closing marker was read after the last call
        self._num_begun = 0  # number of calls with a known name
        self._has_text = False
        self._is_done = False
        self._text: list[str] = []
        self._calls: list[CallPiece] = []  # calls that follow `_text`
        self._parsed: list[Parsed] = []  # complete parts that precede `_text`

    @property
    def has_calls(self) -> bool:
        return self._num_begun > 0

    @property
    def is_done(self) -> bool:
        return self._is_done

    def push(self, text: str) -> list[Parsed]:
        for character in text:
            if self._is_done:
                break
            self._advance(self, character)
        return self._taken()

    def flush(self) -> list[Parsed]:
        if self._advance is ToolParser._in_text:
            self._say_held()
        elif self._advance is ToolParser._after_call:
            self._say(self._form.end[: self._num_closed])
        elif self._advance is ToolParser._in_lead or self._is_uncertain:
            self._say("".join(self._raw))
        return self._taken()

    @property
    def _is_uncertain(self) -> bool:
        """Whether the current call may still turn out to be text."""
        return self._advance is ToolParser._in_call and self._reader.name is None

    def _taken(self) -> list[Parsed]:
        self._take_arguments()
        self._end_part()
        parsed, self._parsed = self._parsed, []
        return parsed

    def _end_part(self) -> None:
        if self._text or self._calls:
            self._parsed.append(Parsed("".join(self._text), _merged(self._calls)))
            self._text, self._calls = [], []

    def _say(self, text: str) -> None:
        if self._calls and text:
            self._end_part()
        self._text.append(text)
        self._has_text = self._has_text or bool(text.strip())

    def _in_text(self, character: str) -> None:
        if character == "{" and self._may_begin_unmarked():
            self._begin_call(character, self._unmarked_reader(), before=self._blanks)
            return
        begin, num_before = self._form.begin, self._num_opened
        held = begin[:num_before] + character
        self._num_opened = partial_match_length(held, begin)
        if held == begin:
            self._raw, self._blanks = [*self._blanks, begin], []
            self._num_opened = 0
            self._advance = ToolParser._in_lead
        elif self._num_opened <= num_before:  # at least the first held character does not belong to a marker
            self._say_certain(held, num_held=self._num_opened)

    def _may_begin_unmarked(self) -> bool:
        if not self._form.may_begin_bare or self._has_text or self._num_opened:
            return False
        return not self._is_strict or all(blank in BLANKS for blank in self._blanks)

    def _say_certain(self, text: str, *, num_held: int) -> None:
        """Emit the held white space and `text`, except its last `num_held` characters and the preceding white space."""
        said = text[: len(text) - num_held]
        if not said.isspace():
            kept = said.rstrip()
            self._say("".join(self._blanks) + kept)
            self._blanks = []
            said = said[len(kept) :]
        self._blanks.extend(said)
        if len(self._blanks) >= MAX_HELD_BLANKS:
            self._say("".join(self._blanks))
            self._blanks = []

    def _say_held(self) -> None:
        self._say("".join(self._blanks) + self._form.begin[: self._num_opened])

    def _unmarked_reader(self) -> CallReader:
        return NameFirstReader(self._names) if self._is_strict else ObjectReader(self._names)

    def _in_lead(self, character: str) -> None:
        """Handle a character between the marker and the first call."""
        if len(self._raw) >= 2 * MAX_HELD_BLANKS:  # including white space before the marker
            self._give_up(character)
        elif character.isspace() or character in self._form.lead:
            self._raw.append(character)
        elif character == "{":
            self._begin_call(
                character, ObjectReader() if self._form.begin else self._unmarked_reader(), before=self._raw
            )
        elif self._form.own is not None and self._form.own.begins_with(character):
            self._begin_call(character, self._form.own(self._texts), before=self._raw)
        else:
            self._give_up(character)

    def _begin_call(self, character: str, reader: CallReader, *, before: list[str]) -> None:
        self._raw, self._blanks = before, []
        self._num_opened, self._is_closed = 0, False
        self._reader = reader
        self._advance = ToolParser._in_call
        self._in_call(character)

    def _in_call(self, character: str) -> None:
        was_certain = self._reader.name is not None
        reading = self._reader.advance(character)
        # A call is held back until its name and the beginning of its arguments have been read. If more characters than
        # this precede that point (for example, arguments before the name), the call becomes text.
        max_uncertain = 256 * 1024
        if reading is Reading.NO_CALL or (not was_certain and len(self._raw) >= max_uncertain):
            self._give_up(character)
            return
        if not was_certain:
            self._raw.append(character)
            if self._reader.name is not None:
                self._calls.append(CallPiece(self._num_begun, self._reader.name, "", self._is_raw))
                self._num_begun += 1
        if reading is not Reading.MORE:
            self._end_call()
            for each in self._reader.unread + character if reading is Reading.BEYOND else "":
                if not self._is_done:
                    self._advance(self, each)

    @property
    def _is_raw(self) -> bool:
        return self._reader.name in self._raw_names

    def _end_call(self) -> None:
        self._take_arguments()
        self._raw = []
        self._advance = ToolParser._before_input if self._is_raw else ToolParser._after_call
        self._is_done = self._only_first and not self._is_raw

    def _before_input(self, character: str) -> None:
        """Skip the newline before the input."""
        self._advance = ToolParser._in_input
        if character != "\n":
            self._in_input(character)

    def _in_input(self, character: str) -> None:
        self._calls.append(CallPiece(self._num_begun - 1, None, character, is_custom=True))

    def _take_arguments(self) -> None:
        arguments = self._reader.take_arguments() if self._reader.name is not None else ""
        if arguments and not self._is_raw:
            self._calls.append(CallPiece(self._num_begun - 1, None, arguments))

    def _after_call(self, character: str) -> None:
        """Handle a character after a call. Drops separators and closing markers."""
        end, form = self._form.end, self._form
        if self._num_closed < len(end) and character == end[self._num_closed]:
            self._num_closed = (self._num_closed + 1) % len(end)
            self._is_closed = self._is_closed or not self._num_closed
        elif self._num_closed:
            self._back_to_text(end[: self._num_closed] + character)
        elif character.isspace() or character in form.separators:
            pass
        elif character == "{" and form.may_follow_bare and not self._is_closed:
            self._begin_call(character, self._unmarked_reader() if form.may_begin_bare else ObjectReader(), before=[])
        elif form.own is not None and form.own.may_follow and not self._is_closed and form.own.begins_with(character):
            self._begin_call(character, form.own(self._texts), before=[])
        else:
            self._back_to_text(character)

    def _give_up(self, character: str) -> None:
        """Emit the characters as text, because they are not a call, except for a possible new marker at their end."""
        raw, self._raw = "".join(self._raw), []
        num_held = partial_match_length(raw, self._form.begin) if self._form.begin else 0
        self._say(raw[: len(raw) - num_held])
        self._back_to_text(raw[len(raw) - num_held :] + character)

    def _back_to_text(self, characters: str) -> None:
        self._num_closed = 0
        self._advance = ToolParser._in_text if self._form.begin else ToolParser._say
        for character in characters:
            self._advance(self, character)


def _merged(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        before = calls.get(piece.number)
        calls[piece.number] = piece if before is None else before._replace(arguments=before.arguments + piece.arguments)
    return tuple(calls.values())
