"""What a GGUF file says of its model, in transformers' words: its config.json, its weights' names.

One table of architectures. All others are refused by name, because a tensor or a setting that is passed over would make
another model. The names of tensors are those of llama.cpp's own package, or of transformers where the layers are more
than attention and an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES

from app.errors import UnsupportedModel
from app.model.architectures import ARCHITECTURES, Architecture
from app.model.gguf.reader import READ_INSTEAD, GgufFile, GgufTensor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """An architecture of llama.cpp as transformers has it."""

    model_type: str
    class_name: str
    turns_neighbours: bool = False  # llama.cpp turns the pairs (0, 1), (2, 3) of a head, and not the two halves
    known: frozenset[str] = frozenset()  # settings beside `_KNOWN`
    # More of config.json, or other values: from the settings, and the parameters of rotary positions.
    more: Callable[[_Settings, dict[str, Any]], dict[str, Any]] = lambda settings, rope: {}


def _gemma2(settings: _Settings, _rope: dict[str, Any]) -> dict[str, Any]:
    """Every other layer looks back a window. Scores and logits have soft limits."""
    num_layers, num_heads = settings.count("block_count"), settings.count("attention.head_count")
    hidden_size = settings.count("embedding_length")
    layers_of_27b = 46  # the only size that scales scores by another size than that of a head
    head_size = settings.count("attention.key_length", hidden_size // num_heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.count("attention.sliding_window", 4096),
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == layers_of_27b else head_size,
    }


def _gemma3(settings: _Settings, rope: dict[str, Any]) -> dict[str, Any]:
    """Every sixth layer looks back to the start, with scaled positions; the others look back a window."""
    num_layers, num_heads = settings.count("block_count"), settings.count("attention.head_count")
    hidden_size = settings.count("embedding_length")
    every = settings.count("attention.sliding_window_pattern", 6)
    layers_of_27b = 62  # the only size that scales scores by another size than that of a head
    head_size = settings.count("attention.key_length", hidden_size // num_heads)
    theta = settings.number("rope.freq_base_swa", 10_000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == layers_of_27b else head_size,
    }  # fmt: skip


def _granite(settings: _Settings, _rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": settings.number("attention.scale"),
        "embedding_multiplier": settings.number("embedding_scale"),
        "residual_multiplier": settings.number("residual_scale"),
        "logits_scaling": settings.number("logit_scale"),
    }


def _smollm3(settings: _Settings, _rope: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rotary positions."""
    every = 4
    has_rope = [int((layer + 1) % every != 0) for layer in range(settings.count("block_count"))]
    return {"no_rope_layer_interval": every, "no_rope_layers": has_rope, "use_sliding_window": False}


_ARCHITECTURES = {
    "llama": _Family(model_type="llama", class_name="LlamaForCausalLM", turns_neighbours=True),
    "qwen2": _Family(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": _Family(model_type="qwen3", class_name="Qwen3ForCausalLM"),
    "qwen3moe": _Family(model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM"),
    "olmo2": _Family(model_type="olmo2", class_name="Olmo2ForCausalLM"),
    "gemma2": _Family(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        known=frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
        more=_gemma2,
    ),
    "gemma3": _Family(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        known=frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")),
        more=_gemma3,
    ),
    "granite": _Family(
        model_type="granite",
        class_name="GraniteForCausalLM",
        turns_neighbours=True,
        known=frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale")),
        more=_granite,
    ),
    "smollm3": _Family(model_type="smollm3", class_name="SmolLM3ForCausalLM", turns_neighbours=True, more=_smollm3),
}
# Of these, transformers' own tables have the configuration, the names and the changes: the settings beside `_KNOWN`.
_BY_TRANSFORMERS = {
    "lfm2": frozenset(("shortconv.l_cache",)),
    "qwen35": frozenset(
        (
            "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
            "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers",
        )
    ),
}  # fmt: skip
_EXPERT = "{expert}"  # in the name of a weight: each expert has its own, while a file has one tensor for all
# By transformers' type: the part of a layer that has them, names of their weights, of their number in config.json.
_EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts"),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
}
_FACTORS = "rope_freqs.weight"
# Of `rope_type: llama3`; all models of the families 3.1 to 3.3 have these, with a factor of 8 or 32.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_KNOWN = frozenset(
    (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
        "expert_count", "expert_used_count", "expert_feed_forward_length",
    )
)  # fmt: skip
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


