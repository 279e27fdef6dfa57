"""Texts and pairs of texts as encoders read them, with the tokens that a model's tokenizer puts around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend


class EncodedText(NamedTuple):
    """One text or a pair."""

    token_ids: tuple[int, ...]
    second_at: int = 0  # the first token of the second type, where the tokenizer tells two texts apart; 0: none


def encode_texts(
    backend: Backend, texts: Sequence[str], *, max_tokens: int | None = None, longest: int = 0
) -> list[EncodedText]:
    """Each text alone; `max_tokens` of it are kept, and at most `longest` with the tokens around it."""
    # Without "fast" they would have offsets, which nothing here needs.
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    if max_tokens is not None:
        for encoding in encodings:
            _cut(encoding, min(max_tokens, longest - backend.num_special_tokens_to_add(False)))
    return [EncodedText(tuple(backend.post_process(each).ids)) for each in encodings]


class TextPairs:
    """Each of some texts, or the only one, with one of others. Every text is encoded once."""

    def __init__(
        self,
        backend: Backend,
        firsts: Sequence[str],
        seconds: Sequence[str],
        *,
        max_second: int | None = None,
        longest: int = 0,
        has_types: bool = True,
    ) -> None:
        """`max_second` tokens of a second text are kept, so that the whole pair has `longest` if possible.

        has_types: the tokenizer tells both texts apart.
        """
        self._backend = backend
        self._has_types = has_types
        some = backend.encode_batch_fast(list(firsts), add_special_tokens=False)
        self._firsts = some * len(seconds) if len(some) == 1 else some
        # As the second of a pair with an empty text: so its tokens have the second type.
        self._seconds = backend.encode_batch_fast([("", text) for text in seconds], add_special_tokens=False)
        self._num_special = backend.num_special_tokens_to_add(True)
        if max_second is not None:
            for first, second in zip(self._firsts, self._seconds, strict=True):
                _cut(second, min(max_second, longest - len(first) - self._num_special))

    @property
    def num_tokens(self) -> int:
        """Of all pairs, without making them."""
        return sum(map(len, self._firsts)) + sum(map(len, self._seconds)) + self._num_special * len(self._seconds)

    def encoded(self) -> list[EncodedText]:
        """The pairs, as `tokenizer(first, second)` of transformers makes them."""
        return [self._joined(*both) for both in zip(self._firsts, self._seconds, strict=True)]

    def _joined(self, first: Encoding, second: Encoding) -> EncodedText:
        joined = self._backend.post_process(first, second)
        types = joined.type_ids if self._has_types else []
        return EncodedText(tuple(joined.ids), types.index(1) if 1 in types else 0)


def _cut(encoding: Encoding, num_tokens: int) -> None:
    if len(encoding) > num_tokens > 0:
        encoding.truncate(num_tokens)
