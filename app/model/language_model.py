"""Extracts the language model from a multimodal checkpoint, to serve text only.

The towers for images, audio and video are neither read from the files nor held in memory.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from app.errors import UnsupportedModel
from app.model.architectures import TEXT_MODELS, TextModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Prefix of a language model's weights in multimodal checkpoints → prefix in the language model alone.
_PREFIXES = {
    r"^(?:model\.)?(?:language_model|text_model)\.(?=lm_head\.)": "",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}


def plain_name(weight: str) -> str:
    """Strip the prefix of multimodal checkpoints: model.language_model.norm.weight → model.norm.weight."""
    for prefix, plain in _PREFIXES.items():
        weight = re.sub(prefix, plain, weight)
    return weight


def plain_names(whole: PreTrainedConfig) -> dict[str, str]:
    """Return the renames to apply, in order: those of transformers for this checkpoint, then those of `plain_name`."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    changes = get_checkpoint_conversion_mapping(whole.model_type) or ()
    own = {
        each._original_source_patterns[0]: each._original_target_patterns[0]
        for each in changes
        if type(each) is WeightRenaming and len(each._original_source_patterns) == 1
    }
    return own | _PREFIXES


def check_text_weights(path: str, folder: Path, whole: PreTrainedConfig, expected: Collection[str]) -> None:
    """Check that all files exist and contain weights of the language model. Reads only names, so it is fast.

    Not every missing weight is found here, because transformers may rename weights in other ways when it loads them.
    path: the model's path, for messages. expected: the names of the language model's weights. Raises UnsupportedModel.
    """
    names = _names_of_weights(path, folder)
    found = {_renamed(name, plain_names(whole)) for name in names}
    if names and found.isdisjoint(expected) and names.isdisjoint(expected):
        raise UnsupportedModel(
            f"{path} cannot be loaded: its files contain none of the language model's {len(expected)} weights, "
            f"such as {min(expected)}, but {len(names)} other weights, such as {min(names)}"
        )


def _names_of_weights(path: str, folder: Path) -> set[str]:
    """Return all names in the safetensors files, if any. Raises UnsupportedModel if the index names a missing file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {name for file in folder.glob("*.safetensors") for name in _header(file)}
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    missing = sorted(file for file in set(places.values()) if not (folder / file).is_file())
    if missing:
        num_weights = sum(file in missing for file in places.values())
        raise UnsupportedModel(
            f"{path} cannot be loaded: {index.name} lists {len(set(places.values()))} files, but {len(missing)} of "
            f"them, with {num_weights} weights, are missing, such as {missing[0]}. Download them again"
        )
    return set(places)


def _header(file: Path) -> set[str]:
    """Return the names of the weights in a safetensors file. Invalid files yield none; loading them reports why."""
    max_header_bytes = 100 * 10**6  # the limit of the format
    with file.open("rb") as opened:
        num_bytes = int.from_bytes(opened.read(8), "little")
        try:
            return (
                set(json.loads(opened.read(num_bytes))) - {"__metadata__"} if num_bytes <= max_header_bytes else set()
            )
        except ValueError:
            return set()


def _renamed(name: str, changes: Mapping[str, str]) -> str:
    for pattern, replacement in changes.items():
        name = re.sub(pattern, replacement, name)
    return name


def language_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the checkpoint's language model.

    Returns `whole` itself if the checkpoint is only a language model, or if transformers has no separate class for the
    language model. In the latter case, `language_class` removes the towers.
    """
    from transformers import AutoModelForCausalLM

    known, text = AutoModelForCausalLM._model_mapping, whole.get_text_config()
    if text is whole:
        return whole
    if type(text) not in known and text.model_type in TEXT_MODELS:
        text = _as_plain(text, TEXT_MODELS[text.model_type])
    if type(text) not in known:
        return whole
    text = copy.deepcopy(text)
    for name in ("quantization_config", "eos_token_id", "tie_word_embeddings"):
        if (found := getattr(whole, name, None)) is not None:
            setattr(text, name, found)
    return text


def _as_plain(text: PreTrainedConfig, plain: TextModel) -> PreTrainedConfig:
    """Return the configuration of the equivalent plain model, which lacks the three-dimensional positions of images."""
    from transformers import CONFIG_MAPPING

    values = text.to_dict()
    rope = dict(values.get("rope_parameters") or {})
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    for name in ("model_type", "architectures"):
        values.pop(name, None)
    found: PreTrainedConfig = CONFIG_MAPPING[plain.model_type](**values | plain.settings | {"rope_parameters": rope})
    return found


def language_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for a configuration from `language_config`, without the towers of a multimodal class.

    Raises ValueError if no class generates text from text alone. The message is a predicate without the model's name.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto.auto_factory import _get_model_class

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in kind._model_mapping:
            found: type[PreTrainedModel] = _get_model_class(config, kind._model_mapping)
            is_plain = kind is AutoModelForCausalLM and config.get_text_config() is config
            return found if is_plain else _without_towers(found)  # type: ignore[arg-type]  # classes are hashable
    import transformers

    for name in config.architectures or ():
        if issubclass(getattr(transformers, name, object), transformers.GenerationMixin):
            raise ValueError(f"is not a text, image or video model that transformers lists: {name}")
    raise ValueError("is not a model that generates text")


@cache
def _without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass in which only the language model has weights. Raises ValueError like `language_class`."""
    from transformers import GenerationMixin

    needed = [
        name
        for name, each in inspect.signature(whole.forward).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and name not in ("self", "input_ids")
    ]
    if needed:
        raise ValueError(f"cannot generate text from text alone: {whole.__name__} needs {', '.join(needed)}")
    if whole.generate is not GenerationMixin.generate:
        raise ValueError(f"has no language model that can run alone: {whole.__name__} has its own `generate`")

    def initialise(self: PreTrainedModel, config: PreTrainedConfig, *others: Any, **more: Any) -> None:
        for part in (getattr(config, name, None) for name in config.sub_configs):
            if part is not None and part is not config.get_text_config():
                part._attn_implementation = "eager"  # some towers reject other values, although they are removed later
        whole.__init__(self, config, *others, **more)
        text = {*self.get_decoder().modules(), self.get_output_embeddings()}
        _strip(self, text)

    return type(whole.__name__, (whole,), {"__init__": initialise, "__module__": whole.__module__})


def _strip(module: nn.Module, text: set[nn.Module | None]) -> None:
    """Replace each submodule that contains no part of the language model with an empty module, to free its weights."""
    for name, child in module.named_children():
        if child in text:
            continue
        if text.isdisjoint(child.modules()):
            setattr(module, name, nn.Module())
        else:
            _strip(child, text)
