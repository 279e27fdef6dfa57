"""Tokenizes texts and pairs of texts for encoders, with the special tokens that the model's tokenizer adds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# The number of characters to encode in one call. The tokenizer's result uses a hundred bytes per token, and freeing it
# blocks other threads, because it holds the interpreter lock.
CHARACTERS_AT_ONCE = 65_536


class EncodedText(NamedTuple):
    """The tokens of one text or of a pair."""

    token_ids: tuple[int, ...]
    second_at: int = 0  # index of the first token with the second token type; 0 if there is none


class EncodedTexts:
    """Encoded single texts or pairs of texts. If the first side has only one text, it is paired with every second text.

    Each text is encoded once. Until `encoded` is called, it uses only four bytes per token.
    """

    def __init__(
        self,
        forms: Forms,
        *sides: Sequence[str],
        max_tokens: int | None = None,
        longest: int = 0,
    ) -> None:
        """Encode one or two sides. Cuts the last side's texts to `max_tokens`, or further to fit within `longest`."""
        self._forms = forms
        self._num_special = forms.backend.num_special_tokens_to_add(len(sides) == 2)
        *firsts, last = sides
        self._sides = [_Side(forms.backend, texts) for texts in firsts]
        room = (
            None if max_tokens is None else partial(self._room, [side.ids for side in self._sides], max_tokens, longest)
        )
        self._sides.append(_Side(forms.backend, last, room))

    def _room(self, firsts: Sequence[Sequence[array[int]]], max_tokens: int, longest: int, at: int) -> int:
        """Return how many tokens of text `at` to keep. For 0 or less, all are kept, because the caller rejects it."""
        return min(max_tokens, longest - self._num_special - sum(len(_at(ids, at)) for ids in firsts))

    def __len__(self) -> int:
        return len(self._sides[-1].ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts or pairs, including special tokens. Does not build them."""
        return sum(
            sum(map(len, side.ids)) * (len(self) if len(side.ids) == 1 else 1) for side in self._sides
        ) + self._num_special * len(self)

    def encoded(self) -> list[EncodedText]:
        """Return the same tokens as transformers' `tokenizer(text)`, or as `tokenizer(first, second)` for pairs."""
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
    """The special tokens that a model's tokenizer adds around texts. Determined once by encoding sample texts."""

    def __init__(self, backend: Backend, *, has_types: bool) -> None:
        """`has_types` is whether the tokenizer assigns another token type to the second text."""
        self.backend = backend
        self._has_types = has_types
        self._known: dict[tuple[bool, ...], list[_Part]] = {}

    def form(self, have_tokens: tuple[bool, ...], samples: Sequence[str]) -> list[_Part]:
        """Return the form for texts with or without tokens (`have_tokens`). `samples` are texts of this kind."""
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
    """One part of a form: a special token or a text."""

    token_id: int
    text: int | None  # index of the text; None for a special token
    is_second: bool  # whether this part has the second token type


class _Side:
    """The tokens of one side's texts, without special tokens."""

    def __init__(self, backend: Backend, texts: Sequence[str], room: Callable[[int], int] | None = None) -> None:
        self.ids: list[array[int]] = []
        self.samples: dict[bool, str] = {}  # the shortest text with tokens (True), and the shortest without (False)
        for text, encoding in zip(texts, _encodings(backend, texts), strict=True):
            most = 0 if room is None else room(len(self.ids))
            # Not with `truncate`, which would keep the removed tokens in further objects.
            ids = array("I", encoding.ids[:most] if most > 0 else encoding.ids)
            self.ids.append(ids)
            sample = self.samples.get(bool(ids))
            if sample is None or len(text) < len(sample):
                self.samples[bool(ids)] = text


def _at(ids: Sequence[array[int]], number: int) -> array[int]:
    """Return the ids of text `number`, or of the only text if there is just one."""
    return ids[0 if len(ids) == 1 else number]


def _encodings(backend: Backend, texts: Sequence[str]) -> Iterator[Encoding]:
    """Yield the encoding of each text, without special tokens."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= CHARACTERS_AT_ONCE:
            # `encode_batch` would also compute offsets, which are not needed.
            yield from backend.encode_batch_fast(some, add_special_tokens=False)
            some, size = [], 0
    if some:
        yield from backend.encode_batch_fast(some, add_special_tokens=False)
