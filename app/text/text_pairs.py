"""Texts and pairs of texts as encoders read them, with the tokens that a model's tokenizer puts around them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# Characters that are encoded at a time. What the tokenizer makes of a text has a hundred bytes for each token, and to
# free it holds the interpreter lock.
CHARACTERS_AT_ONCE = 65_536


class EncodedText(NamedTuple):
    """One text or a pair."""

    token_ids: tuple[int, ...]
    second_at: int = 0  # the first token of the second type, where the tokenizer tells two texts apart; 0: none


class EncodedTexts:
    """Texts alone, or pairs: each of some texts, or the only one, with one of others.

    Every text is encoded once, and has four bytes for each token that is kept of it until `encoded` is called.
    """

    def __init__(
        self,
        forms: Forms,
        *sides: Sequence[str],
        max_tokens: int | None = None,
        longest: int = 0,
    ) -> None:
        """One side or two. `max_tokens` of a text of the last side are kept, so that all have `longest` if possible."""
        self._forms = forms
        self._num_special = forms.backend.num_special_tokens_to_add(len(sides) == 2)
        *firsts, last = sides
        self._sides = [_Side(forms.backend, texts) for texts in firsts]
        room = (
            None if max_tokens is None else partial(self._room, [side.ids for side in self._sides], max_tokens, longest)
        )
        self._sides.append(_Side(forms.backend, last, room))

    def _room(self, firsts: Sequence[Sequence[array[int]]], max_tokens: int, longest: int, at: int) -> int:
        """How many tokens of the text of a number are kept beside its other; none or less: all, and it is refused."""
        return min(max_tokens, longest - self._num_special - sum(len(_at(ids, at)) for ids in firsts))

    def __len__(self) -> int:
        return len(self._sides[-1].ids)

    @property
    def num_tokens(self) -> int:
        """Of all, with those around them, without making them."""
        return sum(
            sum(map(len, side.ids)) * (len(self) if len(side.ids) == 1 else 1) for side in self._sides
        ) + self._num_special * len(self)

    def encoded(self) -> list[EncodedText]:
        """The texts as `tokenizer(text)` of transformers makes them, the pairs as `tokenizer(first, second)` does."""
        return [self._joined([_at(side.ids, at) for side in self._sides]) for at in range(len(self))]

    def _joined(self, texts: Sequence[array[int]]) -> EncodedText:
        samples = [side.samples[bool(text)] for side, text in zip(self._sides, texts, strict=True)]
        token_ids: list[int] = []
        second_at = 0
        for part in self._forms.form(tuple(map(bool, texts)), samples):
            if part.is_second and not second_at:
                second_at = len(token_ids)
            token_ids += (part.token_id,) if part.text is None else texts[part.text]
        return EncodedText(tuple(token_ids), second_at)


class Forms:
    """What a model's tokenizer puts around texts: special tokens, and where each text stands. Learned once."""

    def __init__(self, backend: Backend, *, has_types: bool) -> None:
        """has_types: the tokenizer tells two texts apart."""
        self.backend = backend
        self._has_types = has_types
        self._known: dict[tuple[bool, ...], list[_Part]] = {}

    def form(self, have_tokens: tuple[bool, ...], samples: Sequence[str]) -> list[_Part]:
        """Around texts of which these have tokens, by what the tokenizer makes of such `samples`."""
        known = self._known.get(have_tokens)
        if known is None:
            known = self._known[have_tokens] = self._learned(samples)
        return known

    def _learned(self, samples: Sequence[str]) -> list[_Part]:
        [encoding] = self.backend.encode_batch_fast([samples[0] if len(samples) == 1 else (samples[0], samples[1])])
        form: list[_Part] = []
        of_tokens = zip(encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True)
        for token_id, text, type_id in of_tokens:
            if text is None or not form or form[-1].text != text:
                form.append(_Part(token_id, text, self._has_types and type_id == 1))
        return form


class _Part(NamedTuple):
    """One special token of those around texts, or the place of a text."""

    token_id: int
    text: int | None  # its number
    is_second: bool  # by the types that the tokenizer gives


class _Side:
    """Texts without the tokens around them."""

    def __init__(self, backend: Backend, texts: Sequence[str], room: Callable[[int], int] | None = None) -> None:
        self.ids: list[array[int]] = []
        self.samples: dict[bool, str] = {}  # by whether it has tokens, the shortest of these texts
        for text, encoding in zip(texts, _encodings(backend, texts), strict=True):
            most = 0 if room is None else room(len(self.ids))
            # Not `truncate`, which keeps all that it cuts off, as one more object for every `most` tokens.
            ids = array("I", encoding.ids[:most] if most > 0 else encoding.ids)
            self.ids.append(ids)
            sample = self.samples.get(bool(ids))
            if sample is None or len(text) < len(sample):
                self.samples[bool(ids)] = text


def _at(ids: Sequence[array[int]], number: int) -> array[int]:
    """The only one stands for all."""
    return ids[0 if len(ids) == 1 else number]


def _encodings(backend: Backend, texts: Sequence[str]) -> Iterator[Encoding]:
    """Of each text, without the tokens around it."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= CHARACTERS_AT_ONCE:
            # Without "fast" they would have offsets, which nothing here needs.
            yield from backend.encode_batch_fast(some, add_special_tokens=False)
            some, size = [], 0
    if some:
        yield from backend.encode_batch_fast(some, add_special_tokens=False)
