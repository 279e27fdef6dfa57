"""The UTF-8 bytes of each token. A token may contain parts of characters, which its text does not show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps token ids to bytes. The concatenated bytes of an output's tokens are its text in UTF-8.

    The only exception is the leading space that sentencepiece decoders strip from a text.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        steps = list(_steps(backend))
        # Whether every token's text is independent of the neighbouring tokens.
        self.are_independent = [step["type"] for step in steps] == ["ByteLevel"]
        self._decode = _decoder_of(steps)
        self._known: dict[int, bytes] = {}  # at most the vocabulary's size

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token, or b"" for an unknown id."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._of(token_id)
        return found

    def _of(self, token_id: int) -> bytes:
        if token_id in self._added:  # the decoder does not change added tokens
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._decode is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._decode(token)


def _decoder_of(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes] | None:
    """Return a function that converts a token's text to bytes, or None if only the decoder itself can do this."""
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _of_byte_level
    spaces = [_space_sign(step) for step in steps]
    signs = [sign for sign in spaces if sign]
    if not signs and "ByteFallback" not in kinds:
        return None
    has_byte_tokens = "ByteFallback" in kinds

    def decode(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for sign in signs:
            token = token.replace(sign, " ")
        return token.encode()

    return decode


def _steps(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield the decoder's steps as in tokenizer.json."""
    if backend.decoder is None:
        return
    described = json.loads(backend.decoder.__getstate__())
    yield from described["decoders"] if described["type"] == "Sequence" else [described]


def _space_sign(step: Mapping[str, Any]) -> str:
    """Return the text that this step replaces with a space, or "" for another kind of step."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]:
        return str(step["pattern"]["String"])
    return ""


def _of_byte_level(token: str) -> bytes:
    return b"".join(_BYTES.get(symbol) or symbol.encode() for symbol in token)


def _byte_symbols() -> dict[str, bytes]:
    """Return GPT-2's symbols for the 256 bytes. Printable bytes represent themselves; others use 256 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): bytes([byte]) for byte in printable}
    return symbols | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _byte_symbols()
