"""A tokenizer that is read without transformers has the tokens that transformers would read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from app.text import Tokenizer
from app.tokenizer_files import read_tokens
from tests.text.small_tokenizers import build_byte_fallback, build_byte_level

Change = Callable[[dict[str, Any]], None]


def with_special_tokens() -> Tokenizer:
    return build_byte_level("{{ messages }}", special=["<a>", "<b>"], begins_with="<a>")


def of_transformers(folder: Path) -> dict[str, Any]:
    """The tokens that transformers reads, and their texts."""
    return tokens_of(PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer)


def tokens_of(backend: Any) -> dict[str, Any]:
    state = json.loads(backend.to_str())
    ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    texts = [backend.decode_batch([[each] for each in ids], skip_special_tokens=skips) for skips in (True, False)]
    return {"ids": ids, "texts": texts} | {name: state[name] for name in ("added_tokens", "decoder", "model")}


@pytest.mark.parametrize("build", [build_byte_level, build_byte_fallback, with_special_tokens])
def test_tokens_are_those_of_transformers(build: Callable[[], Tokenizer], tmp_path: Path) -> None:
    build()._pretrained.save_pretrained(tmp_path)
    assert tokens_of(read_tokens(str(tmp_path), None)) == of_transformers(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "</s>"},
        {"eos_token": AddedToken("</s>").__getstate__() | {"__type": "AddedToken"}},
        {"additional_special_tokens": ["<a>", "<call>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"pad_token": "ab"},  # a token of the vocabulary that becomes special
        {"added_tokens_decoder": {"900": AddedToken("<tool>", special=False).__getstate__()}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_tokens_that_only_the_settings_name_are_there(settings: dict[str, Any], tmp_path: Path) -> None:
    with_special_tokens()._pretrained.save_pretrained(tmp_path)
    before = tokens_of(read_tokens(str(tmp_path), None))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assert tokens_of(read_tokens(str(tmp_path), None)) == of_transformers(tmp_path) != before


def test_the_token_that_pads_is_special(tmp_path: Path) -> None:
    with_special_tokens()._pretrained.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 5}
    content = json.loads(file.read_text()) | {"padding": padding | {"pad_type_id": 0, "pad_token": "ab"}}
    file.write_text(json.dumps(content))
    assert tokens_of(read_tokens(str(tmp_path), None)) == of_transformers(tmp_path)
    assert {"ab"} <= {token["content"] for token in of_transformers(tmp_path)["added_tokens"] if token["special"]}


def test_a_file_for_this_version_is_read(tmp_path: Path) -> None:
    with_special_tokens()._pretrained.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.4.0.0.json")
    build_byte_fallback()._pretrained.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}
    file.write_text(json.dumps(settings))
    assert tokens_of(read_tokens(str(tmp_path), None)) == of_transformers(tmp_path)


def test_transformers_is_not_imported_for_the_bundled_model(demo_path: Path) -> None:
    code = f"""
import sys
from app.tokenizer_files import read_tokens
print(read_tokens({str(demo_path)!r}, None).get_vocab_size(), "transformers" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(of_transformers(demo_path)["ids"][-1] + 1), "False"]


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_files_that_cannot_be_read_are_reported_by_transformers(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises((OSError, ValueError, TypeError, KeyError)):
        read_tokens(str(tmp_path), None)