Values = np.ndarray[Any, Any]  # as `GgufFile.values` gives them
Change = Callable[[Values], Values]


@dataclass(frozen=True, slots=True)
class Description:
    """A model as transformers describes it."""

    config: dict[str, Any]  # config.json
    eos_token_ids: list[int]
    tensors: dict[str, GgufTensor]  # by transformers' name of the weight
    shapes: dict[str, tuple[int, ...]]  # of the weights, by the same names
    changes: dict[str, Change]  # what makes such a weight of a tensor's values, where these differ
    # Of matrices that differ from the tensor in their order alone: the tensor's row for each row, likewise columns.
    rows: dict[str, Values]
    columns: dict[str, Values]


def describe(file: GgufFile) -> Description:
    """Raises UnsupportedModel, by name, for an architecture, a setting or a tensor that cannot be read."""
    architecture = str(file.metadata.get("general.architecture"))
    known = [*_ARCHITECTURES, *_BY_TRANSFORMERS]
    if architecture == "clip":
        raise UnsupportedModel(
            f"{file.path} has what a model sees images with (mmproj), and no model; set model.path to the GGUF file of "
            f"the model itself, whose text is served"
        )
    if architecture not in known:
        raise UnsupportedModel(
            f"{file.path} is of architecture {architecture[:60]!r}; GGUF files of {', '.join(known)} can be read: "
            f"{READ_INSTEAD}"
        )
    if architecture in _BY_TRANSFORMERS:
        return _as_transformers_knows(file, _Settings(file, architecture, _BY_TRANSFORMERS[architecture]))
    family = _ARCHITECTURES[architecture]
    config = _config(file, family, _Settings(file, architecture, family.known))
    names = _names(config, _own_config(file, config), architecture)
    _check_tensors(file, names)
    tensors: dict[str, GgufTensor] = {}
    for source, (name, _) in names.items():
        tensor = file.tensors[source]
        parts = enumerate(tensor.parts()) if _EXPERT in name else [(0, tensor)]
        tensors |= {name.replace(_EXPERT, str(expert)): part for expert, part in parts}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    eos_token_ids, rows = _eos_token_ids(file.metadata), _turned_rows(shapes, family, config)
    return Description(config, eos_token_ids, tensors, shapes, _changes(tensors, config), rows, {})


