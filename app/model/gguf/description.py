"""Translates a GGUF file's description of a model to transformers' terms: config.json and the names of weights.

The names of tensors come from llama.cpp's package `gguf`, with a few additions in families.py, or from transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES

from app.errors import UnsupportedModel
from app.model.architectures import ARCHITECTURES, Architecture
from app.model.gguf.families import BY_TRANSFORMERS, FAMILIES, ROTARY_TENSORS, ModelFamily, check_architecture
from app.model.gguf.reader import READ_INSTEAD, GgufFile, GgufTensor, Values
from app.model.gguf.settings import FileSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


_EXPERT = "{expert}"  # stands for the expert's index in weight names, because a file joins all experts in one tensor
# Model type → (module with the experts, names of their gate, up and down weights, field with the number of experts).
_EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts"),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


Change = Callable[[Values], Values]


@dataclass(frozen=True, slots=True)
class Description:
    """A GGUF file's model in transformers' terms. Weights are given by their names in transformers."""

    config: dict[str, Any]  # the content of config.json
    eos_token_ids: list[int]
    # A weight's tensors in the file. The rows of several tensors are joined in this order.
    tensors: dict[str, tuple[GgufTensor, ...]]
    shapes: dict[str, tuple[int, ...]]  # the shapes of the weights
    changes: dict[str, Change]  # compute a weight from a tensor's values, if these differ
    # For matrices that differ from their tensor only in order: the tensor's index of each row, and of each column.
    rows: dict[str, Values]
    columns: dict[str, Values]


def describe(file: GgufFile) -> Description:
    """Describe a file's model. Raises UnsupportedModel with the name of an unknown architecture, setting or tensor."""
    architecture = check_architecture(file)
    if architecture in BY_TRANSFORMERS:
        return _as_transformers_knows(file, FileSettings(file, BY_TRANSFORMERS[architecture]))
    family = FAMILIES[architecture]
    config = _config(file, family, FileSettings(file, family.known, family.by_layer))
    wanted = _wanted(file, family, config)
    _check_tensors(file, wanted, family)
    tensors: dict[str, tuple[GgufTensor, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in wanted.items():
        found = tuple(file.tensors[source] for source in weight.sources)
        if _EXPERT in name:
            of_experts = {name.replace(_EXPERT, str(expert)): part for expert, part in enumerate(found[0].parts())}
            tensors |= {own: (part,) for own, part in of_experts.items()}
            shapes |= {own: part.shape for own, part in of_experts.items()}
        else:
            tensors[name], shapes[name] = found, weight.shape
    eos_token_ids, rows = _eos_token_ids(file.metadata), _turned_rows(shapes, family, config)
    return Description(config, eos_token_ids, tensors, shapes, _changes(tensors, family, config), rows, {})


def _turned_rows(
    shapes: Mapping[str, tuple[int, ...]], family: ModelFamily, config: Mapping[str, Any]
) -> dict[str, Values]:
    """Return the orders that undo llama.cpp's reordering of queries and keys.

    llama.cpp rotates adjacent pairs (0, 1), (2, 3) of a head, and transformers pairs up the two halves of a head.
    """
    if not family.rotates_adjacent_pairs:
        return {}
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    return {
        name: np.arange(shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        for name, shape in shapes.items()
        for end, num_heads in heads.items()
        if name.endswith(f".{end}")
    }


def _changes(tensors: Iterable[str], family: ModelFamily, config: Mapping[str, Any]) -> dict[str, Change]:
    [class_name] = config["architectures"]
    offset = np.float32(ARCHITECTURES.get(class_name, Architecture()).norm_offset)
    by_end: dict[str, Change] = dict(family.changes)
    if offset:
        by_end["norm.weight"] = lambda values: values - offset
    return {name: change for name in tensors for end, change in by_end.items() if name.endswith(end)}


@contextmanager
def _refusing(file: GgufFile) -> Iterator[None]:
    """Raise UnsupportedModel for errors of any class that transformers' configurations raise for invalid fields."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModel(
            f"{file.path}: its settings do not describe a {file.metadata['general.architecture']} model: "
            f"{type(error).__name__}: {' '.join(str(error).split())}; {READ_INSTEAD}"
        ) from error


def _own_config(file: GgufFile, config: Mapping[str, Any]) -> PreTrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with _refusing(file):
        own: PreTrainedConfig = CONFIG_MAPPING[config["model_type"]](**config)
    return own


def _as_transformers_knows(file: GgufFile, settings: FileSettings) -> Description:
    """Describe a model with the tables of transformers' own GGUF reader."""
    import torch
    from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf import get_gguf_config, get_gguf_conversion_mapping

    settings.require_scaling("none")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or settings.count("block_count") > len(file.tensors):
        raise UnsupportedModel(f"{file.path} has fewer tensors than layers, or no token_embd.weight; {READ_INSTEAD}")
    tokens = {"tokenizer.ggml.tokens": embedding.shape[0]}  # transformers only needs the number of tokens
    with _refusing(file):
        config = get_gguf_config(dict(file.metadata) | tokens, tuple(file.tensors))
    config["dtype"] = embedding.dtype
    own = _own_config(file, config)
    recurrent = settings.flags("attention.recurrent_layers")
    if recurrent and recurrent[: own.num_hidden_layers] != [each == "linear_attention" for each in own.layer_types]:
        raise settings.refusal("attention.recurrent_layers", recurrent)
    mapping = get_gguf_conversion_mapping(settings.architecture, own)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each.operations for each in converters for pattern in each.source_patterns}
    # Pattern of a tensor whose rows are joined with others' → (its index, number of tensors).
    places = {
        pattern: (place, len(each.source_patterns))
        for each in converters
        if any(isinstance(operation, Concatenate) for operation in each.operations)
        for place, pattern in enumerate(each.source_patterns)
    }
    with _refusing(file):
        expected = dict(_shapes_of(own))
    tensors: dict[str, dict[int, GgufTensor]] = {}
    num_expected: dict[str, int] = {}  # number of tensors, by weight
    changes: dict[str, Change] = {}
    rows: dict[str, Values] = {}
    columns: dict[str, Values] = {}
    orders: dict[tuple[str | None, tuple[int, ...]], tuple[Values, Values] | None] = {}
    for source, tensor in file.tensors.items():
        name, pattern = rename_source_key(source, renamings, converters)
        if name.startswith("mtp."):  # multi-token prediction, which transformers does not support
            continue
        if name not in expected:
            raise UnsupportedModel(
                f"{file.path}: tensor {source} is not part of a {settings.architecture} model that can be read; "
                f"{READ_INSTEAD}"
            )
        place, num_parts = places.get(pattern, (0, 1))
        if place in tensors.setdefault(name, {}):
            raise UnsupportedModel(f"{file.path} has two tensors for {name}: {tensors[name][place].name}, {source}")
        tensors[name][place] = tensor
        num_expected[name] = num_parts
        shape = tensor.shape
        if num_parts == 1 and (operations := by_pattern.get(pattern)):
            change = partial(_converted, operations, name)
            if (pattern, tensor.shape) not in orders:
                orders[pattern, tensor.shape] = _order_of(change, tensor.shape)
            order = orders[pattern, tensor.shape]
            if order is None:
                changes[name] = change
            else:
                rows[name], columns[name] = order
            with torch.device("meta"):
                shape = tuple(_applied(operations, name, torch.empty(tensor.shape)).shape)
        if shape != part_of(expected[name], num_parts):
            raise UnsupportedModel(
                f"{file.path}: tensor {source} has the shape {list(tensor.shape)}, so {name} has {list(shape)}; "
                f"expected {list(part_of(expected[name], num_parts))}"
            )
    whole = {name for name, parts in tensors.items() if len(parts) == num_expected[name]}
    if missing := expected.keys() - whole:
        raise UnsupportedModel(
            f"{file.path} has no tensor for {min(missing)}, and {len(missing) - 1:,} more are missing"
        )
    in_order = {name: tuple(parts[place] for place in sorted(parts)) for name, parts in tensors.items()}
    return Description(config, _eos_token_ids(file.metadata), in_order, expected, changes, rows, columns)


def part_of(shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """Return the shape of each of `num_parts` equal tensors that make up a weight of this shape, joined by rows."""
    return (*shape[:-2], shape[-2] // num_parts, shape[-1]) if num_parts > 1 else shape


def _order_of(change: Change, shape: tuple[int, ...]) -> tuple[Values, Values] | None:
    """Return the orders of rows and columns if a change merely reorders a matrix, or None otherwise."""
    matrix = 2
    if len(shape) != matrix:
        return None
    places = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    found = change(places)
    if found.shape != shape or found.dtype != places.dtype:
        return None
    rows, columns = found[:, 0] // shape[1], found[0] % shape[1]
    return (rows, columns) if np.array_equal(found, rows[:, None] * shape[1] + columns) else None


def _converted(operations: Sequence[Any], name: str, values: Values) -> Values:
    """Convert a tensor's values with transformers' operations."""
    import torch

    result: Values = _applied(operations, name, torch.from_numpy(np.array(values))).contiguous().numpy()
    return result


def _applied(operations: Sequence[Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    for operation in operations:
        found = operation.convert({name: tensor}, source_patterns=[name], target_patterns=[name], full_layer_name=name)
        [tensor] = found.values()
    return tensor


def _shapes_of(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a model's weights. Yields only the first of several tied weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    saved = module.state_dict()
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name in saved)
    for name, weight in (*module.named_parameters(), *buffers):
        yield name, tuple(weight.shape)


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


def _config(file: GgufFile, family: ModelFamily, settings: FileSettings) -> dict[str, Any]:
    hidden_size, num_heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", *(() if family.rotates_partially else ("rope.dimension_count",))):
        if settings.count(key, head_dim) != head_dim:
            raise settings.refusal(key, settings.count(key))
    if head_dim % 2:
        raise settings.refusal("attention.key_length", head_dim)
    num_layers = settings.count("block_count")
    if num_layers > len(file.tensors):  # a damaged number of layers could exhaust memory
        raise settings.refusal("block_count", num_layers)
    embedding = file.tensors.get("token_embd.weight")
    kind, class_name = family.model_type, family.class_name
    if kind == "llama" and settings.has("expert_count"):
        kind, class_name = "mixtral", "MixtralForCausalLM"
    rope = family.rotary(settings, head_dim)
    tokenizer = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding")}
    return {
        "architectures": [class_name],
        "model_type": kind,
        "dtype": "float32" if embedding is None else embedding.dtype,
        "vocab_size": settings.count("vocab_size", 1) if embedding is None else embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.count("context_length"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokenizer["bos"],
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": tokenizer["padding"],
        **_experts(settings, kind),
        **family.more(settings, rope),
    }


def _experts(settings: FileSettings, kind: str) -> dict[str, Any]:
    """Return the config.json fields of a mixture of experts. llama.cpp normalises a token's weights to a sum of one."""
    if kind not in _EXPERTS:
        return {}
    num_experts, per_token = settings.count("expert_count"), settings.count("expert_used_count")
    if per_token > num_experts:
        raise settings.refusal("expert_used_count", per_token)
    counts: dict[str, Any] = {_EXPERTS[kind][2]: num_experts, "num_experts_per_tok": per_token}
    if kind == "mixtral":
        return counts
    return counts | {
        "moe_intermediate_size": settings.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


class _Wanted(NamedTuple):
    """The tensors in the file, and the shape, of one weight of the model, or of all experts' weights together."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]


def _wanted(file: GgufFile, family: ModelFamily, config: dict[str, Any]) -> dict[str, _Wanted]:
    """Return all weights of the model by their names in transformers. Raises UnsupportedModel for an unknown name."""
    architecture = file.metadata["general.architecture"]
    [number] = [each for each, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(number, config["num_hidden_layers"])
    wanted: dict[str, _Wanted] = {}
    has_experts = config["model_type"] in _EXPERTS
    own = _own_config(file, config)
    with _refusing(file):
        shapes = list(_shapes_of(own))
    for name, shape in shapes:
        if has_experts and ".mlp." in name:
            continue
        sources = _sources_of(name, family, file.tensors)
        if sources is None:
            source = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if source is None:
                raise UnsupportedModel(f"llama.cpp has no name for {name} of a {architecture} model; {READ_INSTEAD}")
            sources = (source,)
        wanted[name] = _Wanted(sources, shape)
    if has_experts:
        for index in range(config["num_hidden_layers"]):
            for source, (name, shape) in _expert_names(config).items():
                wanted[f"model.layers.{index}.{name}.weight"] = _Wanted((f"blk.{index}.{source}.weight",), shape)
    return wanted


def _sources_of(name: str, family: ModelFamily, tensors: Mapping[str, GgufTensor]) -> tuple[str, ...] | None:
    """Return the tensors that the family's own table names for a weight, or None if llama.cpp's package names it."""
    alternatives = next((own for end, own in family.tensors.items() if name.endswith(end)), None)
    if alternatives is None:
        return None
    layer = name.removeprefix("model.layers.").partition(".")[0]
    named = [tuple(f"blk.{layer}.{source}" for source in sources) for sources in alternatives]
    return next((sources for sources in named if sources[0] in tensors), named[0])


def _expert_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (name in transformers, shape) of a layer's router and experts, by their tensor's name in the file."""
    part, (gate, up, down), count = _EXPERTS[config["model_type"]]
    experts, num_experts, hidden = f"{part}.experts.{_EXPERT}", config[count], config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    return {
        "ffn_gate_inp": (f"{part}.gate", (num_experts, hidden)),
        "ffn_gate_exps": (f"{experts}.{gate}", (num_experts, inner, hidden)),
        "ffn_up_exps": (f"{experts}.{up}", (num_experts, inner, hidden)),
        "ffn_down_exps": (f"{experts}.{down}", (num_experts, hidden, inner)),
    }


def _check_tensors(file: GgufFile, wanted: Mapping[str, _Wanted], family: ModelFamily) -> None:
    """Raise UnsupportedModel if a tensor is missing or unknown, or has the wrong shape."""
    sources = [source for weight in wanted.values() for source in weight.sources]
    missing = [source for source in sources if source not in file.tensors]
    if missing:
        raise UnsupportedModel(f"{file.path} has no tensor {missing[0]}, and {len(missing) - 1:,} more are missing")
    known = ROTARY_TENSORS.union(sources)
    unknown = [source for source in file.tensors if source not in known]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: tensor {unknown[0]} is not part of a {file.metadata['general.architecture']} model that can "
            f"be read; {READ_INSTEAD}"
        )
    for name, weight in wanted.items():
        expected = part_of(weight.shape, len(weight.sources))
        for source in weight.sources:
            found = file.tensors[source]
            is_same = found.shape == expected
            if name.endswith(family.reshaped):
                is_same = prod(found.shape) == prod(expected) and not found.is_quantised
            if not is_same:
                raise UnsupportedModel(
                    f"{file.path}: tensor {source} has the shape {list(found.shape)}; expected {list(expected)}"
                )
