"""Readers of calls that are not JSON objects, for model families with their own formats.

They read character by character and convert the arguments to JSON, so that clients receive one format for all models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from app.text.begun import partial_match_length
from app.text.tool_calls.literals import JsonWriter, as_json
from app.text.tool_calls.readers import JsonEnd, JsonPlace, Reading

# Maps each tool to the names of its arguments that can only be strings.
Texts = Mapping[str, Collection[str]]
NO_TEXTS: Texts = MappingProxyType({})

_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_MAX_UNDECIDED = 64 * 1024  # an argument with more characters is a string, even if it looks like JSON


def is_of_name(character: str) -> bool:
    """Return whether this character is allowed in a function name."""
    return character.isascii() and (character.isalnum() or character in "_.-")


class OwnReader:
    """Base class for a `CallReader` for the format of a model family."""

    may_follow = False  # whether a call may follow another call without a marker

    def __init__(self, texts: Texts = NO_TEXTS) -> None:
        self.name: str | None = None
        self.unread = ""
        self._texts = texts
        self._arguments: list[str] = []  # JSON that `take_arguments` has not returned yet
        self._num_arguments = 0  # for formats that write arguments one by one

    @staticmethod
    def begins_with(character: str) -> bool:
        """Return whether a call may start with this character."""
        raise NotImplementedError

    def advance(self, character: str) -> Reading:
        """See `CallReader.advance`."""
        raise NotImplementedError

    def take_arguments(self) -> str:
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _begin_key(self, function: str, key: str) -> None:
        """Begin an argument. Sets `name`, because text with an argument is certainly a call."""
        self.name = function
        comma = ", " if self._num_arguments else "{"
        self._arguments.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1

    def _end_arguments(self, function: str) -> None:
        self.name = function
        self._arguments.append("}" if self._num_arguments else "{}")


class PlainReader(OwnReader):
    """Reads `f{…}` or `f[ARGS]{…}`, optionally with `[CALL_ID]…` in between (newer Mistral models)."""

    def __init__(self, texts: Texts = NO_TEXTS) -> None:
        super().__init__(texts)
        self._written_name: list[str] = []
        self._tag: list[str] = []  # the part of `[ARGS]` or `[CALL_ID]…` that has been read
        self._end = JsonEnd()

    @staticmethod
    def begins_with(character: str) -> bool:
        return is_of_name(character)

    def advance(self, character: str) -> Reading:
        if self.name is not None:
            return self._in_arguments(character)
        if character == "{":
            return self._begin_arguments(character)
        if self._tag:
            return self._in_tag(character)
        if character == "[":
            self._tag.append(character)
        elif is_of_name(character):
            self._written_name.append(character)
        else:
            return Reading.NO_CALL
        return Reading.MORE

    def _in_tag(self, character: str) -> Reading:
        self._tag.append(character)
        if len(self._tag) > len(_CALL_ID):
            return Reading.MORE  # within the call's id
        begun = "".join(self._tag)
        is_known = any(tag.startswith(begun) or begun.startswith(tag) for tag in (_ARGS, _CALL_ID))
        return Reading.MORE if is_known else Reading.NO_CALL

    def _begin_arguments(self, character: str) -> Reading:
        if self._tag and not "".join(self._tag).rstrip().endswith(_ARGS):
            return Reading.NO_CALL
        self.name = "".join(self._written_name)
        return self._in_arguments(character)

    def _in_arguments(self, character: str) -> Reading:
        place = self._end.advance(character)
        if place is JsonPlace.BEYOND:
            return Reading.BEYOND
        self._arguments.append(character)
        return Reading.DONE if place is JsonPlace.LAST else Reading.MORE


class TagReader(OwnReader):
    """Reads `<function=f><parameter=a>…</parameter></function>` (Qwen3-Coder, Qwen3.5 and Nemotron 3).

    An argument is written between its tags without quotes, and a newline next to a tag belongs to the tag. An argument
    that can only be a string is streamed as it arrives. Any other argument is a value if it is valid JSON or a Python
    value (some templates write `True`), and otherwise a string.
    """

    _FUNCTION, _FUNCTION_END = "<function=", "</function>"
    _PARAMETER, _PARAMETER_ENDS = "<parameter=", ("\n</parameter>", "</parameter>")

    def __init__(self, texts: Texts = NO_TEXTS) -> None:
        super().__init__(texts)
        # A plain function, because a bound method would create a reference cycle.
        self._advance: Callable[[TagReader, str], Reading] = TagReader._in_function_tag
        self._function = ""
        self._held = ""  # a possible prefix of a tag
        self._value: list[str] | None = None  # an argument that may be JSON; None for a streamed string
        self._num_undecided = 0  # characters of `_value`

    @staticmethod
    def begins_with(character: str) -> bool:
        return character == "<"

    def advance(self, character: str) -> Reading:
        return self._advance(self, character)

    def _in_function_tag(self, character: str) -> Reading:
        self._held += character
        if not _is_beginning(self._held, self._FUNCTION):
            return Reading.NO_CALL
        if character == ">":
            self._function, self._held = self._held[len(self._FUNCTION) : -1], ""
            self._advance = TagReader._between_tags
            return Reading.MORE if self._function else Reading.NO_CALL
        return Reading.MORE

    def _between_tags(self, character: str) -> Reading:
        if not self._held and character.isspace():
            return Reading.MORE
        self._held += character
        if self._held == self._FUNCTION_END:
            return self._close(Reading.DONE)
        if not (_is_beginning(self._held, self._PARAMETER) or self._FUNCTION_END.startswith(self._held)):
            return self._broken()
        if character == ">":
            self._begin_argument(self._held[len(self._PARAMETER) : -1])
        return Reading.MORE

    def _begin_argument(self, key: str) -> None:
        self._begin_key(self._function, key)
        self._held, self._value, self._num_undecided = "", [], 0
        if key in self._texts.get(self._function, ()):
            self._begin_text()
        self._advance = TagReader._before_value

    def _before_value(self, character: str) -> Reading:
        self._advance = TagReader._in_value
        return Reading.MORE if character == "\n" else self._in_value(character)

    def _in_value(self, character: str) -> Reading:
        self._held += character
        if self._held in self._PARAMETER_ENDS:
            self._end_argument()
            return Reading.MORE
        num_held = max(partial_match_length(self._held, end) for end in self._PARAMETER_ENDS)
        said = self._held[: len(self._held) - num_held]
        self._held = self._held[len(said) :]
        self._say(said)
        return Reading.MORE

    def _say(self, text: str) -> None:
        if self._value is None:
            self._arguments.append(_escaped(text))
            return
        self._value.append(text)
        self._num_undecided += len(text)
        if self._num_undecided > _MAX_UNDECIDED:
            self._begin_text()

    def _begin_text(self) -> None:
        undecided, self._value = self._value or [], None
        self._arguments.append('"' + _escaped("".join(undecided)))

    def _end_argument(self) -> None:
        self._arguments.append('"' if self._value is None else as_json("".join(self._value)))
        self._held, self._advance = "", TagReader._between_tags

    def _broken(self) -> Reading:
        """Handle text that is not a valid tag. A call that already has an argument ended before this text."""
        if self.name is None:
            return Reading.NO_CALL
        self.unread = self._held[:-1]
        return self._close(Reading.BEYOND)

    def _close(self, reading: Reading) -> Reading:
        self._end_arguments(self._function)
        return reading


class PythonReader(OwnReader):
    """Reads `f(a=1, b='x')` (LFM2, which writes its calls in a list)."""

    may_follow = True

    def __init__(self, texts: Texts = NO_TEXTS) -> None:
        super().__init__(texts)
        # A plain function, because a bound method would create a reference cycle.
        self._advance: Callable[[PythonReader, str], Reading] = PythonReader._in_function
        self._function: list[str] = []
        self._key: list[str] = []
        self._writer = JsonWriter()

    @staticmethod
    def begins_with(character: str) -> bool:
        return is_of_name(character)

    def advance(self, character: str) -> Reading:
        return self._advance(self, character)

    def take_arguments(self) -> str:
        self._arguments.append(self._writer.take())
        return super().take_arguments()

    def _in_function(self, character: str) -> Reading:
        if character == "(":
            self._advance = PythonReader._before_key
        elif is_of_name(character):
            self._function.append(character)
        else:
            return Reading.NO_CALL
        return Reading.MORE

    def _before_key(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == ")":
            return self._close()
        self._key, self._advance = [], PythonReader._in_key
        return self._in_key(character)

    def _in_key(self, character: str) -> Reading:
        if is_of_name(character):
            self._key.append(character)
        elif character == "=" and self._key:
            self._begin_argument("".join(self._key))
        elif not (character.isspace() and self._key):
            return Reading.NO_CALL if self.name is None else Reading.BEYOND
        return Reading.MORE

    def _begin_argument(self, key: str) -> None:
        self._begin_key("".join(self._function), key)
        self._writer, self._advance = JsonWriter(), PythonReader._in_value

    def _in_value(self, character: str) -> Reading:
        place = self._writer.advance(character)
        if place is JsonPlace.INSIDE:
            return Reading.MORE
        self._arguments.append(self._writer.take())
        self.unread, self._advance = self._writer.unread, PythonReader._after_value
        return Reading.MORE if place is JsonPlace.LAST else self._after_value(character)

    def _after_value(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == "," and not self.unread:
            self._advance = PythonReader._before_key
            return Reading.MORE
        return self._close() if character == ")" and not self.unread else Reading.BEYOND

    def _close(self) -> Reading:
        self._end_arguments("".join(self._function))
        return Reading.DONE


class GemmaReader(OwnReader):
    """Reads `call:f{a:1,b:<|"|>x<|"|>}` (Gemma 4). Strings are written between marks, without escapes."""

    _BEGIN = "call:"

    def __init__(self, texts: Texts = NO_TEXTS) -> None:
        super().__init__(texts)
        self._written = ""  # the text before the arguments
        self._writer = JsonWriter()

    @staticmethod
    def begins_with(character: str) -> bool:
        return character == "c"

    def advance(self, character: str) -> Reading:
        if self.name is None and character != "{":
            self._written += character
            is_name = len(self._written) <= len(self._BEGIN) or is_of_name(character)
            return Reading.MORE if is_name and _is_beginning(self._written, self._BEGIN) else Reading.NO_CALL
        if self.name is None:
            if len(self._written) <= len(self._BEGIN):
                return Reading.NO_CALL
            self.name = self._written.removeprefix(self._BEGIN)
        place = self._writer.advance(character)
        self.unread = self._writer.unread
        if place is JsonPlace.BEYOND:
            return Reading.BEYOND
        return Reading.DONE if place is JsonPlace.LAST else Reading.MORE

    def take_arguments(self) -> str:
        return self._writer.take()


def _is_beginning(text: str, of: str) -> bool:
    """Return whether `text` is a prefix of `of`, or starts with `of` and does not end with `<` or a newline."""
    return of.startswith(text) or (text.startswith(of) and text[-1] not in "<\n")


def _escaped(text: str) -> str:
    """Escape a text for use inside a JSON string. Does not add quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
