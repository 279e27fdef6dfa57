"""Small tokenizers built by hand, of the kinds that behave differently when text comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from app.text import Tokenizer

# Byte strings that begin or end inside a character, as merges of byte-level vocabularies do.
AWKWARD = (b"x\xc3", b"\xa9y\xc3", b"\xa9", b"\x98\x80\xf0\x9f", b"\xe2\x82", b"\xac ", b"\xef\xbf\xbd", b" the", b"ab")


def build_byte_level(
    template: str | None = None, special: Sequence[str] = (), *, begins_with: str | None = None
) -> Tokenizer:
    """Byte-level: ids 0-255 are the bytes themselves, then `AWKWARD`, then the `special` ones and `<end>`.

    `begins_with`: one of these stands before each text.
    """
    symbols = bytes_to_unicode()
    vocab = {symbols[byte]: byte for byte in range(256)}
    for token in AWKWARD:
        vocab.setdefault("".join(symbols[byte] for byte in token), len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    if begins_with is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begins_with} $A", special_tokens=[(begins_with, backend.token_to_id(begins_with))]
        )
    return _with_end(backend, template)


def build_byte_fallback() -> Tokenizer:
    """Sentencepiece's way: `▁` begins words, rare characters are byte tokens, the first space is stripped."""
    pieces = ["▁", "▁hello", "▁a", "a", "b", "lo", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_end(backend)


def _with_end(backend: Backend, template: str | None = None) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=template))
