"""Free text between triggers: finds the trigger that is complete, and bans tokens that go on past its end.

Everything here works on bytes, so that free text is as free as without a grammar: invalid UTF-8 is allowed too.
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


class FreePlace(NamedTuple):
    """The state of a text: how much of each trigger its end has matched."""

    tail: bytes  # the longest end of the text that begins a trigger
    openings: tuple[tuple[int, int], ...]  # openings that the whole text still matches, and how much of each


class TokenTable:
    """A vocabulary, indexed for searches by text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special = vocabulary.special_texts
        hidden = set(vocabulary.special_token_ids)
        # Special tokens have no text: where they are hidden, the texts before and after one are adjacent.
        self.texts = [b"" if token_id in hidden else text for token_id, text in enumerate(vocabulary.tokens)]
        self.all = with_tokens(bytes(-(-len(self.texts) // 8)), range(len(self.texts)))
        self._joined = b"".join(self.texts)
        self._ends = list(accumulate(map(len, self.texts)))  # of each token in it
        self._of_one_byte: dict[bytes, array[int]] = {}
        self._by_text = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._sorted = [self.texts[token_id] for token_id in self._by_text]

    @cached_property
    def blanks(self) -> bytes:
        """The tokens of white space."""
        return with_tokens(bytes(len(self.all)), [at for at, text in enumerate(self.texts) if text.isspace()])

    def beginning(self, text: bytes) -> list[int]:
        """The tokens with which this text may begin: its own, or those of its beginnings."""
        found = [self.special[text.decode()]] if text.decode(errors="replace") in self.special else []
        for length in range(len(text), 0, -1):
            at = bisect_left(self._sorted, text[:length])
            while at < len(self._sorted) and self._sorted[at] == text[:length]:
                found.append(self._by_text[at])
                at += 1
        return found

    def longer_than(self, beginning: bytes) -> Iterator[int]:
        """The tokens that begin with this text and are longer."""
        at = bisect_right(self._sorted, beginning)
        while at < len(self._sorted) and self._sorted[at].startswith(beginning):
            yield self._by_text[at]
            at += 1

    def going_on_behind(self, part: bytes) -> array[int]:
        """The tokens that contain this text before their end."""
        # One search through all texts: no other thread of Python runs in a loop over 128,000 of them. Single bytes are
        # in most tokens, so these are searched once.
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
    """The text that begins a piece; an opening only begins the whole text, and may contain blanks."""

    text: bytes
    is_opening: bool


class FreeText:
    """For each place in a text: which tokens are allowed, and the place after each of them."""

    def __init__(self, table: TokenTable, triggers: Sequence[Trigger]) -> None:
        self._table = table
        self._triggers = [(number, each.text) for number, each in enumerate(triggers) if not each.is_opening]
        self._openings = {number: _Opening(each.text) for number, each in enumerate(triggers) if each.is_opening}
        self._by_token = {
            table.special[text]: number for number, each in self._triggers if (text := each.decode()) in table.special
        }
        # After any text, these tokens go on past the end of a trigger that they contain.
        whole = {token_id for _, text in self._triggers for token_id in table.going_on_behind(text)}
        self._middle = without_tokens(table.all, whole)
        self._names = {number: table.going_on_behind(each.last_word) for number, each in self._openings.items()}
        self._allowed: OrderedDict[FreePlace, bytes] = OrderedDict()  # the oldest first
        self.beginning = FreePlace(b"", tuple((number, 0) for number in self._openings))
        self.middle = FreePlace(b"", ())  # after a piece

    def allowed(self, place: FreePlace) -> bytes:
        """All tokens but those that go on past the end of a trigger: its content would begin within them."""
        allowed = self._allowed.get(place)
        max_places = 16  # cached for one grammar; there are about a dozen within one trigger
        if allowed is None:
            allowed = self._allowed[place] = without_tokens(self._middle, self._writing_past(place))
            if len(self._allowed) > max_places:
                self._allowed.popitem(last=False)
        return allowed

    def after(self, place: FreePlace, token_id: int) -> FreePlace | int:
        """The place after a token, or the number of the trigger that it completes."""
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
        return min(ends)[2] if ends else FreePlace(self._tail(whole), self._still_openings(place, text))

    def _still_openings(self, place: FreePlace, text: bytes) -> tuple[tuple[int, int], ...]:
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

    def _writing_past(self, place: FreePlace) -> set[int]:
        """The tokens that go on past the end of a trigger that the text has begun."""
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
    """The text of an opening, which may contain blanks outside quotes."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        quotes = [text[:position].count(b'"') for position in range(len(text))]
        self._may_be_blank = [count % 2 == 0 for count in quotes]
        self.last_word = text[text[:-1].rfind(b'"') + 1 :]  # with the quote after it

    def advance(self, position: int, text: bytes) -> int | None:
        """How much of the opening matches after more text; None where the text does not match or is longer."""
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
        """Whether the opening is complete before the end of the text."""
        return any(self.advance(position, text[:end]) == len(self.text) for end in range(1, len(text)))