def _turned_rows(
    shapes: Mapping[str, tuple[int, ...]], family: _Family, config: Mapping[str, Any]
) -> dict[str, Values]:
    """Rows of queries and keys as transformers rotates them: the first half of a head against the second.

    llama.cpp rotates neighbours (0, 1), (2, 3).
    """
    if not family.turns_neighbours:
        return {}
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    return {
        name: np.arange(shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        for name, shape in shapes.items()
        for end, num_heads in heads.items()
        if name.endswith(f".{end}")
    }


def _changes(tensors: Iterable[str], config: Mapping[str, Any]) -> dict[str, Change]:
    [class_name] = config["architectures"]
    offset = np.float32(ARCHITECTURES.get(class_name, Architecture()).norm_offset)
    return {name: lambda values: values - offset for name in tensors if offset and name.endswith("norm.weight")}


@contextmanager
def _refusing(file: GgufFile) -> Iterator[None]:
    """Raises UnsupportedModel in place of the errors of transformers, whose classes check their fields."""
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


def _as_transformers_knows(file: GgufFile, settings: _Settings) -> Description:
    """The description by the tables of transformers."""
    import torch
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf import get_gguf_config, get_gguf_conversion_mapping

    for key in ("rope.scaling.type", "expert_count"):
        if settings.text(key, "none") != "none":
            raise settings.refusal(key, settings.text(key, ""))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or settings.count("block_count") > len(file.tensors):
        raise UnsupportedModel(f"{file.path} has fewer tensors than layers, or no token_embd.weight; {READ_INSTEAD}")
    tokens = {"tokenizer.ggml.tokens": embedding.shape[0]}  # their number
    with _refusing(file):
        config = get_gguf_config(dict(file.metadata) | tokens, tuple(file.tensors))
    config["dtype"] = embedding.dtype
    own = _own_config(file, config)
    mapping = get_gguf_conversion_mapping(settings.architecture, own)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each.operations for each in converters for pattern in each.source_patterns}
    expected = dict(_shapes_of(own))
    tensors: dict[str, GgufTensor] = {}
    changes: dict[str, Change] = {}
    rows: dict[str, Values] = {}
    columns: dict[str, Values] = {}
    orders: dict[tuple[str | None, tuple[int, ...]], tuple[Values, Values] | None] = {}
    for source, tensor in file.tensors.items():
        name, pattern = rename_source_key(source, renamings, converters)
        if name.startswith("mtp."):  # predicts tokens ahead; transformers has no code for it
            continue
        if operations := by_pattern.get(pattern):
            change = partial(_converted, operations, name)
            if (pattern, tensor.shape) not in orders:
                orders[pattern, tensor.shape] = _order_of(change, tensor.shape)
            order = orders[pattern, tensor.shape]
            if order is None:
                changes[name] = change
            else:
                rows[name], columns[name] = order
        if name not in expected:
            raise UnsupportedModel(
                f"{file.path}: tensor {source} is not part of a {settings.architecture} model that can be read; "
                f"{READ_INSTEAD}"
            )
        with torch.device("meta"):
            shape = tuple(_applied(operations or [], name, torch.empty(tensor.shape)).shape)
        if shape != expected[name]:
            raise UnsupportedModel(
                f"{file.path}: tensor {source} has the shape {list(tensor.shape)}, so {name} would have "
                f"{list(shape)}; expected {list(expected[name])}"
            )
        tensors[name] = tensor
    if missing := expected.keys() - tensors.keys():
        raise UnsupportedModel(
            f"{file.path} has no tensor for {min(missing)}, and {len(missing) - 1:,} more are missing"
        )
    return Description(config, _eos_token_ids(file.metadata), tensors, expected, changes, rows, columns)


def _order_of(change: Change, shape: tuple[int, ...]) -> tuple[Values, Values] | None:
    """The rows and the columns that a change of a matrix takes, if it does no more than that."""
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
    """What transformers makes of a tensor's values."""
    import torch

    result: Values = _applied(operations, name, torch.from_numpy(np.array(values))).contiguous().numpy()
    return result


