"""Converts the tokenizer in a GGUF file's metadata to tokenizer.json, special tokens and a chat template."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from app.errors import InvalidSetup, UnsupportedModel
from app.model.gguf.reader import READ_INSTEAD, GgufFile

logger = logging.getLogger(__name__)

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# How text is split before merges, by values of `tokenizer.ggml.pre`. transformers lacks these values and would use
# GPT-2's rule for all of them. The rules below are llama.cpp's.
_GPT2_RULE = frozenset(
    ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum")
)
_SINGLE_DIGITS = frozenset(  # GPT-2's rule, but each digit is a token
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
)
_AS_NAMED = {"chatglm-bpe": "llama3", "glm4": "llama3", "stablelm2": "qwen2", "hunyuan": "qwen2", "solar-open": "qwen2"}
_COMPOSED = frozenset(("qwen2", "qwen35"))  # Qwen's tokenizers normalise text to NFC, though llama.cpp does not
_SPLITS = {
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def save_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to a folder.

    Raises:
        InvalidSetup: the installed transformers is too old.
        UnsupportedModel: the file's tokenizer is not supported.
    """
    from transformers import PreTrainedTokenizerFast, __version__

    try:
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    except ImportError as error:
        raise InvalidSetup(
            f"GGUF files need transformers 5.18 or newer, but {__version__} is installed: pip install -U transformers"
        ) from error

    given = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}
    described = {name: given[key] for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items() if key in given}
    try:
        backend, _ = convert_gguf_tokenizer(file.metadata["general.architecture"], described)
        _set_rule(backend, described, str(file.metadata["general.architecture"]))
        tokens, num_embeddings = described["tokens"], file.tensors["token_embd.weight"].shape[0]
        if len(tokens) > num_embeddings:
            raise ValueError(f"it has {len(tokens):,} tokens, but the model has {num_embeddings:,}")
        backend = _without_others(backend, len(tokens))
        special = {
            name: tokens[given[key]] for name, kind in _SPECIAL.items() if (key := f"ggml.{kind}_token_id") in given
        }
    except Exception as error:  # tokenizers raises plain Exception for merges of unknown tokens
        raise UnsupportedModel(
            f"{file.path}: its tokenizer ({described.get('tokenizer_type')}, {described.get('pre_tokenizer_type')}) "
            f"cannot be read: {error}; {READ_INSTEAD}"
        ) from error
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=given.get("chat_template"),
        # Without this setting, llama.cpp adds the BOS token for sentencepiece vocabularies.
        add_bos_token=bool(given.get("ggml.add_bos_token", described.get("tokenizer_type") == "llama")),
        add_eos_token=bool(given.get("ggml.add_eos_token", False)),
        **special,
    )
    tokenizer.save_pretrained(folder)
    # Rewrite the file without indentation, which makes up half of it for a large vocabulary.
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")


def _without_others(backend: Any, vocab_size: int) -> Any:
    """Remove the special tokens of GPT-2 that transformers adds, because the model has no embeddings for them."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    return type(backend).from_str(json.dumps(content))


def _set_rule(backend: Any, described: dict[str, Any], architecture: str) -> None:
    """Set how text is split before merges. Raises ValueError for an unknown rule: a guess would change tokens."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    adds_space = not architecture.startswith("gemma")  # as transformers' tokenizer does regardless of the setting
    if described.get("tokenizer_type") == "llama" and described.get("add_prefix_space", True) != adds_space:
        raise ValueError(f"tokenizer.ggml.add_space_prefix is {not adds_space}".lower())
    rule = described.get("pre_tokenizer_type")
    if rule in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if described.get("tokenizer_type") != "gpt2" or rule in GGUF_PRE_TOKENIZER_SPLITS or rule in _GPT2_RULE:
        return
    if rule in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif rule in _AS_NAMED or rule in _SPLITS:
        patterns = _SPLITS.get(rule) or (GGUF_PRE_TOKENIZER_SPLITS[_AS_NAMED[rule]],)
        splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    elif rule in (None, "default"):
        logger.warning("the file does not specify how text is split into tokens; GPT-2's rule is used")
    else:
        raise ValueError(f"tokenizer.ggml.pre {rule!r} is not supported")
