"""Reads a tokenizer's tokens, without transformers if possible: importing it takes half a second of CPU time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def read_tokens(location: str, revision: str | None) -> Tokenizer:
    """Return a tokenizer with all its tokens. Use it to decode only: transformers may change how text is encoded.

    location: a folder or a hub id.

    Raises:
        OSError, ValueError, TypeError, KeyError: transformers cannot load the tokenizer.
    """
    found = _read_file(Path(location)) if Path(location).is_dir() else None
    if found is not None:
        return found
    from transformers import PreTrainedTokenizerFast

    pretrained = PreTrainedTokenizerFast.from_pretrained(location, revision=revision, trust_remote_code=False)
    backend: Tokenizer = pretrained.backend_tokenizer
    return backend


def _read_file(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in tokenizer.json; None if it cannot be read, or if another file adds tokens to it."""
    try:
        found = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = {(number, token.content, token.special) for number, token in found.get_added_tokens_decoder().items()}
        settings = _read_json(folder / "tokenizer_config.json")
        special = {*_special_tokens(settings), *_special_tokens(_read_json(folder / "special_tokens_map.json"))}
        if found.padding is not None:
            special.add(found.padding["pad_token"])
        described = settings.get("added_tokens_decoder") or {}
        numbered = {(int(number), token["content"], token["special"]) for number, token in described.items()}
    except Exception:  # transformers may be able to read the files, and otherwise reports the mistake
        return None
    names_other_files = (folder / "added_tokens.json").exists() or "fast_tokenizer_files" in settings
    has_all = numbered <= added and special <= {content for _, content, is_special in added if is_special}
    return found if has_all and not names_other_files else None


def _special_tokens(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of the special tokens that settings such as `eos_token` and `extra_special_tokens` name."""
    for name, value in settings.items():
        if name.endswith(("_token", "_tokens")) and isinstance(value, str | dict | list):
            if isinstance(value, dict) and "content" not in value:  # a dict from names to tokens
                value = list(value.values())
            for token in value if isinstance(value, list) else [value]:
                yield token["content"] if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