def _applied(operations: Sequence[Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    for operation in operations:
        found = operation.convert({name: tensor}, source_patterns=[name], target_patterns=[name], full_layer_name=name)
        [tensor] = found.values()
    return tensor


def _shapes_of(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of a model, by their names; those that are tied once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    for name, weight in module.named_parameters():
        yield name, tuple(weight.shape)


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


class _Settings:
    """The settings of one architecture in a file's metadata."""

    def __init__(self, file: GgufFile, architecture: str, known: frozenset[str]) -> None:
        self._file = file
        self.architecture = architecture
        prefix = f"{architecture}."
        self._found = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        for key, value in self._found.items():
            if key not in _KNOWN | known and value:
                raise self.refusal(key, value)

    def count(self, key: str, default: int | None = None) -> int:
        """Raises UnsupportedModel when it is no positive integer, or there is none and no default."""
        value = self._found.get(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedModel when it is no positive number, or there is none and no default."""
        value = self._found.get(key, default)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            raise self.refusal(key, value)
        return value

    @property
    def has_experts(self) -> bool:
        return bool(self._found.get("expert_count"))

    def text(self, key: str, default: str) -> str:
        return str(self._found.get(key, default))

    def refusal(self, key: str, value: object) -> UnsupportedModel:
        shown = f"{self.architecture}.{key} is {repr(value)[:60]}"
        return UnsupportedModel(f"{self._file.path}: {shown}, which cannot be read; {READ_INSTEAD}")


def _config(file: GgufFile, family: _Family, settings: _Settings) -> dict[str, Any]:
    """The content of config.json."""
    hidden_size, num_heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.count(key, head_dim) != head_dim:
            raise settings.refusal(key, settings.count(key))
    if head_dim % 2:
        raise settings.refusal("attention.key_length", head_dim)
    num_layers = settings.count("block_count")
    if num_layers > len(file.tensors):  # before their names are made: a damaged number may be larger than any memory
        raise settings.refusal("block_count", num_layers)
    embedding = file.tensors.get("token_embd.weight")
    kind, class_name = family.model_type, family.class_name
    if kind == "llama" and settings.has_experts:
        kind, class_name = "mixtral", "MixtralForCausalLM"
    rope = _rope(file, settings, head_dim)
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


def _experts(settings: _Settings, kind: str) -> dict[str, Any]:
    """What config.json says of a mixture of experts. llama.cpp has the weights of a token's experts sum up to one."""
    if kind not in _EXPERTS:
        if settings.has_experts:
            raise settings.refusal("expert_count", settings.count("expert_count"))
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


def _rope(file: GgufFile, settings: _Settings, head_dim: int) -> dict[str, Any]:
    theta = settings.number("rope.freq_base", 10_000.0)
    kind = settings.text("rope.scaling.type", "none")
    factors = file.tensors.get(_FACTORS)
    if factors is not None:
        found = file.values(factors).astype(np.float32)
        factor = float(found.max(initial=1.0))
        is_known = found.shape == (head_dim // 2,)
        if not is_known or not np.allclose(found, _llama3_factors(theta, head_dim, factor), rtol=1e-3):
            raise UnsupportedModel(f"{file.path}: tensor {_FACTORS} scales positions in an unknown way; {READ_INSTEAD}")
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": settings.number("rope.scaling.factor")}
    if kind != "none":
        raise settings.refusal("rope.scaling.type", kind)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, Any]:
    """By how much llama.cpp divides each frequency for `rope_type: llama3`."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, length = _LLAMA3.values()
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < length / high, 1.0, np.where(wavelengths > length / low, factor, between))


def _names(config: dict[str, Any], own: PreTrainedConfig, architecture: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor of such a file: transformers' name of it and its shape. own: the same as transformers' class."""
    [number] = [each for each, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(number, config["num_hidden_layers"])
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    has_experts = config["model_type"] in _EXPERTS
    for name, shape in _shapes_of(own):
        if has_experts and ".mlp." in name:
            continue
        source = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if source is None:
            raise UnsupportedModel(f"llama.cpp has no name for {name} of a {architecture} model; {READ_INSTEAD}")
        names[source] = (name, shape)
    if has_experts:
        for index in range(config["num_hidden_layers"]):
            for source, (name, shape) in _expert_names(config).items():
                names[f"blk.{index}.{source}.weight"] = (f"model.layers.{index}.{name}.weight", shape)
    return names


def _expert_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The part of a layer's `_names` that a mixture of experts has, by the names of single experts."""
    part, (gate, up, down), count = _EXPERTS[config["model_type"]]
    experts, num_experts, hidden = f"{part}.experts.{_EXPERT}", config[count], config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    return {
        "ffn_gate_inp": (f"{part}.gate", (num_experts, hidden)),
        "ffn_gate_exps": (f"{experts}.{gate}", (num_experts, inner, hidden)),
        "ffn_up_exps": (f"{experts}.{up}", (num_experts, inner, hidden)),
        "ffn_down_exps": (f"{experts}.{down}", (num_experts, hidden, inner)),
    }


def _check_tensors(file: GgufFile, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    missing = [name for name in names if name not in file.tensors]
    if missing:
        raise UnsupportedModel(f"{file.path} has no tensor {missing[0]}, and {len(missing) - 1:,} more are missing")
    unknown = [name for name in file.tensors if name not in names and name != _FACTORS]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: tensor {unknown[0]} is not part of a {file.metadata['general.architecture']} model that can "
            f"be read; {READ_INSTEAD}"
        )
    for name, (_, shape) in names.items():
        found = file.tensors[name].shape
        if found != shape:
            raise UnsupportedModel(f"{file.path}: tensor {name} has the shape {list(found)}; expected {list(shape)}")
