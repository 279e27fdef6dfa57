"""Free text between pieces that follow a grammar (see `tags.py`). A trigger is the text that starts a piece.

Detects complete triggers, and bans tokens that continue past the end of a trigger.

This module works with bytes, so that free text is as unrestricted as without a grammar: even invalid UTF-8 is allowed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from app.engine.matcher import with_tokens, without_tokens
from app.grammar.vocabulary import Vocabulary


class FreeTextState(NamedTuple):
    """The state after some text: how much of each trigger has been matched."""

    tail: bytes  # the longest suffix of the text that is a prefix of a trigger
    openings: tuple[
        tuple[int, int], ...
    ]  # (trigger number, matched length) of each opening that matches the whole text


class TokenTable:
    """A vocabulary that is indexed for searches by text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special = vocabulary.special_texts
        hidden = set(vocabulary.special_token_ids)
        # Special tokens have no text here, because they may be hidden, so that the text around them is contiguous.
        self.texts = [b"" if token_id in hidden else text for token_id, text in enumerate(vocabulary.tokens)]
        self.all = with_tokens(bytes(-(-len(self.texts) // 8)), range(len(self.texts)))
        self._joined = b"".join(self.texts)
        self._ends = list(accumulate(map(len, self.texts)))  # end of each token in `_joined`
        self._of_one_byte: dict[bytes, array[int]] = {}
        self._by_text = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._sorted = [self.texts[token_id] for token_id in self._by_text]

    @cached_property
    def blanks(self) -> bytes:
        """Bit mask of the tokens that consist of white space."""
        return with_tokens(bytes(len(self.all)), [at for at, text in enumerate(self.texts) if text.isspace()])

    def beginning(self, text: bytes) -> list[int]:
        """Return the tokens that are equal to the text or a prefix of the text, longest first."""
        found = [self.special[text.decode()]] if text.decode(errors="replace") in self.special else []
        for length in range(len(text), 0, -1):
            at = bisect_left(self._sorted, text[:length])
            while at < len(self._sorted) and self._sorted[at] == text[:length]:
                found.append(self._by_text[at])
                at += 1
        return found

    def longer_than(self, beginning: bytes) -> Iterator[int]:
        """Yield the tokens that start with a text and are longer."""
        at = bisect_right(self._sorted, beginning)
        while at < len(self._sorted) and self._sorted[at].startswith(beginning):
            yield self._by_text[at]
            at += 1

    def containing(self, part: bytes) -> array[int]:
        """Return the tokens that contain a text and continue after it."""
        # The joined texts are searched once, because a loop over 128,000 texts would block all other Python threads.
        # The results for single bytes are cached, because these occur in many tokens.
        found = self._of_one_byte.get(part)
        if found is None:
            found = array("i", self._search(part))
            if len(part) == 1:
                self._of_one_byte[part] = found
        return found

    def _search(self, part: bytes) -> Iterator[int]:
        at = self._joined.find(part)
        while at >= 0:
            token_id = bisect_right(self._ends, at)
            end = self._ends[token_id]
            is_before_end = at + len(part) < end
            if is_before_end:
                yield token_id
            at = self._joined.find(part, end if is_before_end else at + 1)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger's text. An opening matches only at the start of the output, even with added white space."""

    text: bytes
    is_opening: bool


class FreeText:
    """Computes the allowed tokens in each state of a free text, and the state after each token."""

    def __init__(self, table: TokenTable, triggers: Sequence[Trigger]) -> None:
        self._table = table
        self._triggers = [(number, each.text) for number, each in enumerate(triggers) if not each.is_opening]
        self._openings = {number: _Opening(each.text) for number, each in enumerate(triggers) if each.is_opening}
        self._by_token = {
            table.special[text]: number for number, each in self._triggers if (text := each.decode()) in table.special
        }
        # Tokens that contain a trigger and continue past its end are banned in every state.
        whole = {token_id for _, text in self._triggers for token_id in table.containing(text)}
        self._middle = without_tokens(table.all, whole)
        self._names = {number: table.containing(each.last_word) for number, each in self._openings.items()}
        self._allowed: OrderedDict[FreeTextState, bytes] = OrderedDict()  # oldest first
        self.beginning = FreeTextState(b"", tuple((number, 0) for number in self._openings))
        self.middle = FreeTextState(b"", ())  # after a piece

    def allowed(self, place: FreeTextState) -> bytes:
        """Return a bit mask of all tokens, except those that continue past a trigger's end into its content."""
        allowed = self._allowed.get(place)
        max_places = 16  # cached states per grammar; one trigger has about a dozen
        if allowed is None:
            allowed = self._allowed[place] = without_tokens(self._middle, self._writing_past(place))
            if len(self._allowed) > max_places:
                self._allowed.popitem(last=False)
        return allowed

    def after(self, place: FreeTextState, token_id: int) -> FreeTextState | int:
        """Return the state after a token, or the number of the trigger that the token completes."""
        if token_id in self._by_token:
            return self._by_token[token_id]
        text = self._table.texts[token_id]
        if not text:
            return place
        for number, position in place.openings:
            if self._openings[number].advance(position, text) == len(self._openings[number].text):
                return number
        whole = place.tail + text
        ends = [
            (at + len(trigger), -len(trigger), n) for n, trigger in self._triggers if (at := whole.find(trigger)) >= 0
        ]
        return min(ends)[2] if ends else FreeTextState(self._tail(whole), self._still_openings(place, text))

    def _still_openings(self, place: FreeTextState, text: bytes) -> tuple[tuple[int, int], ...]:
        reached = ((number, self._openings[number].advance(position, text)) for number, position in place.openings)
        return tuple((number, position) for number, position in reached if position is not None)

    def _tail(self, text: bytes) -> bytes:
        longest = b""
        for _, trigger in self._triggers:
            at = text.find(trigger[:1], max(0, len(text) - len(trigger) + 1))
            while at >= 0:
                if trigger.startswith(text[at:]):
                    longest = max(longest, text[at:], key=len)
                    break
                at = text.find(trigger[:1], at + 1)
        return longest

    def _writing_past(self, place: FreeTextState) -> set[int]:
        """Return the tokens that complete a partially matched trigger and continue past its end."""
        table, tail = self._table, place.tail
        found: set[int] = set()
        for _, trigger in self._triggers:
            for begun in range(1, min(len(tail), len(trigger) - 1) + 1):
                if tail.endswith(trigger[:begun]):
                    found.update(table.longer_than(trigger[begun:]))
        for number, position in place.openings:
            opening = self._openings[number]
            rest = opening.text[position:]
            candidates = table.longer_than(rest) if opening.last_word.endswith(rest) else self._names[number]
            found.update(each for each in candidates if opening.ends_within(position, table.texts[each]))
        return found


class _Opening:
    """An opening's text. The output may contain additional white space outside quotes."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        quotes = [text[:position].count(b'"') for position in range(len(text))]
        self._may_be_blank = [count % 2 == 0 for count in quotes]
        self.last_word = text[text[:-1].rfind(b'"') + 1 :]  # including the closing quote

    def advance(self, position: int, text: bytes) -> int | None:
        """Return the matched length after more text, or None if it does not match or continues past the opening."""
        blanks = b" \t\r\n"
        for index in range(len(text)):
            if position == len(self.text):
                return None
            if text[index] == self.text[position]:
                position += 1
            elif not (self._may_be_blank[position] and text[index] in blanks):
                return None
        return position

    def ends_within(self, position: int, text: bytes) -> bool:
        """Return whether `text` completes the opening and continues past it."""
        return any(self.advance(position, text[:end]) == len(self.text) for end in range(1, len(text)))
