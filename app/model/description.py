"""Reads a model's context length, end tokens and vocabulary from its files. Does not read weights or import torch.

`AutoConfig` is avoided because it imports torch, which a simulated replica never loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import ModelConfig
from app.engine.request import ModelInfo, Pooling
from app.errors import InvalidSetup, first_line
from app.tokenizer_files import read_tokens

_POOLING_MODES = {  # as named in both config formats of sentence-transformers
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls": Pooling.CLS,
    "pooling_mode_mean": Pooling.MEAN,
}
CLASSIFIER = "ForSequenceClassification"  # the class names of cross-encoders and classifiers end in this


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The properties of a model that can be read without its weights."""

    model_info: ModelInfo
    text_token_ids: tuple[int, ...]  # tokens that each decode to text: no special tokens, no parts of characters


def read_description(config: ModelConfig, location: str) -> ModelDescription:
    """Read config.json, generation_config.json and the tokenizer of a folder or hub id.

    Raises InvalidSetup if a file or a required value is missing or cannot be read.
    """
    whole = read_config(config, location)
    text: dict[str, Any] = whole.get("text_config") or whole
    generation = _read_json(config, location, "generation_config.json")
    texts = _token_texts(config, location)
    vocab_size = int(text.get("vocab_size", len(texts)))
    ends = (each.get("eos_token_id") for each in (generation, whole, text))
    eos = as_token_ids(next((each for each in ends if each is not None), None))
    usable = tuple(
        token for token, shown in texts.items() if token < vocab_size and token not in eos and _is_text(shown)
    )
    if not usable:
        raise InvalidSetup(f"the tokenizer of {config.path} has no token that decodes to text")
    length_names = ("max_position_embeddings", "n_positions")
    limit = next((text[name] for name in length_names if text.get(name) is not None), None)
    model_info = ModelInfo(max_model_len=max_model_len(config, limit), vocab_size=vocab_size, eos_token_ids=eos)
    return ModelDescription(model_info, usable)


def is_encoder(config: ModelConfig, location: str) -> bool:
    """Return whether the architecture named in config.json is an encoder, which embeds or scores but generates no text.

    Raises InvalidSetup if the model has no config.json.
    """
    named = read_config(config, location).get("architectures") or [""]
    # Names end in "Model" if the model has no head, and in "ForMaskedLM" if embeddings do not need its head.
    encoders = ("Model", "ForMaskedLM")
    generates = "LMHeadModel"  # GPT-2's name ends in this; it also ends in "Model", but its head generates text
    return str(named[0]).endswith((CLASSIFIER, *encoders)) and not str(named[0]).endswith(generates)


def read_config(config: ModelConfig, location: str) -> dict[str, Any]:
    """Return the config.json of a folder or hub id. Raises InvalidSetup if it is missing or cannot be read."""
    found: dict[str, Any] = _read_json(config, location, "config.json")
    if not found:
        raise InvalidSetup(f"model.path {config.path!r}: there is no config.json at {location!r}")
    if not isinstance(found, dict):
        raise InvalidSetup(f"model.path {config.path!r}: its config.json is not a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """The settings in sentence-transformers' files. All are None if the model's folder contains no such files."""

    pooling: Pooling | None = None
    max_length: int | None = None  # the most tokens that a text may have
    why_not: str | None = None  # the reason if a module or setting is not supported


def sentence_settings(config: ModelConfig, location: str) -> SentenceSettings:
    """Read modules.json and the files that it refers to. Raises InvalidSetup if a file cannot be read."""
    modules: list[dict[str, Any]] = _read_json(config, location, "modules.json") or []
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        return SentenceSettings(why_not=f"modules.json has a module that is not supported: {', '.join(unknown)}")
    length = _read_json(config, location, "sentence_bert_config.json").get("max_seq_length")
    if "Pooling" not in kinds:
        return SentenceSettings(max_length=length)
    folder = modules[kinds.index("Pooling")].get("path", "")
    pooling = _read_json(config, location, f"{folder}/config.json")
    wanted = [name for name, chosen in pooling.items() if name.startswith("pooling_mode_") and chosen]
    wanted = wanted or [f"pooling_mode_{pooling.get('pooling_mode')}"]
    if len(wanted) > 1 or wanted[0] not in _POOLING_MODES:
        names = ", ".join(name.removeprefix("pooling_mode_") for name in wanted)
        return SentenceSettings(why_not=f"{folder}/config.json pools by {names}; only cls, mean and last are supported")
    return SentenceSettings(_POOLING_MODES[wanted[0]], length)


def max_model_len(config: ModelConfig, limit: int | None) -> int:
    """Return the maximum of prompt plus output tokens: `config.max_model_len` if set, otherwise the model's limit.

    Raises InvalidSetup if both are unknown, or if the configured number exceeds the model's limit.
    """
    asked = config.max_model_len
    longest = asked if asked is not None else limit
    if longest is None:
        raise InvalidSetup(f"{config.path} does not state its context length; set model.max_model_len")
    if limit is not None and asked is not None and asked > limit:
        raise InvalidSetup(f"model.max_model_len is {asked:,}; {config.path} accepts at most {limit:,} tokens")
    return longest


def as_token_ids(found: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return a configuration's `eos_token_id`, which may be None, a number or a list, as a tuple."""
    if found is None:
        return ()
    return tuple(found) if isinstance(found, Iterable) else (int(found),)


def _token_texts(config: ModelConfig, location: str) -> dict[int, str]:
    """Return each token's text when decoded alone, by token id. Special tokens have an empty text."""
    try:
        backend = read_tokens(location, config.revision)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidSetup(f"no tokenizer could be loaded from {location!r}: {first_line(error)}") from error
    token_ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    texts = backend.decode_batch([[token] for token in token_ids], skip_special_tokens=True)
    return dict(zip(token_ids, texts, strict=True))


def _is_text(shown: str) -> bool:
    incomplete = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this
    return bool(shown) and incomplete not in shown


def _read_json(config: ModelConfig, location: str, name: str) -> Any:
    """Return the content of a JSON file in the folder, or an empty object if the file is missing."""
    try:
        file = Path(location) / name if Path(location).is_dir() else _downloaded(config, location, name)
        found = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidSetup(f"model.path {config.path!r}: {name} cannot be read: {first_line(error)}") from error
    return found


def _downloaded(config: ModelConfig, hub_id: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    file = cached_file(hub_id, name, revision=config.revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)
